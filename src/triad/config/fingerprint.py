"""Fingerprint of the configuration that shapes training."""

from __future__ import annotations

import msgspec
import xxhash

from triad.config.trainer import TrainingCommand

_FREE = {"output_dir", "dry_run", "clean", "ckpt", "parallel", "max_steps"}


def fingerprint(config: TrainingCommand) -> str:
    """Return the xxh3-128 of the settings that decide what a step computes.

    Where a run lies, how long it goes on, how often it is saved and over how many ranks it is
    spread may change on resume and do not count.
    """
    settings = config.model_dump(mode="json", exclude=_FREE)
    return xxhash.xxh3_128(msgspec.json.encode(settings, order="sorted")).hexdigest()
