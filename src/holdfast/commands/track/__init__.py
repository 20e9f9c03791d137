"""Experiment trackers: a process beside the run sends them the lines of `metrics.jsonl`; `track` does so afterwards."""
