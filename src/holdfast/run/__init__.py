"""A run on disk: run directory, atomic writes, locks, manifests, checkpoints, journal, metrics and weights."""
