"""Supervised samples: rows, tokens, and the packing of micro-batches."""
