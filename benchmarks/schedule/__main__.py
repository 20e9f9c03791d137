"""How full engines are under the two schedules, in virtual time: `python -m benchmarks.schedule`.

A model, not a measurement. The engine is an H100 with a model of 8B parameters: a decode step with b answers
takes 6.5 ms and 0.03 ms for each answer, and a token of prefill takes 25 us. Answers are log-normal (sigma 1) up to a
maximum. The trainer needs 0.9 of the time in which engines that are always full sample a batch. Prints tokens a second
as a share of such engines. `rounds` follows `holdfast.orchestrator.rounds`: its cache is cleared at a swap,
so what runs is computed again. `kept` shows what an engine could reach that keeps the cache.

With `--like RUN` the answers are those of a finished `rl` run, and `--engine` has the constants of another engine: what
`python -m benchmarks.schedule.calibrate` prints for it. Prints tokens a second of both schedules, and the ratio.
"""

import argparse
import functools
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast import read_metrics
from holdfast.run.journal import read_batch
from holdfast.run.run_dir import RunDir

STEPS = 24


@dataclass(frozen=True)
class Engine:
    """What an engine needs, in seconds.

    Attributes:
        base_s: of a decode step, whatever it decodes.
        answer_s: of each answer in a decode step.
        prefill_s: of a token of a prompt.
        round_s: of the requests of a round.
        slots: answers that run at once.
        prompt: tokens of a prompt.
        tail: tokens of the last block that a round computes again.
    """

    base_s: float = 6.5e-3
    answer_s: float = 3e-5
    prefill_s: float = 2.5e-5
    round_s: float = 2e-3
    slots: int = 256
    prompt: int = 300
    tail: int = 16


H100 = Engine()


@dataclass
class Answer:
    """An answer that has `left` tokens to sample; `begins` until its first round has been played."""

    group: int
    left: int
    done: int = 0
    begins: bool = True


@dataclass
class Cluster:
    """Engines, the lengths of their answers, and the time of a training step."""

    engines: int
    answers: int
    median: float
    longest: int
    engine: Engine = H100
    group: int = 8
    known: Sequence[int] = ()
    trains_s: float | None = None
    draws: random.Random = field(default_factory=lambda: random.Random(3))

    def length(self) -> int:
        """Return the tokens of the next answer: one of those that are `known`, else log-normal."""
        if self.known:
            return self.draws.choice(self.known)
        return max(8, min(self.longest, int(self.draws.lognormvariate(0.0, 1.0) * self.median)))

    @property
    def bound(self) -> float:
        """Tokens a second of engines that are always full."""
        mean = mean_length(self.median, self.longest)
        one = self.engine
        prompt_s = one.prefill_s * one.prompt / self.group
        return self.engines / ((one.base_s + one.answer_s * one.slots) / one.slots + prompt_s / mean)

    @property
    def train_s(self) -> float:
        """Seconds of a training step."""
        if self.trains_s is not None:
            return self.trains_s
        return 0.9 * self.answers * mean_length(self.median, self.longest) / self.bound

    def lengths(self, number: int) -> Iterator[int]:
        """Return the tokens of so many answers."""
        return (self.length() for _ in range(number))


@functools.cache
def mean_length(median: float, longest: int) -> float:
    """Return the mean tokens of an answer."""
    return statistics.fmean(Cluster(1, 1, median, longest).lengths(20000))


def played(engine: Engine, run: list[Answer], tokens: int, *, swapped: bool) -> tuple[float, int]:
    """Let each answer of one engine sample at most so many tokens; return the seconds and the number of tokens.

    An engine computes a prompt once for all answers of a group that run.
    """
    running_groups = {answer.group for answer in run if not answer.begins}
    prompts = {answer.group for answer in run} - (set() if swapped else running_groups)
    seconds = len(prompts) * engine.prompt * engine.prefill_s
    if swapped:
        seconds += sum(answer.done for answer in run) * engine.prefill_s
    parts = sorted(min(answer.left, tokens) for answer in run)
    before, running = 0, len(run)
    for part in parts:
        seconds += (part - before) * (engine.base_s + engine.answer_s * running)
        before, running = part, running - 1
    for answer in run:
        part = min(answer.left, tokens)
        answer.left, answer.done, answer.begins = answer.left - part, answer.done + part, False
    return seconds, sum(parts)


def strict(cluster: Cluster, async_level: int) -> float:
    """Return tokens a second if one version samples a whole batch, one batch after another."""
    now, trained, ready, begin, total = 0.0, 0.0, {0: 0.0}, (0.0, 0), 0
    for step in range(1, STEPS + 1):
        now = max(now, ready[max(0, step - 1 - async_level)])
        lengths = enumerate(cluster.lengths(cluster.answers))
        waiting = [Answer(number // cluster.group, length) for number, length in lengths]
        times, running = [now] * cluster.engines, [list[Answer]() for _ in range(cluster.engines)]
        while waiting or any(running):
            number = min((n for n in range(cluster.engines) if running[n] or waiting), key=lambda n: times[n])
            run = running[number]
            while waiting and len(run) < cluster.engine.slots:
                run.append(waiting.pop(0))
            seconds, tokens = played(cluster.engine, run, min(answer.left for answer in run), swapped=False)
            times[number], total = times[number] + seconds, total + tokens
            running[number] = [answer for answer in run if answer.left]
        now = max(times)
        trained = ready[step] = max(now, trained) + cluster.train_s
        begin = (now, total) if step == STEPS // 3 else begin
    return (total - begin[1]) / (now - begin[0])


def rounds(cluster: Cluster, async_level: int, tokens: int, *, is_kept: bool = False) -> float:
    """Return tokens a second in rounds of so many tokens."""
    size = cluster.answers // cluster.group
    now, trained, ready, begin, total = 0.0, 0.0, {0: 0.0}, (0.0, 0), 0
    running = [list[Answer]() for _ in range(cluster.engines)]
    waiting: list[Answer] = []
    missing: dict[int, int] = {}
    open_groups: list[int] = []
    done: list[int] = []
    scored: list[int] = []
    drawn = version = 0
    born: dict[int, int] = {}
    for step in range(1, STEPS + 1):
        wanted = max(0, step - 1 - min(1, async_level))
        now, swapped, version = max(now, ready[wanted]), wanted != version and not is_kept, wanted
        while not _may_take(step, done[:size], open_groups, size, born, async_level):
            while len(open_groups) < (version + 2 + async_level - step) * size:
                open_groups.append(drawn)
                missing[drawn], born[drawn] = cluster.group, version
                waiting += [Answer(drawn, length) for length in cluster.lengths(cluster.group)]
                drawn += 1
            while waiting and min(map(len, running)) < cluster.engine.slots:
                min(running, key=len).append(waiting.pop(0))
            results = [played(cluster.engine, run, tokens, swapped=swapped) for run in running]
            one = cluster.engine
            extra = [one.round_s + one.tail * len(run) * one.prefill_s if run else 0.0 for run in running]
            now += max(seconds + more for (seconds, _), more in zip(results, extra, strict=True))
            total += sum(number for _, number in results)
            swapped = False
            done, scored = sorted(done + scored), []
            for number, run in enumerate(running):
                for answer in run:
                    missing[answer.group] -= answer.left == 0
                    if answer.left == 0 and missing[answer.group] == 0:
                        scored.append(answer.group)
                running[number] = [answer for answer in run if answer.left]
        taken, done = done[:size], done[size:]
        open_groups = [group for group in open_groups if group not in taken]
        trained = ready[step] = max(now, trained) + cluster.train_s
        begin = (now, total) if step == STEPS // 3 else begin
    return (total - begin[1]) / (now - begin[0])


def _may_take(
    step: int, taken: list[int], open_groups: list[int], size: int, born: dict[int, int], async_level: int
) -> bool:
    """Whether these groups are a batch that leaves no other group too old."""
    left = [group for group in open_groups if group not in taken]
    is_late = any(born[group] + async_level < step + place // size for place, group in enumerate(left))
    return len(taken) == size and (taken == open_groups[:size] or not is_late)


def like(run: Path, engine: Engine, tokens: Sequence[int], async_level: int) -> None:
    """Print what the model says of a run: of its answers, its batches and its training steps."""
    run_dir = RunDir(run)
    batches = [read_batch(run_dir, step).rollouts for step in run_dir.published_batches()]
    sampled = [rollout.loss_mask.num_sampled for rollouts in batches for rollout in rollouts]
    prompt = round(
        statistics.fmean(len(one.token_ids) for batch in batches for one in batch) - statistics.fmean(sampled)
    )
    steps = read_metrics(run_dir.metrics)
    trains_s = statistics.median(step["time/step"] - step["time/wait_for_batch"] for step in steps)
    group = len({one.sample_index for one in batches[0]})
    told = {"group": group, "engine": replace(engine, prompt=prompt), "known": tuple(sampled), "trains_s": trains_s}
    print(f"prompts of {prompt} tokens, answers of {min(sampled)} to {max(sampled)}, training {trains_s:.3f} s a step")
    by_strict = strict(Cluster(1, len(batches[0]), 0.0, 0, **told), 1)
    print(f"strict, async_level 1: {by_strict:,.0f} tokens/s")
    for number in tokens:
        by_rounds = rounds(Cluster(1, len(batches[0]), 0.0, 0, **told), async_level, number)
        ratio = f"{by_strict / by_rounds:.2f} strict / rounds"
        print(f"rounds of {number}, async_level {async_level}: {by_rounds:,.0f} tokens/s, {ratio}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 8], help="(1 8)")
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 256, 512], help="of a round (128 256 512)")
    parser.add_argument(
        "--answers", nargs="+", type=int, default=[2, 4], help="of a batch, in slots of all engines (2 4)"
    )
    parser.add_argument("--async-level", type=int, default=3, help="of rounds; strict has 1 (3)")
    parser.add_argument("--like", type=Path, metavar="RUN", help="directory of a finished rl run, strict or in rounds")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="constants of its engine")
    arguments = parser.parse_args()
    if arguments.like is not None:
        like(arguments.like, Engine(**arguments.engine), arguments.tokens, arguments.async_level)
        return
    schedules: dict[str, Callable[[Cluster], float]] = {"strict": lambda cluster: strict(cluster, 1)}
    for tokens in arguments.tokens:
        schedules[f"rounds {tokens}"] = lambda cluster, n=tokens: rounds(cluster, arguments.async_level, n)
        schedules[f"kept {tokens}"] = lambda cluster, n=tokens: rounds(cluster, arguments.async_level, n, is_kept=True)
    print(f"| median/longest, engines, answers of a batch | {' | '.join(schedules)} |\n|---|{'---|' * len(schedules)}")
    for median, longest in ((1000.0, 8192), (4000.0, 32768)):
        for engines in arguments.engines:
            for answers in (number * H100.slots * engines for number in arguments.answers):
                shares = []
                for schedule in schedules.values():
                    cluster = Cluster(engines, answers, median, longest)
                    shares.append(f"{schedule(cluster) / cluster.bound:.2f}")
                print(f"| {median:.0f}/{longest}, {engines}, {answers} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
