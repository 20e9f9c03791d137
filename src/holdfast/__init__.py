"""Post-training for language models that survives being killed at any moment."""
