"""Trained tokens/s of `sft` beside TRL and a plain PyTorch loop.

`uv run --group dev python -m benchmarks.sft_throughput`

Same model, samples, batch and threads, all in float32, one after the other and in another order every round, because a
shared machine's speed changes within minutes; ratios are within rounds. Trained tokens are those of the samples,
without padding, over the time of all steps but the first few. Two sizes of model (0.6M and 25M parameters) and two
kinds of data: samples of about equal length, and ragged ones, whose lengths have the long tail of `benchmarks.balance`.

TRL's `SFTTrainer` runs in three ways: padded, its default; padded with `train_sampling_strategy = "group_by_length"`,
where samples of a step are of about one length, so that steps are others than those of the data; and with `packing`,
which on a CPU means a mask over the row, so that its rows go through the model one by one. The plain loop pads.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
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
KINDS = ("even", "ragged")
SIZES = {
    "0.6M": {},
    "25M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 64},
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


Rate = Callable[[], float]
CONTESTANTS: dict[str, Callable[[Path, dict[str, Any]], float]] = {
    "sft": lambda folder, settings: run_sft(folder, settings, packed=True),
    "sft-padded": lambda folder, settings: run_sft(folder, settings, packed=False),
    "TRL": lambda _, settings: run_script("trl_sft.py", settings),
    "TRL-grouped": lambda _, settings: run_script("trl_sft.py", settings | {"grouped": True}),
    "TRL-packed": lambda _, settings: run_script("trl_sft.py", settings | {"packing": True}),
    "plain-loop": lambda _, settings: run_script("plain_loop.py", settings),
}
"""By name, what measures tokens/s."""
RATIOS = [("sft", other) for other in CONTESTANTS if other != "sft"] + [("sft-padded", "plain-loop")]


def contestants(
    folder: Path, model: Path, data: Path, lengths: Sequence[int], arguments: argparse.Namespace
) -> dict[str, Rate]:
    """Return what is measured, by name; each gives tokens/s."""
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

    def measured(name: str) -> Rate:
        return lambda: CONTESTANTS[name](folder, settings)

    return {name: measured(name) for name in arguments.contestants.split(",")}


def compare(title: str, measured: dict[str, Rate], rounds: int) -> None:
    """Measure all in turn, several times, and print tokens/s and ratios."""
    ratios: dict[tuple[str, str], list[float]] = {pair: [] for pair in RATIOS if set(pair) <= set(measured)}
    for number in range(rounds):
        order = list(measured)
        order = order[number % len(order) :] + order[: number % len(order)]
        rates = dict[str, float]()
        for name in order:
            rates[name] = measured[name]()
            print(f"{title}: {name} {rates[name]:,.0f} tok/s", flush=True)
        for (one, other), found in ratios.items():
            found.append(rates[one] / rates[other])
    for (one, other), found in ratios.items():
        low, high = min(found), max(found)
        print(f"{title}: {one} / {other}: median {statistics.median(found):.2f} ({low:.2f} to {high:.2f})", flush=True)
    print()


def write_model(path: Path, base: Path, changes: dict[str, int]) -> Path:
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


def run_sft(folder: Path, settings: dict[str, Any], *, packed: bool) -> float:
    """Return the tokens/s of the `sft` command."""
    output = Path(tempfile.mkdtemp(dir=folder))
    command = [str(Path(sys.executable).parent / "sft"), "--output-dir", str(output), "--data.name", settings["data"]]
    command += ["--model.name", settings["model"], "--model.init", "random", "--optim.lr", "1e-3"]
    command += ["--optim.schedule", "constant"]
    command += ["--data.batch-size", str(settings["batch_size"]), "--max-steps", str(settings["steps"])]
    command += ["--data.micro-batch-size", str(settings["micro_batch_size"]), "--data.seq-len", str(SEQ_LEN)]
    command += ["--no-data.shuffle", "--data.pack" if packed else "--no-data.pack"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    steps = read_metrics(output / "metrics.jsonl")[SKIPPED_STEPS - 1 :]
    seconds = sum(step["time/step"] for step in steps[1:])
    return sum(after["tokens"] - before["tokens"] for before, after in pairwise(steps)) / seconds


def run_script(name: str, settings: dict[str, Any]) -> float:
    """Return the tokens/s of a script beside this one."""
    done = subprocess.run(
        [sys.executable, str(HERE / name), json.dumps(settings)], check=True, capture_output=True, text=True
    )
    steps = json.loads(done.stdout.splitlines()[-1])[SKIPPED_STEPS:]
    return sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps)


if __name__ == "__main__":
    main()
