"""Who holds up a run, in words: from the shares of time that trainer and engines spend waiting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Below this share of a step nobody waits for anybody in a way that is worth a change.
_LEAST_SHARE = 0.1
Metrics = Mapping[str, float | None]


@dataclass(frozen=True)
class Bottleneck:
    """What to look at to make a run faster.

    Attributes:
        who: `generation`, `training`, `weight update`, `checkpoints`, `evaluation`, or `none`.
        why: the figures, in words.
        trainer_waits: share of a step in which the trainer waits for its batch; None where it waits for none.
        engine_idle: share of the time of a batch in which no engine has a request; None without engines.
    """

    who: str
    why: str
    trainer_waits: float | None = None
    engine_idle: float | None = None

    def __str__(self) -> str:
        """Return the line that people see."""
        return f"no bottleneck ({self.why})" if self.who == "none" else f"bottleneck: {self.who} ({self.why})"


def find_bottleneck(recent: Iterable[Metrics]) -> Bottleneck | None:
    """Return who holds the run up in the steps `recent`, by their metrics; None where these do not say.

    What counts is the sum over the steps: one that waited for a start does not hide behind many short ones.
    """
    steps = list(recent)
    step_s = _total(steps, "time/step")
    if not step_s:
        return None
    batch_s = _total(steps, "time/batch")
    if not batch_s:  # no orchestrator: nobody to wait for but the storage
        share = _total(steps, "time/checkpoint") / step_s
        if share < _LEAST_SHARE:
            return None
        return Bottleneck("checkpoints", f"training waits {_percent(share)} of the time for a save")
    waits = _total(steps, "time/wait_for_batch") / step_s
    weighted = [((line.get("engine/idle_share") or 0.0), (line.get("time/batch") or 0.0)) for line in steps]
    idle = sum(share * seconds for share, seconds in weighted) / batch_s
    if max(waits, idle) < _LEAST_SHARE:
        return Bottleneck(
            "none", f"trainer waits {_percent(waits)} of a step, engines {_percent(idle)} idle", waits, idle
        )
    if waits >= idle:
        # The trainer waits for the orchestrator: for what part of its work?
        parts = {
            "generation": _total(steps, "time/generate"),
            "weight update": _total(steps, "time/update_weights"),
            "evaluation": _total(steps, "time/evaluate"),
        }
        who = max(parts, key=lambda name: parts[name])
        return Bottleneck(who, f"trainer waits {_percent(waits)} of a step", waits, idle)
    return Bottleneck("training", f"engines are idle {_percent(idle)} of the time", waits, idle)


def _total(steps: Iterable[Metrics], name: str) -> float:
    return sum(line.get(name) or 0.0 for line in steps)


def _percent(share: float) -> str:
    return f"{100 * min(1.0, share):.0f} %"
