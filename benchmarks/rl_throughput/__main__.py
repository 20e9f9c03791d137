"""Sampled and trained tokens/s of `rl` beside TRL's GRPOTrainer.

`uv run --group dev python -m benchmarks.rl_throughput`

Runs the quick start's `rl` command, and beside it, in turn and in another order every round, TRL and a synchronous
trainer that both generate with transformers on all cores (`trl_grpo.py`, `synchronous.py`), with the same model, tasks
and settings: once with answers of up to 24 tokens, the quick start's, and once with texts to reverse that are up to ten
times as long, and ragged answers of up to 256 tokens. The learning rate is so small that the policy stays what it is:
answers are sampled, and contestants whose policies went apart would have other numbers of tokens in a step. Prints
time per step, tokens/s, and ratios within rounds, and how busy trainer and engine of `rl` are: the share of time that
the trainer waits for batches, and that no request is in flight at the engine. With `--engines 2` also `rl` with two
engines beside `rl` with one, which share the same cores: more of both is what it would take to gain. With
`--round-tokens 64` also `rl` in rounds of so many tokens, with an async_level of 3.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import read_metrics
from holdfast.process.child import available_cores

HERE = Path(__file__).parent
SKIPPED_STEPS = 3
PROBLEMS, GROUP_SIZE = 16, 8
LENGTHS = {
    "24": {"max_tokens": 24, "seq_len": 64, "environment": {"min_length": 4, "max_length": 12}},
    "256": {"max_tokens": 256, "seq_len": 512, "environment": {"min_length": 4, "max_length": 200}},
}
"""By the longest answer in tokens; letters of the texts to reverse."""
LEARNING_RATE = 1e-7


@dataclass(frozen=True)
class Speed:
    """What a run comes to: median seconds of a step, and tokens that were sampled and trained, a second."""

    seconds: float
    tokens_per_s: float

    def __str__(self) -> str:
        return f"{self.seconds:.3f} s a step, {self.tokens_per_s:,.0f} tok/s"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", type=int, default=1, help="of another run of `rl`, beside that with one")
    parser.add_argument("--round-tokens", type=int, help="of another run of `rl`, in rounds")
    parser.add_argument("--lengths", default=",".join(LENGTHS))
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help=f"of {', '.join(CONTESTANTS)}")
    parser.add_argument("--model", default="examples/reverse_text/model")
    arguments = parser.parse_args()
    for what, known in (("lengths", LENGTHS), ("contestants", CONTESTANTS)):
        if unknown := set(getattr(arguments, what).split(",")) - set(known):
            parser.error(f"--{what} {','.join(sorted(unknown))}: there are {', '.join(known)}")
    if arguments.steps <= SKIPPED_STEPS + 2:
        parser.error(f"--steps {arguments.steps}: the first {SKIPPED_STEPS} and the last 2 are left out, so give more")
    for name in arguments.lengths.split(","):
        compare(f"answers of up to {name} tokens", arguments, LENGTHS[name])


CONTESTANTS: dict[str, Callable[[Path, dict[str, Any]], Speed]] = {
    "rl": lambda folder, settings: run_rl(folder, settings),
    "TRL": lambda _, settings: run_script("trl_grpo.py", settings),
    "synchronous": lambda _, settings: run_script("synchronous.py", settings),
}


def compare(title: str, arguments: argparse.Namespace, lengths: dict[str, Any]) -> None:
    """Measure all contestants in turn, several times, and print times, tokens/s and the ratios of tokens/s."""
    settings = {
        "model": arguments.model,
        "steps": arguments.steps,
        "threads": available_cores(),
        "lr": LEARNING_RATE,
        "problems": PROBLEMS,
        "group_size": GROUP_SIZE,
        "engines": 1,
        **lengths,
    }
    measured = {name: (CONTESTANTS[name], settings) for name in arguments.contestants.split(",")}
    if arguments.engines > 1:
        measured[f"rl, {arguments.engines} engines"] = (run_rl, settings | {"engines": arguments.engines})
    if arguments.round_tokens:
        measured["rl in rounds"] = (run_rl, settings | {"round_tokens": arguments.round_tokens})
    ratios: dict[str, list[float]] = {name: [] for name in measured if name != "rl" and "rl" in measured}
    for number in range(arguments.rounds):
        order = list(measured)
        order = order[number % len(order) :] + order[: number % len(order)]
        found = dict[str, Speed]()
        for name in order:
            with tempfile.TemporaryDirectory() as folder:
                run, own = measured[name]
                found[name] = run(Path(folder) / "run", own)
            print(f"{title}: {name} {found[name]}", flush=True)
        for name, column in ratios.items():
            column.append(found["rl"].tokens_per_s / found[name].tokens_per_s)
    for name, column in ratios.items():
        median = statistics.median(column)
        print(f"{title}: tok/s, rl / {name}: median {median:.2f} ({min(column):.2f} to {max(column):.2f})")
    print()


def run_rl(folder: Path, settings: dict[str, Any]) -> Speed:
    """Run the quick start with these settings, and print how busy its parts are."""
    engines, longest = settings["engines"], str(settings["seq_len"])
    environments = json.dumps([{"id": "reverse_text", "args": settings["environment"]}])
    command = [str(Path(sys.executable).parent / "rl"), "@", "configs/reverse_text/rl.toml"]
    command += ["--output-dir", str(folder), "--max-steps", str(settings["steps"]), "--model.name", settings["model"]]
    command += ["--trainer.optim.lr", str(settings["lr"]), "--inference.engines", str(engines)]
    command += ["--orchestrator.environments", environments]
    command += ["--orchestrator.sampling.max-tokens", str(settings["max_tokens"])]
    if tokens := settings.get("round_tokens"):
        command += [
            "--orchestrator.schedule",
            "rounds",
            "--async-level",
            "3",
            "--orchestrator.round-tokens",
            str(tokens),
        ]
    command += ["--orchestrator.seq-len", longest, "--inference.model.max-len", longest]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    steps = read_metrics(folder / "metrics.jsonl")
    # The run begins with the first engine that is ready.
    begin = next(
        number
        for number, step in enumerate(steps)
        if all(step[f"engine/{engine}/requests"] for engine in range(engines))
    )
    # The last batches are made with no training left to overlap with, so they are left out too.
    steps = steps[begin + SKIPPED_STEPS : -2]
    wall = sum(step["time/step"] for step in steps)
    waiting = sum(step["time/wait_for_batch"] for step in steps)
    idle = sum(step["engine/idle_share"] * step["time/batch"] for step in steps)
    made = sum(step["time/batch"] for step in steps)
    sampled = sum(step["rollout/sampled_tokens_mean"] for step in steps) * PROBLEMS * GROUP_SIZE
    print(f"rl: {PROBLEMS * GROUP_SIZE * len(steps) / wall:,.0f} rollouts/s")
    print(f"rl: trainer busy {1 - waiting / wall:.0%} (waits for batches {waiting / wall:.0%})")
    in_flight = [statistics.mean(step[f"engine/{engine}/in_flight"] for step in steps) for engine in range(engines)]
    print(f"rl: sequences in flight: {', '.join(f'{number:.1f}' for number in in_flight)}")
    print(f"rl: engine busy {1 - idle / made:.0%} (no request in flight {idle / made:.0%})", flush=True)
    return Speed(statistics.median(step["time/step"] for step in steps), sampled / wall)


def run_script(name: str, settings: dict[str, Any]) -> Speed:
    """Run a contestant that lies beside this file."""
    done = subprocess.run(
        [sys.executable, str(HERE / name), json.dumps(settings)], check=True, capture_output=True, text=True
    )
    steps = json.loads(done.stdout.splitlines()[-1])[SKIPPED_STEPS:-2]
    rate = sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps)
    return Speed(statistics.median(step["seconds"] for step in steps), rate)


if __name__ == "__main__":
    main()
