"""Basics of every process: start and end of child processes, imports, heartbeats, events, GPUs and scratch space."""
