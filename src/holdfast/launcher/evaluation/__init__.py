"""Starts evaluations: one policy with its own server, or the checkpoints of a run one after the other."""
