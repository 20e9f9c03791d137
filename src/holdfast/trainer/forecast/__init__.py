"""Forecasts the memory and the messages of a training step, by the code that trains, on tensors without numbers."""
