"""Which flag was meant by one that there is not: by its spelling, its last part, or its name in another system."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.shared.errors import nearest

ELSEWHERE = {
    "dataset_name": "data.name",
    "eval_steps": "val-interval",
    "gradient_accumulation_steps": "data.batch-size",
    "gradient_checkpointing": "model.activation-checkpointing",
    "learning_rate": "optim.lr",
    "max_completion_length": "sampling.max-tokens",
    "max_length": "data.seq-len",
    "max_seq_length": "data.seq-len",
    "model_name_or_path": "model.name",
    "num_generations": "group-size",
    "num_train_epochs": "max-steps",
    "packing": "data.pack",
    "per_device_train_batch_size": "data.micro-batch-size",
    "resume_from_checkpoint": "ckpt.resume-step",
    "save_steps": "ckpt.interval",
    "save_total_limit": "ckpt.keep",
    "train_batch_size": "data.batch-size",
}
"""What TRL and others call a setting, and the end of our flag for it; docs/coming_from.md has them all."""
_MOST = 3


def meant(flag: str, known: Iterable[str]) -> str:
    """Return `` Did you mean '--x'?`` for an unknown `flag`, or an empty string.

    Args:
        flag: as it was given, with its dashes.
        known: all flags, as `--optim.lr`.
    """
    flags = sorted((one for one in known if one.startswith("--")), key=lambda one: (len(one), one))
    last = flag.lstrip("-").rpartition(".")[2].replace("-", "_").lower()
    end = ELSEWHERE.get(last, last.replace("_", "-"))
    if like := [one for one in flags if one == f"--{end}" or one.endswith(f".{end}")]:
        is_sure = last in ELSEWHERE or like[0] == f"--{end}"
        names = " or ".join(f"'{one}'" for one in like[: 1 if is_sure else _MOST])
        return f" Did you mean {names}?"
    return nearest(flag, flags)
