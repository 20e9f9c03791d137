"""Estimates of an evaluation with intervals (avg@k, pass@k), per environment, and paired comparison of two evaluations.

Every estimate is a mean over tasks, and its interval comes from the spread between tasks: samples of one task are not
independent. A comparison needs the same tasks on both sides, and tests the differences per task.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import ConfigError, DataError
from holdfast.orchestrator.evaluation.results import (
    FORMAT,
    ROLLOUTS_NAME,
    EvaluatedRollout,
    Tasks,
    differences,
    read_identity,
    read_tasks,
)
from holdfast.run import checked
from holdfast.run.choose_run import command_line
from holdfast.run.run_dir import SUMMARY_NAME, RunDir, number_of

if TYPE_CHECKING:
    import numpy as np

# numpy takes 0.1 s to import, and most runs do not need it: functions import it.

_SUBSETS = 10_000
_CHOSEN_AT_ONCE = 1_000_000
_SEED = 0
"""Seed of the subsets."""
_MOST_EXACT_TASKS = 16
"""For so many differences all 2^n subsets are taken."""
_NO_SKEWNESS = 1e-9


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks, and its confidence interval; None if the tasks say nothing about others."""

    value: float
    low: float | None
    high: float | None


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Return the chance that at least one of `k` samples solves a problem: `1 - C(n - c, k) / C(n, k)`.

    The unbiased estimator from n samples, c of which solved it (Chen et al. 2021, "Evaluating Large Language Models
    Trained on Code", section 2.1)."""
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def powers_up_to(num_samples: int) -> list[int]:
    """Return the k of pass@k for so many samples: powers of two, and the number itself."""
    return sorted({2**power for power in range(num_samples.bit_length())} | {num_samples})


def mean_over_tasks(values: Sequence[float], *, confidence: float) -> Estimate:
    """Return the mean of one value per task with a confidence interval.

    The interval is Wilson's if every value is 0 or 1, or all values are equal and from 0 to 1; there is none if all are
    equal outside of that. Otherwise it is the interval of Student's t, corrected for skewness, and cut to 0 and 1 if
    the values are. On 30 hard tasks, most with score 0, intervals of 95 % contain the mean in 93 % of cases or more,
    intervals of the percentile bootstrap in 87 %."""
    number = len(values)
    value = math.fsum(values) / number
    are_shares = min(values) >= 0.0 and max(values) <= 1.0
    if number == 1 or (min(values) == max(values) and not are_shares):
        return Estimate(value, None, None)
    if are_shares and (min(values) == max(values) or all(one in (0.0, 1.0) for one in values)):
        return Estimate(value, *wilson(value, number, confidence=confidence))
    low, high = without_skewness(values, confidence=confidence)
    return Estimate(value, max(low, 0.0), min(high, 1.0)) if are_shares else Estimate(value, low, high)


def wilson(share: float, trials: int, *, confidence: float) -> tuple[float, float]:
    """Return the score interval of a share (Wilson 1927, "Probable inference, the law of succession, ...").

    With z the normal quantile and p the share: (p + z²/2n ± z √(p(1 - p)/n + z²/4n²)) / (1 + z²/n). Unlike
    p ± z√(p(1 - p)/n) it is not a point if none or all succeed."""
    z = _normal_quantile(confidence)
    scale = 1 + z * z / trials
    center = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / scale
    # At the ends the two terms are equal up to rounding.
    low = 0.0 if share == 0 else max(0.0, center - half)
    high = 1.0 if share == 1 else min(1.0, center + half)
    return low, high


def without_skewness(values: Sequence[float], *, confidence: float) -> tuple[float, float]:
    """Return the interval of Student's t for a mean, of which a transformation takes the skewness.

    The monotone cubic of Hall 1992, "On the removal of skewness by transformation": with T the t
    statistic over √n and g the skewness of the values, T + g T² / 3 + g² T³ / 27 + g / 6n is nearly normal."""
    number, mean = len(values), math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (number - 1))
    if std**3 == 0:  # also for values that are equal up to rounding
        return mean, mean
    skewness = math.fsum((value - mean) ** 3 for value in values) / number / std**3
    third, quantile = skewness / 3, student_quantile(number - 1, confidence=confidence) / math.sqrt(number)

    def statistic(end: float) -> float:
        moved = end - skewness / (6 * number)
        return (math.cbrt(1 + 3 * third * moved) - 1) / third if abs(third) > _NO_SKEWNESS else moved

    return mean - std * statistic(quantile), mean - std * statistic(-quantile)


def student_quantile(degrees: int, *, confidence: float) -> float:
    """Return the quantile of Student's t, two-sided.

    The expansion at the normal quantile (Abramowitz and Stegun 1964, "Handbook of Mathematical Functions", 26.7.5): 0.1
    % off with 3 degrees of freedom, 11 % with 1."""
    z = _normal_quantile(confidence)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def _normal_quantile(confidence: float) -> float:
    return NormalDist().inv_cdf((1 + confidence) / 2)


@dataclass(frozen=True)
class PairedDifference:
    """How much higher the second of two values per task is.

    Attributes:
        difference: mean of second - first, with the interval of all differences that the test does not refuse; its ends
            are None with too few tasks to refuse any.
        p_value: of the two-sided sign-flip test; at most 1 - confidence exactly if the interval leaves out 0.
        num_higher: tasks where the second is higher.
        num_lower: tasks where it is lower.
    """

    difference: Estimate
    p_value: float
    num_higher: int
    num_lower: int


def paired_difference(first: Sequence[float], second: Sequence[float], *, confidence: float) -> PairedDifference:
    """Compare two values of each task.

    The test is Fisher's randomization test for pairs (Fisher 1935, "The Design of Experiments", section 21; in this
    field Dror et al. 2018, "The Hitchhiker's Guide to Testing Statistical Significance in NLP"): were the two equally
    good, each difference would have either sign with the same chance. To turn the signs of some differences gives a sum
    at least as large if, and only if, the mean of the turned differences is not above 0. The means of subsets say all:
    their share below 0 is the p of one side, and their quantiles are the interval of the differences that the test does
    not refuse (Hartigan 1969, "Using subsample values as typical values"). All subsets are taken of up to 16 tasks,
    10,000 at random of more; the empty one counts, as a hit (Phipson and Smyth 2010)."""
    import numpy as np

    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    means = _means_of_subsets(differences)
    # Sums in another order differ by their rounding.
    tiny = 1e-9 * float(np.abs(differences).max())
    hits = 1 + min(int((means <= tiny).sum()), int((means >= -tiny).sum()))
    # How many hits p needs to be above 1 - confidence; the means of that rank are the ends of the interval.
    trials = 1 + len(means)
    refused = math.floor((1 - confidence) * trials / 2 * (1 + 1e-9))
    low, high = None, None
    if refused:
        lower, upper = float(means[refused - 1]), float(means[len(means) - refused])
        low, high = (0.0 if abs(end) <= tiny else end for end in (lower, upper))
    return PairedDifference(
        Estimate(math.fsum(differences) / len(differences), low, high),
        min(1.0, 2 * hits / trials),
        int((differences > 0).sum()),
        int((differences < 0).sum()),
    )


def _means_of_subsets(values: np.ndarray) -> np.ndarray:
    """Return the means of subsets that are not empty, in ascending order."""
    import numpy as np

    number = len(values)
    if number <= _MOST_EXACT_TASKS:
        chosen = np.arange(1, 2**number)[:, None] >> np.arange(number) & 1
        return np.sort(chosen @ values / chosen.sum(axis=1))
    generator = np.random.default_rng(_SEED)
    most = max(1, _CHOSEN_AT_ONCE // number)  # so that memory stays bounded
    means = []
    for done in range(0, _SUBSETS, most):
        chosen = generator.integers(0, 2, (min(most, _SUBSETS - done), number))
        means.append(chosen @ values / np.maximum(1, chosen.sum(axis=1)))
    return np.sort(np.concatenate(means))


class EnvironmentSummary(msgspec.Struct, kw_only=True):
    """How the policy did in one environment.

    Attributes:
        num_tasks: tasks with rollouts.
        dropped: tasks without rollouts, by reason.
        estimates: `avg@k`, and `pass@1` to `pass@k` if the environment says what is solved.
        metrics: means over rollouts of the environment's other numbers.
        truncated: share of rollouts that a token limit ended.
        sampled_tokens: mean of a rollout; None without rollouts.
    """

    num_tasks: int
    dropped: dict[str, int]
    estimates: dict[str, Estimate]
    metrics: dict[str, float]
    truncated: float
    sampled_tokens: float | None


class Summary(msgspec.Struct, kw_only=True):
    """The result of an evaluation: who was evaluated, what was asked, and numbers by environment."""

    format: int = FORMAT
    policy: dict[str, Any]
    tasks: dict[str, Any]
    confidence: float
    environments: dict[str, EnvironmentSummary]

    def encode(self) -> bytes:
        return checked.encode(msgspec.to_builtins(self)) + b"\n"

    def metrics(self) -> dict[str, float]:
        """Return the numbers by slash-separated name, as in metrics.jsonl: `eval/<environment>/avg@8`."""
        found = {}
        for name, environment in self.environments.items():
            # The environment may have a number of its own with the name of an estimate.
            numbers = environment.metrics | {key: one.value for key, one in environment.estimates.items()}
            numbers["truncated"] = environment.truncated
            if environment.dropped:
                numbers["dropped"] = float(sum(environment.dropped.values()))
            found |= {f"eval/{name}/{key}": value for key, value in numbers.items()}
        return found


def summarize(tasks: Tasks, identity: Mapping[str, Any], *, confidence: float) -> Summary:
    """Return the summary of whole tasks, whatever their order; `identity` is the content of `evaluation.json`."""
    samples, names = identity["samples_per_task"], identity["environments"]
    return Summary(
        policy=dict(identity["policy"]),
        tasks={key: value for key, value in identity.items() if key not in ("policy", "libraries", "format")},
        confidence=confidence,
        environments={
            name: _of_environment(
                [group for key, group in sorted(tasks.items()) if key[0] == name], samples, confidence=confidence
            )
            for name in names
        },
    )


def read_evaluation(directory: Path) -> tuple[dict[str, Any], Tasks]:
    """Return what was evaluated in `directory`, and all its tasks. Raise DataError if it is unfinished or damaged."""
    identity = read_identity(directory)
    path = directory / ROLLOUTS_NAME
    samples = identity["samples_per_task"]
    tasks, damaged = read_tasks(path, samples_per_task=samples) if path.exists() else ({}, [])
    if damaged:
        run = directory.absolute().parent.parent
        if directory.absolute().parent.name == "evaluations" and RunDir(run).holds_run():
            line = command_line(
                "evaluate --run", run, ["--step", str(number_of(directory)), "--output-dir", "DIRECTORY"]
            )
            raise DataError(f"{damaged[0]}. `{line}` evaluates that step again, in a directory of its own")
        raise DataError(
            f"{damaged[0]}. Give the command that began the evaluation again: it plays that task again alone"
        )
    wanted = sum(section["num_tasks"] for section in identity["environments"].values())
    if len(tasks) != wanted:
        raise DataError(
            f"{directory} has {len(tasks)} of its {wanted} tasks: give the command that began it again, which goes on"
        )
    return identity, tasks


def summary_in(directory: Path) -> Summary:
    """Return the `summary.json` of a finished evaluation. Raises DataError if there is none, or it is damaged."""
    path = directory / SUMMARY_NAME
    try:
        return msgspec.convert(checked.decode(path.read_bytes()), Summary)
    except FileNotFoundError:
        raise DataError(f"{directory} holds no finished evaluation: it has no {SUMMARY_NAME}") from None
    except ValueError as error:  # msgspec raises ValueErrors, too
        raise DataError(f"{path} is damaged: {error}") from None


def estimates_of(groups: Sequence[Sequence[EvaluatedRollout]], samples: int) -> dict[str, list[float]]:
    """Return one value per task of `avg@k`, and of every `pass@k` if all rollouts say whether they solved it."""
    values = {f"avg@{samples}": [fmean([rollout.reward for rollout in group]) for group in groups]}
    if all(rollout.solved is not None for group in groups for rollout in group):
        solved = [sum(bool(rollout.solved) for rollout in group) for group in groups]
        for k in powers_up_to(samples):
            values[f"pass@{k}"] = [pass_at_k(samples, number, k) for number in solved]
    return values


def _of_environment(
    found: Sequence[Sequence[EvaluatedRollout]], samples: int, *, confidence: float
) -> EnvironmentSummary:
    dropped = Counter(group[0].dropped for group in found if group[0].dropped)
    groups = [group for group in found if not group[0].dropped]
    rollouts = [rollout for group in groups for rollout in group]
    if not rollouts:
        return EnvironmentSummary(
            num_tasks=0, dropped=dict(dropped), estimates={}, metrics={}, truncated=0.0, sampled_tokens=None
        )
    names = sorted({name for rollout in rollouts for name in rollout.metrics})
    lengths = [rollout.sampled_tokens for rollout in rollouts]
    return EnvironmentSummary(
        num_tasks=len(groups),
        dropped=dict(sorted(dropped.items())),
        estimates={
            name: mean_over_tasks(values, confidence=confidence)
            for name, values in estimates_of(groups, samples).items()
        },
        # A rollout may lack a metric.
        metrics={name: fmean([one.metrics[name] for one in rollouts if name in one.metrics]) for name in names},
        truncated=fmean([rollout.truncated for rollout in rollouts]),
        sampled_tokens=fmean(lengths),
    )


@dataclass(frozen=True)
class Line:
    """One number of one environment in both evaluations, such as `avg@8`, over the tasks that both have rollouts of."""

    environment: str
    name: str
    num_tasks: int
    first: Estimate
    second: Estimate
    paired: PairedDifference


@dataclass(frozen=True)
class Comparison:
    """The result of `evaluate --compare`.

    Attributes:
        differing: settings in which they differ, with both values; the tasks are the same.
        skipped: tasks that the first or the second has dropped.
        answers: the first rollout of both, for the first tasks of each environment.
    """

    policies: tuple[dict[str, Any], dict[str, Any]]
    differing: dict[str, tuple[Any, Any]]
    lines: list[Line]
    skipped: int
    answers: list[tuple[EvaluatedRollout, EvaluatedRollout]]


def compare(first: Path, second: Path, *, confidence: float = 0.95, answers: int = 0) -> Comparison:
    """Compare two finished evaluations; `answers`: for how many tasks of each environment to keep rollouts.

    Raises DataError if one is not finished, ConfigError if they did not ask the same tasks."""
    identities, tasks = zip(*(read_evaluation(directory) for directory in (first, second)), strict=True)
    _require_same_tasks(identities, tasks, (first, second))
    lines: list[Line] = []
    said: list[tuple[EvaluatedRollout, EvaluatedRollout]] = []
    skipped = 0
    for name in identities[0]["environments"]:
        pairs = [(tasks[0][key], tasks[1][key]) for key in sorted(tasks[0]) if key[0] == name]
        both = [pair for pair in pairs if not pair[0][0].dropped and not pair[1][0].dropped]
        skipped += len(pairs) - len(both)
        said += [(one[0], other[0]) for one, other in both[:answers]]
        if both:
            lines += _lines(name, both, [identity["samples_per_task"] for identity in identities], confidence)
    settings = ("samples_per_task", "sampling", "seq_len", "libraries")
    differing = {
        key: (identities[0][key], identities[1][key]) for key in settings if identities[0][key] != identities[1][key]
    }
    return Comparison((identities[0]["policy"], identities[1]["policy"]), differing, lines, skipped, said)


def _lines(
    environment: str,
    pairs: Sequence[tuple[Sequence[EvaluatedRollout], Sequence[EvaluatedRollout]]],
    samples: Sequence[int],
    confidence: float,
) -> list[Line]:
    values = [estimates_of([pair[side] for pair in pairs], samples[side]) for side in (0, 1)]
    averages = [f"avg@{number}" for number in samples]
    # avg@k means the same for every k, pass@k does not.
    names = [tuple(averages), *((name, name) for name in values[0] if name in values[1] and name not in averages)]
    return [
        Line(
            environment,
            one if one == other else f"{one} / {other}",
            len(pairs),
            mean_over_tasks(values[0][one], confidence=confidence),
            mean_over_tasks(values[1][other], confidence=confidence),
            paired_difference(values[0][one], values[1][other], confidence=confidence),
        )
        for one, other in names
    ]


def _require_same_tasks(
    identities: Sequence[Mapping[str, Any]], tasks: Sequence[Tasks], places: Sequence[Path]
) -> None:
    asked = [{key: identity[key] for key in ("seed", "environments")} for identity in identities]
    if asked[0] != asked[1]:
        differing = "; ".join(f"{key}: {one} and {other}" for key, one, other in differences(*asked))
        raise ConfigError(
            f"--compare: {places[0]} and {places[1]} did not ask the same tasks ({differing:.600}). Evaluate both with "
            "the same seed, environments and num_tasks."
        )
    for key, group in tasks[0].items():
        prompts = [group[0].prompt, tasks[1][key][0].prompt]
        if all(prompts) and prompts[0] != prompts[1]:
            raise ConfigError(
                f"--compare: task {key[1]} of '{key[0]}' has another prompt in {places[0]} than in {places[1]}: the "
                "environment, its data or the tokenizer changed in between. Evaluate both again."
            )
