"""Which settings decide what is computed, and a fingerprint of them."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
import xxhash

from holdfast.shared.config.base import Command
from holdfast.shared.config.inference import InferenceConfig
from holdfast.shared.config.orchestrator import OrchestratorConfig
from holdfast.shared.config.rl_trainer import TrainerConfig
from holdfast.shared.config.schedule import schedule_end
from holdfast.shared.config.trainer import TrainingCommand

C = TypeVar("C", OrchestratorConfig, InferenceConfig)
_INDEX = re.compile(r"\[\d+\]")

FREE = frozenset({
    "output_dir", "dry_run", "clean", "log_format", "keep_attempts", "profile", "ckpt", "max_steps",
    "parallel", "val_interval", "eval",
    "data.cache_dir", "data.num_proc", "pretraining.data.cache_dir", "pretraining.data.num_proc",
    "alerts", "journal", "tracking", "prometheus", "dashboard", "mismatch_limit", "sampler_dtype",
    "batch_timeout_s", "hang_timeout_s", "startup_timeout_s", "save_timeout_s",
    "client", "weights_timeout_s", "environments[].timeout_s",
    "teacher.urls", "teacher.timeout_s", "teacher.ready_timeout_s", "teacher.max_concurrency",
    "server", "engines",
    "engine.threads", "engine.max_num_seqs", "engine.kv_cache_bytes", "engine.gpu_memory_utilization",
})  # fmt: skip
"""Settings of any process, by dotted key (`[]`: of every item), that may change on resume: where a run lies, how
long it goes on, how often it is saved, what is told about it, which machines and how many of them it runs on, and how
long it waits for what."""


def fingerprint(config: TrainingCommand) -> str:
    """Return the xxh3-128 of the settings that decide what a training step computes.

    `max_steps` does not count, but where the learning-rate schedules end does.
    """
    settings = _computing(config)
    settings["optim"]["schedule_steps"] = schedule_end(config.optim, config.max_steps)
    if isinstance(config, TrainerConfig) and config.critic is not None:
        settings["critic"]["optim"]["schedule_steps"] = schedule_end(config.critic.optim, config.max_steps)
    return xxhash.xxh3_128(msgspec.json.encode(settings, order="sorted")).hexdigest()


def makes_same_batches(before: C, after: C) -> bool:
    """Return whether two orchestrators, or two engines, make the same batches when the same weights sample them."""
    return _computing(before) == _computing(after)


def is_free(key: str) -> bool:
    """Return whether the setting `key`, such as `environments[0].timeout_s`, may change on resume."""
    name = _INDEX.sub("[]", key)
    return any(name == free or name.startswith((f"{free}.", f"{free}[")) for free in FREE)


def _computing(config: Command) -> dict[str, Any]:
    """Return the settings of `config` that are not free."""
    return _without_free(config.model_dump(mode="json"), "")


def _without_free(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        places = {name: f"{key}.{name}" if key else name for name in value}
        return {name: _without_free(item, places[name]) for name, item in value.items() if not is_free(places[name])}
    if isinstance(value, list):
        return [_without_free(item, f"{key}[]") for item in value]
    return value
