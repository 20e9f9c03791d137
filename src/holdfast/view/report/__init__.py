"""The command `report` and the live page: one HTML file with curves, timeline, evaluations and rollouts."""
