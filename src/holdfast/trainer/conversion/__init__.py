"""Checkpoints as files for others: what `ckpt export` and `ckpt import` need torch for."""
