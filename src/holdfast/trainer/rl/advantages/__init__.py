"""From rewards to advantages: how much better a rollout, or a token, was than what was to be expected.

To add one: a file here with its function, and its line in `holdfast.shared.config.registry`.
"""
