"""Trained tokens/s of `sft` beside TRL and a plain PyTorch loop.

`uv run --group dev python -m benchmarks.sft_throughput`

Same model, samples, batch and threads, all in float32, one after the other and in another order every round, because a
shared machine's speed changes within minutes; ratios are within rounds. Trained tokens are those of the samples,
without padding, over the time of all steps but the first few. Memory is the peak of the largest process. Three sizes
of model (0.6M, 25M, and 135M parameters with the layers and the vocabulary of SmolLM2) and three kinds of data: samples
of 44 tokens, samples of about 136 tokens, and ragged ones, whose lengths have the long tail of `benchmarks.balance`.

TRL's `SFTTrainer` runs in three ways: padded, its default; padded with `train_sampling_strategy = "group_by_length"`,
where samples of a step are of about one length, so that steps are others than those of the data; and with `packing`,
which on a CPU means a mask over the row, so that its rows go through the model one by one. The plain loop pads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.balance.__main__ import draw_lengths
from holdfast import read_metrics
from holdfast.process.child import available_cores

HERE = Path(__file__).parent
SKIPPED_STEPS = 3
SEQ_LEN = 512
NUM_SAMPLES = 2048
TEMPLATE_TOKENS = 8
"""That the template adds to the letters of a sample; a letter is a token."""
KINDS = ("short", "even", "ragged")
SIZES: dict[str, dict[str, Any]] = {
    "0.6M": {},
    "25M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 64},
    "135M": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
             "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
             "head_dim": 64},
}  # fmt: skip


def main() -> None:
    """Measure every size and kind of data, and print what came out round by round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/reverse_text/base", help="the smallest, and the tokenizer of all")
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help=f"of {', '.join(CONTESTANTS)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    arguments = parser.parse_args()
    for what, known in (("sizes", SIZES), ("kinds", KINDS), ("contestants", CONTESTANTS)):
        if unknown := set(getattr(arguments, what).split(",")) - set(known):
            parser.error(f"--{what} {','.join(sorted(unknown))}: there are {', '.join(known)}")
    if arguments.steps <= SKIPPED_STEPS:
        parser.error(f"--steps {arguments.steps}: the first {SKIPPED_STEPS} are left out, so give more")
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.sizes.split(","):
            model = write_model(Path(folder) / size, Path(arguments.model), SIZES[size])
            for kind in arguments.kinds.split(","):
                lengths = sample_lengths(kind)
                data = write_data(Path(folder) / f"{kind}.jsonl", lengths)
                mean, padded = statistics.mean(lengths), padding(lengths, arguments.micro_batch_size)
                print(f"{size}, {kind}: {mean:.0f} tokens a sample, {padded:.2f} times as many padded", flush=True)
                compare(f"{size}, {kind}", contestants(Path(folder), model, data, lengths, arguments), arguments.rounds)


@dataclass(frozen=True)
class Measured:
    """What a run comes to: trained tokens/s, and the most memory of its largest process in GiB."""

    tokens_per_s: float
    memory_gib: float


Run = Callable[[], Measured]
CONTESTANTS: dict[str, Callable[[Path, dict[str, Any]], Measured]] = {
    "sft": lambda folder, settings: run_sft(folder, settings, packed=True),
    "sft-padded": lambda folder, settings: run_sft(folder, settings, packed=False),
    "TRL": lambda _, settings: run_script("trl_sft.py", settings),
    "TRL-grouped": lambda _, settings: run_script("trl_sft.py", settings | {"grouped": True}),
    "TRL-packed": lambda _, settings: run_script("trl_sft.py", settings | {"packing": True}),
    "plain-loop": lambda _, settings: run_script("plain_loop.py", settings),
}
"""What is measured, by name."""
RATIOS = [("sft", other) for other in CONTESTANTS if other != "sft"] + [("sft-padded", "plain-loop")]


def contestants(
    folder: Path, model: Path, data: Path, lengths: Sequence[int], arguments: argparse.Namespace
) -> dict[str, Run]:
    """Return what is measured, by name."""
    settings = {
        "model": str(model),
        "data": str(data),
        "mean_tokens": statistics.mean(lengths),
        "batch_size": arguments.batch_size,
        "micro_batch_size": arguments.micro_batch_size,
        "steps": arguments.steps,
        "threads": available_cores(),
        "seq_len": SEQ_LEN,
        "packing": False,
        "grouped": False,
    }

    def measured(name: str) -> Run:
        return lambda: CONTESTANTS[name](folder, settings)

    return {name: measured(name) for name in arguments.contestants.split(",")}


def compare(title: str, measured: dict[str, Run], rounds: int) -> None:
    """Measure all in turn, several times, and print tokens/s, memory and ratios."""
    ratios: dict[tuple[str, str], list[Measured]] = {pair: [] for pair in RATIOS if set(pair) <= set(measured)}
    for number in range(rounds):
        order = list(measured)
        order = order[number % len(order) :] + order[: number % len(order)]
        runs = dict[str, Measured]()
        for name in order:
            run = runs[name] = measured[name]()
            print(f"{title}: {name} {run.tokens_per_s:,.0f} tok/s, {run.memory_gib:.2f} GiB", flush=True)
        for (one, other), found in ratios.items():
            of_one, of_other = runs[one], runs[other]
            found.append(Measured(of_one.tokens_per_s / of_other.tokens_per_s, of_one.memory_gib / of_other.memory_gib))
    for (one, other), found in ratios.items():
        speeds = [ratio.tokens_per_s for ratio in found]
        shown = f"median {statistics.median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})"
        memory = statistics.median(ratio.memory_gib for ratio in found)
        print(f"{title}: {one} / {other}: {shown}, memory {memory:.2f}", flush=True)
    print()


def write_model(path: Path, base: Path, changes: dict[str, Any]) -> Path:
    """Write config and tokenizer of `base` with another size; all contestants draw the weights themselves."""
    path.mkdir()
    for file in base.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            shutil.copy(file, path)
    config = json.loads((base / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def sample_lengths(kind: str) -> list[int]:
    """Return the tokens of each sample."""
    if kind == "short":
        return [44] * NUM_SAMPLES
    if kind == "even":
        rng = random.Random(0)
        return [2 * rng.randint(60, 68) + TEMPLATE_TOKENS for _ in range(NUM_SAMPLES)]
    drawn = draw_lengths("long tail", NUM_SAMPLES, SEQ_LEN, np.random.default_rng(0))
    return [length - length % 2 for length in (max(length, TEMPLATE_TOKENS + 2) for length in drawn)]


def padding(lengths: Sequence[int], rows: int) -> float:
    """Return the places of batches of `rows` samples, each as long as its longest, as a multiple of the tokens."""
    batches = [lengths[start : start + rows] for start in range(0, len(lengths), rows)]
    return sum(len(batch) * max(batch) for batch in batches) / sum(lengths)


def write_data(path: Path, lengths: Sequence[int]) -> Path:
    """Write chats of as many tokens: random letters, and the same in reverse."""
    rng = random.Random(0)
    rows = []
    for length in lengths:
        text = "".join(rng.choices(string.ascii_lowercase, k=(length - TEMPLATE_TOKENS) // 2))
        rows.append(
            {
                "prompt": [{"role": "user", "content": text}],
                "completion": [{"role": "assistant", "content": text[::-1]}],
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_sft(folder: Path, settings: dict[str, Any], *, packed: bool) -> Measured:
    """Measure the `sft` command."""
    output = Path(tempfile.mkdtemp(dir=folder))
    command = [str(Path(sys.executable).parent / "sft"), "--output-dir", str(output), "--data.name", settings["data"]]
    command += ["--model.name", settings["model"], "--model.init", "random", "--optim.lr", "1e-3"]
    command += ["--optim.schedule", "constant"]
    command += ["--data.batch-size", str(settings["batch_size"]), "--max-steps", str(settings["steps"])]
    command += ["--data.micro-batch-size", str(settings["micro_batch_size"]), "--data.seq-len", str(SEQ_LEN)]
    command += ["--no-data.shuffle", "--data.pack" if packed else "--no-data.pack"]
    _, memory = run(command)
    steps = read_metrics(output / "metrics.jsonl")[SKIPPED_STEPS - 1 :]
    seconds = sum(step["time/step"] for step in steps[1:])
    return Measured(sum(after["tokens"] - before["tokens"] for before, after in pairwise(steps)) / seconds, memory)


def run_script(name: str, settings: dict[str, Any]) -> Measured:
    """Measure a script beside this one."""
    printed, memory = run([sys.executable, str(HERE / name), json.dumps(settings)])
    steps = json.loads(printed.splitlines()[-1])[SKIPPED_STEPS:]
    return Measured(sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps), memory)


def run(command: list[str]) -> tuple[str, float]:
    """Return what a command printed, and the peak memory of its largest process in GiB."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{command[0]} ended with exit code {process.returncode}")
        output.seek(0)
        return output.read(), usage.ru_maxrss / 2**20


if __name__ == "__main__":
    main()
