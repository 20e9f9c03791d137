"""The trainer: `launch` forks one process for every rank, and each rank runs a program of `programs`."""
