"""The trainer: `launch` forks one process for every rank, and each runs a program of `programs`."""
