"""The command `environments`: list environments, begin a new one, check one, and play one of its tasks."""
