"""What lies in the directory of a run: how it is written, checked, locked and found."""
