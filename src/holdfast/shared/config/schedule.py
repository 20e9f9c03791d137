"""The learning-rate schedule: a pure function of configuration and step, so there is no state to save."""

from __future__ import annotations

import math

from holdfast.shared.config.trainer import OptimConfig


def schedule_end(config: OptimConfig, max_steps: int) -> int | None:
    """Return the step at which the schedule ends; None where the rate never falls."""
    if config.schedule == "constant":
        return None
    return config.schedule_steps or max_steps


def learning_rate(step: int, config: OptimConfig, max_steps: int) -> float:
    """Return the learning rate of the 1-based optimizer step `step`; it is never 0.

    Linear warm-up, `lr * step / warmup_steps`; then `lr`, or from `lr` on the first step behind the warm-up down a
    line or half a cosine, which would be at `lr * min_lr_ratio` on the step behind `schedule_steps` (unset:
    `max_steps`). That is what transformers' schedules give after `step - 1` steps, and within the warm-up after
    `step`: theirs begins with a step at rate 0, which trains nothing.
    Steps behind `schedule_steps` keep the rate of that step.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    end = schedule_end(config, max_steps)
    if end is None:
        return config.lr
    progress = (min(step, end) - 1 - config.warmup_steps) / (end - config.warmup_steps)
    shape = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
