"""From problems to batches: which version makes which, what goes into one, and handing it to the trainer."""
