"""Optimizers, and the clipping of gradients."""
