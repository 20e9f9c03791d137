"""What the trainer, the orchestrator and the inference server share. Imports none of them, nor torch or vllm."""
