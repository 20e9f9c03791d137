"""Which settings decide what is computed, and a fingerprint of them."""

from __future__ import annotations

import msgspec
import xxhash

from triad.config.base import Command
from triad.config.orchestrator import OrchestratorConfig
from triad.config.rl_trainer import TrainerConfig
from triad.config.schedule import schedule_end
from triad.config.trainer import TrainingCommand

FREE = frozenset({
    "output_dir", "dry_run", "clean", "ckpt", "max_steps",
    "parallel", "val_interval", "batch_timeout_s", "alerts",
    "client", "weights_timeout_s",
    "server", "engine.threads", "engine.max_num_seqs", "engine.kv_cache_bytes", "engine.gpu_memory_utilization",
})  # fmt: skip
"""Settings of any process, by dotted key, that may change on resume: where a run lies, how long it goes on,
how often it is saved, what is told about it, and which machines and how many of them it runs on."""


def fingerprint(config: TrainingCommand) -> str:
    """Return the xxh3-128 of the settings that decide what a training step computes.

    `max_steps` does not count, but where the learning-rate schedules end does.
    """
    settings = config.model_dump(mode="json", exclude=_excluded(config))
    settings["optim"]["schedule_steps"] = schedule_end(config.optim, config.max_steps)
    if isinstance(config, TrainerConfig) and config.critic is not None:
        settings["critic"]["optim"]["schedule_steps"] = schedule_end(config.critic.optim, config.max_steps)
    return xxhash.xxh3_128(msgspec.json.encode(settings, order="sorted")).hexdigest()


def makes_same_batches(before: OrchestratorConfig, after: OrchestratorConfig) -> bool:
    """Return whether two orchestrators make the same batches when the same weights sample them."""
    return before.model_dump(exclude=_excluded(before)) == after.model_dump(exclude=_excluded(after))


def _excluded(config: Command) -> set[str]:
    return {key for key in FREE if key in type(config).model_fields}
