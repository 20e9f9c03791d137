"""The command `environments`: list environments, begin a new one, and check one."""
