"""The orchestrator: turns environments and inference servers into batches of scored rollouts.

Reads published weights, pushes them to the engines, samples, scores, and journals one batch per
optimizer step. Imports `shared` only.
"""
