"""Warns if the metrics show that training diverges or learns nothing.

Each condition is reported when it begins. Nothing is saved: a resumed run begins without a history.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Mapping

_JUMP = 1000.0
_RECENT_STEPS = 50
_ZERO_STEPS = 3
_HIGH_STEPS = 3
_HIGH_SHARE = 1.5
_HIGH_NATS = 1.0
_MISMATCH_KL = 1.0


class DivergenceWatch:
    """Checks the metrics of step after step."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._num_zeros = 0
        self._lowest = math.inf
        self._highest = -math.inf
        self._high: list[float] = []
        self._lasting: set[str] = set()

    def check(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Return the warnings of a step, without conditions that an earlier step has reported."""
        found = {
            "jump": self._jump(metrics),
            "zero": self._zero(metrics),
            "high": self._high_loss(metrics),
            "cut": _all_cut(metrics),
            "mismatch": _disagree(metrics),
        }
        new = [text for name, text in found.items() if text is not None and name not in self._lasting]
        self._lasting = {name for name, text in found.items() if text is not None}
        return new

    def _jump(self, metrics: Mapping[str, float | None]) -> str | None:
        norm = metrics.get("grad_norm")
        if not norm:
            return None
        median = statistics.median(self._norms) if self._norms else norm
        if norm <= _JUMP * median:
            self._norms.append(norm)
            return None
        return (
            f"the gradient norm is {norm:.3g}, and {median:.3g} was usual: training diverges. Lower optim.lr, or add "
            "optim.warmup_steps, and continue from an earlier checkpoint"
        )

    def _zero(self, metrics: Mapping[str, float | None]) -> str | None:
        self._num_zeros = self._num_zeros + 1 if metrics.get("grad_norm") == 0 else 0
        if self._num_zeros < _ZERO_STEPS:
            return None
        why = (
            "the answers of every group earn the same reward" if "reward/mean" in metrics else "the loss is at its end"
        )
        return (
            f"the gradient is exactly 0 for {_ZERO_STEPS} steps: nothing is learned any more. Perhaps {why}, or "
            "optim.lr was too high and has spoilt the weights"
        )

    def _high_loss(self, metrics: Mapping[str, float | None]) -> str | None:
        loss = metrics.get("loss")
        if loss is None or "mismatch_kl" in metrics:  # not the loss of `rl`
            return None
        if loss > max(_HIGH_SHARE * self._lowest, self._lowest + _HIGH_NATS, self._highest):
            self._high.append(loss)
        else:
            self._highest = max(self._highest, loss, *self._high)
            self._lowest = min(self._lowest, loss)
            self._high.clear()
        if len(self._high) < _HIGH_STEPS:
            return None
        return (
            f"the loss is {loss:.3g}, {self._lowest:.3g} was its best, and for {_HIGH_STEPS} steps it is above all "
            "before them: the model gets worse. Lower optim.lr, or add optim.warmup_steps, and continue from an "
            "earlier checkpoint"
        )


def finding_of(warning: str) -> str:
    """Return the first clause of a warning, without advice."""
    return re.split(r"[:.] ", warning, maxsplit=1)[0]


def _disagree(metrics: Mapping[str, float | None]) -> str | None:
    mismatch_kl = metrics.get("mismatch_kl")
    if mismatch_kl is None or mismatch_kl <= _MISMATCH_KL:
        return None
    return (
        f"mismatch_kl is {mismatch_kl:.3g} nats per token: the trained policy is far from the policy that sampled. "
        "Lower optim.lr or async_level, and continue from an earlier checkpoint"
    )


def _all_cut(metrics: Mapping[str, float | None]) -> str | None:
    if metrics.get("rollout/truncated") != 1:
        return None
    return (
        "all answers of the batch ended at a token limit, none by itself. Raise orchestrator.sampling.max_tokens (and "
        "orchestrator.seq_len), or ask for shorter answers. What cut answers count for: trainer.rewards.truncated"
    )
