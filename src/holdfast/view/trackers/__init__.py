"""Experiment trackers: TensorBoard, W&B, MLflow, Trackio, a user's own class, and Prometheus."""
