"""Starts evaluations: of one policy, or of each checkpoint of a run."""
