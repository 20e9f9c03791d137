"""What a training step needs on each rank, found by the code that trains on tensors without numbers."""
