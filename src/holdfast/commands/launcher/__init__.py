"""Starting the processes of a run, watching them, and starting again what dies."""
