"""The engine's side of the weight push: reading what was published, checking it, and swapping it into the model."""
