"""A checkpoint library for any PyTorch training loop: a step is committed with checksums, or absent."""
