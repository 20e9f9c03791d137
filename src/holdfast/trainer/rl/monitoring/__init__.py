"""What is watched while RL trains: metrics of a step, alerts, and whether trainer and engine compute the same model."""
