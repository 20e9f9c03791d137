"""Policy optimisation: from the rollouts of a batch to one step of the policy, and of its critic."""
