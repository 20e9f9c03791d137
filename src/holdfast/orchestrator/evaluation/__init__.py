"""Evaluates a policy on held-out tasks: rollouts, estimates with intervals, and paired comparisons.

`evaluator` draws the tasks and plays them, `results` keeps every rollout, and `statistics` computes estimates and
compares two evaluations of the same tasks. `main` is the process of the command `evaluate`; `online` evaluates during
an RL run; `check` checks the settings without playing.
"""
