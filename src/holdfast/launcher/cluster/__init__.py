"""Runs whose processes are spread over several hosts: this machine, SLURM allocations and Ray clusters."""
