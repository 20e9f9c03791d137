"""One training run on this rank: what it is made of, when it saves, when it stops, what it measures."""
