"""Checkpoints of a run: what is in them, how a save is committed, and how it is loaded on any number of ranks."""
