"""Preference training: pairs, labelled answers, losses, the reference, and the loop of `dpo` and `reward-model`."""
