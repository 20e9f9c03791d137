"""Evaluates a policy on held-out tasks: rollouts, estimates with intervals, and paired comparisons."""
