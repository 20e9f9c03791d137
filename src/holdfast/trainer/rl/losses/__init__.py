"""Policy losses: pure functions of per-token tensors that return (loss, counts).

To add one: a file here with a function that makes its objective, and its line in `holdfast.shared.config.registry`.
"""
