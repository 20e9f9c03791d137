"""The cross-entropy of `sft`, and of the pretraining mix of `rl`."""
