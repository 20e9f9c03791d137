"""What the trainer, the orchestrator and the inference server agree on.

Configuration, run directory, manifest, journal, messages, metrics, errors and the launcher.
Imports none of the three, and neither torch nor vllm.
"""
