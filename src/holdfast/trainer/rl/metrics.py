"""Statistics of an RL step over all trained tokens, and alerts about metrics that go wrong.

The statistics cover all updates, micro-batches and ranks. Each alert is reported once, and again for
steps that a resume repeats. Alerts follow the run through restarts: they read earlier steps from `metrics.jsonl`.

Shape legend: N predicted tokens of one forward pass.
"""

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from holdfast.config.view import AlertsConfig
from holdfast.trainer.mesh import Mesh, Sums
from holdfast.trainer.rl.kl import k3
from holdfast.trainer.rl.losses import PolicyLossInput

_QUANTILES = (0.5, 0.95, 0.99)
_CLIPPED = ("clip_fraction/low", "clip_fraction/high", "clip_fraction/dual")
_OF_TOKENS = ("entropy", "ppo_kl", "mismatch_kl", *_CLIPPED)


class PolicyStatistics:
    """Sums of this rank, reduced once a step.

    Args:
        ages: every version age of the step's tokens, so that all ranks agree on the names.
        has_reference: whether the tokens have log-probabilities under a reference.
    """

    def __init__(self, ages: Sequence[int], *, has_reference: bool) -> None:
        self._ages = ages
        of_ages = [f"{name}/age_{age}" for age in ages for name in ("mismatch_kl", "tokens")]
        self._sums = Sums(*_OF_TOKENS, "loss", "tokens", "updates", *(("ref_kld",) if has_reference else ()), *of_ages)
        self._log_ratios: list[Tensor] = []

    def add_update(self, loss: float) -> None:
        """Count one update; `loss` is this rank's part."""
        self._sums.add({"loss": loss, "updates": 1.0})

    def add(self, data: PolicyLossInput, counts: Mapping[str, Tensor], entropy_N: Tensor, age_N: Tensor) -> None:
        """Add the tokens of one forward pass.

        Args:
            counts: the loss's own counts of tokens.
            entropy_N: in nats.
            age_N: versions by which the sampler was older.
        """
        self._sums.add(counts)
        if entropy_N.numel() == 0:
            return
        new_N, old_N = data.logprobs_N.detach().double(), data.old_logprobs_N.double()
        log_ratio_N = old_N - data.sampler_logprobs_N.double()
        mismatch_N = k3(log_ratio_N)
        terms: dict[str, Tensor | float] = {
            "tokens": float(entropy_N.numel()),
            "entropy": entropy_N.double().sum(),
            "ppo_kl": k3(new_N - old_N).sum(),
            "mismatch_kl": mismatch_N.sum(),
        }
        if data.reference_logprobs_N is not None:
            terms["ref_kld"] = k3(data.reference_logprobs_N.double() - new_N).sum()
        for age in self._ages:
            chosen_N = age_N == age
            # No selection by mask: the CPU would have to wait for the number of chosen tokens.
            terms[f"mismatch_kl/age_{age}"] = torch.where(chosen_N, mismatch_N, 0.0).sum()
            terms[f"tokens/age_{age}"] = chosen_N.sum()
        self._sums.add(terms)
        self._log_ratios.append(log_ratio_N)

    def fresh_mismatch(self, mesh: Mesh) -> float | None:
        """Return the mean `mismatch_kl` so far of tokens of age 0; None without such tokens. Collective."""
        names, own = ("mismatch_kl/age_0", "tokens/age_0"), self._sums.read()
        sums = mesh.sum({name: own.get(name, 0.0) for name in names})
        return sums[names[0]] / sums[names[1]] if sums[names[1]] else None

    def reduce(self, mesh: Mesh) -> dict[str, float]:
        """Return the metrics of the step, the same on every rank. Collective.

        All are means over trained tokens but these: `loss`, the mean of the updates; `mismatch/ratio_*`,
        quantiles and maximum of trainer over sampler; `mismatch/max_log_ratio`, in either direction."""
        log_ratios = torch.cat(self._log_ratios).cpu() if self._log_ratios else torch.zeros(0, dtype=torch.float64)
        ratios = mesh.concatenate(log_ratios.exp())
        sums = mesh.sum(self._sums.read())
        num_tokens, num_updates = max(1.0, sums.pop("tokens")), max(1.0, sums.pop("updates") / mesh.data_size)
        metrics = {"loss": sums.pop("loss") / num_updates}
        of_ages = {age: sums.pop(f"tokens/age_{age}") for age in self._ages}
        for name, value in sums.items():
            age = name.removeprefix("mismatch_kl/age_")
            metrics[name] = value / (max(1.0, of_ages[int(age)]) if age != name else num_tokens)
        metrics["clip_fraction"] = sum(metrics[name] for name in _CLIPPED)
        largest = float(log_ratios.abs().max()) if len(log_ratios) else 0.0
        metrics |= mesh.max({"mismatch/max_log_ratio": largest})
        if len(ratios):
            found = torch.sort(ratios).values
            places = {f"p{round(100 * share)}": round(share * (len(found) - 1)) for share in _QUANTILES}
            places["max"] = len(found) - 1
            metrics |= {f"mismatch/ratio_{name}": float(found[place]) for name, place in places.items()}
        return metrics


def value_sums(returns_N: Tensor, values_N: Tensor) -> dict[str, Tensor | float]:
    """Return what `explained_variance` takes, of these tokens: sums, which add up over micro-batches and ranks.

    They are scalars on the device of the tokens."""
    returns_N, values_N = returns_N.detach().double(), values_N.detach().double()
    errors_N = returns_N - values_N
    return {
        "num_tokens": float(returns_N.numel()),
        "returns": returns_N.sum(),
        "squared_returns": returns_N.square().sum(),
        "errors": errors_N.sum(),
        "squared_errors": errors_N.square().sum(),
    }


def explained_variance(
    *, num_tokens: float, returns: float, squared_returns: float, errors: float, squared_errors: float
) -> float:
    """Return 1 - Var(returns - values) / Var(returns), from sums over tokens (`value_sums`).

    1: the critic is right except for a constant; 0: no better than a constant; below: worse. NaN where the returns do
    not differ, so that there is nothing to explain."""
    if num_tokens == 0:
        return float("nan")
    variance = squared_returns / num_tokens - (returns / num_tokens) ** 2
    error_variance = squared_errors / num_tokens - (errors / num_tokens) ** 2
    # The rounding of equal returns is not a variance.
    if variance <= 1e-14 * squared_returns / num_tokens:
        return float("nan")
    return 1 - error_variance / variance


# Below these nobody needs to act, however much larger than before they are.
_MIN_REF_KLD = 0.01
_MIN_MISMATCH_KL = 1e-3


class Alerts:
    """Watches the metrics of one step after the other. `history`: the metrics of the steps before, in order; what they
    gave rise to is not reported again."""

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
            "optim.lr, raise kl.coef, or continue from an earlier checkpoint"
        )

    def _mismatch_grows(self, metrics: Mapping[str, float | None]) -> str | None:
        if (median := self._exceeds("mismatch_kl", metrics, self._config.mismatch_growth, _MIN_MISMATCH_KL)) is None:
            return None
        return (
            f"mismatch_kl grew to {metrics['mismatch_kl']:.3g} from {median:.3g}: sampler and trainer disagree about "
            "the policy. If the reward falls, set trainer.loss.correction.type = truncate, lower async_level, or use "
            "equal dtypes for both"
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
            "explores any more. That is normal if the reward is high and a prompt has one good answer. If not, raise "
            "loss.clip_high, lower optim.lr, or add a KL penalty"
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
