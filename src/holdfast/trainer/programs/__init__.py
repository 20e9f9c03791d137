"""The training programs, one file each: `sft`, `dpo`, `reward-model`, `rl`."""
