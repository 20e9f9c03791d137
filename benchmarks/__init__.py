"""Benchmarks: each prints what it measured; none asserts a time."""
