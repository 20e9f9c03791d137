"""Alerts: what the metrics of an RL run say is going wrong, reported once.

They follow the run through restarts: what came before is read from `metrics.jsonl`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from holdfast.shared.config.alerts import AlertsConfig

# Below these nobody needs to act, however much larger than before they are.
_MIN_REF_KLD = 0.01


_MIN_MISMATCH_KL = 1e-3


class Alerts:
    """Watches the metrics of one step after the other.

    Args:
        history: the metrics of the steps before, in order; what they gave rise to is not reported again.
    """

    def __init__(self, config: AlertsConfig, history: Iterable[Mapping[str, float | None]] = ()) -> None:
        self._config = config
        self._reported: set[str] = set()
        self._first_entropy: float | None = None
        self._recent: dict[str, deque[float]] = {}
        self._rules: dict[str, Callable[[Mapping[str, float | None]], str | None]] = {
            "ref_kld": self._ref_kld_jumps,
            "entropy": self._entropy_collapses,
            "mismatch_kl": self._mismatch_grows,
            "groups/zero_variance": self._rewards_are_equal,
        }
        for metrics in history:
            self.check(metrics)

    def check(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Return the new alerts of the next step."""
        found = []
        for name, rule in self._rules.items():
            value = metrics.get(name)
            if value is None:
                continue
            message = rule(metrics) if name not in self._reported else None
            self._recent.setdefault(name, deque(maxlen=self._config.window)).append(value)
            if message is not None:
                self._reported.add(name)
                found.append(message)
        return found

    def _ref_kld_jumps(self, metrics: Mapping[str, float | None]) -> str | None:
        if (median := self._exceeds("ref_kld", metrics, self._config.ref_kld_jump, _MIN_REF_KLD)) is None:
            return None
        return (
            f"ref_kld jumped to {metrics['ref_kld']:.3g} from {median:.3g}: the policy leaves its reference. Lower "
            "optim.lr, raise kl.coef, or go on from an earlier checkpoint"
        )

    def _mismatch_grows(self, metrics: Mapping[str, float | None]) -> str | None:
        if (median := self._exceeds("mismatch_kl", metrics, self._config.mismatch_growth, _MIN_MISMATCH_KL)) is None:
            return None
        return (
            f"mismatch_kl grew to {metrics['mismatch_kl']:.3g} from {median:.3g}: sampler and trainer disagree about "
            "the policy. Set loss.correction.type = truncate, lower async_level, or use equal dtypes for both"
        )

    def _entropy_collapses(self, metrics: Mapping[str, float | None]) -> str | None:
        entropy = metrics["entropy"]
        assert entropy is not None
        if self._first_entropy is None:
            self._first_entropy = entropy
        if entropy >= self._config.entropy_share * self._first_entropy:
            return None
        return (
            f"entropy fell to {entropy:.3g} nats from {self._first_entropy:.3g} at the first step: the policy hardly "
            "explores any more. Raise loss.clip_high, lower optim.lr, or add a KL penalty"
        )

    def _rewards_are_equal(self, metrics: Mapping[str, float | None]) -> str | None:
        share, recent = metrics["groups/zero_variance"], self._recent.get("groups/zero_variance", ())
        assert share is not None
        latest = [*recent, share][-self._config.window :]
        if len(latest) < self._config.window or min(latest) < self._config.zero_variance:
            return None
        return (
            f"{100 * share:.0f} % of the groups have equal rewards, for {len(latest)} steps: nothing is learned from "
            "them. Take easier or harder problems, a finer reward, a larger group_size, or dynamic_sampling"
        )

    def _exceeds(self, name: str, metrics: Mapping[str, float | None], factor: float, least: float) -> float | None:
        """Return the median of the window if the new value is `factor` times it and at least `least`."""
        value, recent = metrics[name], self._recent.get(name, ())
        if value is None or len(recent) < self._config.window or value < least:
            return None
        median = statistics.median(recent)
        return median if value > factor * median else None
