"""Decides where an attempt of a run starts: from scratch, a checkpoint, another run, or an object store."""
