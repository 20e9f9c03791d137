"""Decides where an attempt of a run starts: from scratch, from a checkpoint, from another run, or from an object store."""
