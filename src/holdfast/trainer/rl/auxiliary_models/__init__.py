"""Models beside the policy, and their state in checkpoints: critic, reference, average of the weights."""
