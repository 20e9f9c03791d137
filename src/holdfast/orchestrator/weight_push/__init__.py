"""From weights that the trainer published to weights that the engines serve."""
