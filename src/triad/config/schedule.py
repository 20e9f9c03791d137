"""The learning-rate schedule: a pure function of configuration and step, so there is no state to save."""

from __future__ import annotations

import math

from triad.config.trainer import OptimConfig


def schedule_end(config: OptimConfig, max_steps: int) -> int | None:
    """Return the step at which the schedule ends; None where the rate never falls."""
    if config.schedule == "constant":
        return None
    return config.schedule_steps or max_steps


def learning_rate(step: int, config: OptimConfig, max_steps: int) -> float:
    """Return the learning rate of the 1-based optimizer step `step`.

    Linear warm-up to `lr` over `warmup_steps`, then constant, linear or cosine down to
    `lr * min_lr_ratio` at `schedule_steps` (unset: `max_steps`). Later steps keep that rate.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    end = schedule_end(config, max_steps)
    if end is None:
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    shape = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
