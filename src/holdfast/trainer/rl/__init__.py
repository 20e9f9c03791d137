"""Policy optimisation: from the rollouts of a batch to one train step of the policy and its critic."""
