"""The trainer: FSDP2 training programs (`sft.py`, `rl.py`) and the parts they are made of."""
