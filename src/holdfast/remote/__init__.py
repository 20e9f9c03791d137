"""Checkpoints in an object store: upload in the background, listing, and download for a resume."""
