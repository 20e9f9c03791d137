"""The launcher: starts the processes of a run, watches them, restarts dead ones and ends the run."""
