"""transformers models with packing, attention kernels, LoRA, FSDP2, log-probabilities and published weights."""
