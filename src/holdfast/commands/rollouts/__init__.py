"""The command `rollouts`: look into the batches of an RL run, and export them."""
