"""The report of a run while it goes on: the launcher serves it on 127.0.0.1, and a process beside it makes it."""
