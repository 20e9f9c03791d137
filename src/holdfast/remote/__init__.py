"""Checkpoints in an object store: upload behind the training, listing, and download for a resume."""
