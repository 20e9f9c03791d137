"""Checkpoints on an object store."""
