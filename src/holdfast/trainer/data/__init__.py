"""Supervised samples: rows of datasets, tokens, sample order, and the packing of micro-batches."""
