"""Checkpoints, for our programs and for any training loop: what is in them, how a save is committed, and how it is
loaded on any number of ranks."""
