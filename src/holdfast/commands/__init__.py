"""The commands that users type beside training: `ckpt`, `rollouts`, `environments` and `evaluate`."""
