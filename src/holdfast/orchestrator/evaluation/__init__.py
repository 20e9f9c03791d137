"""How good a policy is on held-out tasks: its rollouts there, estimates with intervals, and paired comparisons.

`tasks` says what is asked, `evaluator` plays it, `results` keeps every rollout, `summary` counts, `comparison` holds
two evaluations of the same tasks against one another. `main` is the process of the command `evaluate`.
"""
