"""Trained tokens/s of `sft` beside TRL and a plain PyTorch loop: `uv run python -m benchmarks.sft_throughput`.

Same model, samples, batch and threads, all in float32, one after the other and in another order every round, because a
shared machine's speed changes within minutes; ratios are within rounds. Trained tokens are those of the samples,
without padding. Two sizes of model (0.6M and 25M parameters) and two kinds of data: samples of about equal length, and
ragged ones. `sft` packs; TRL and the plain loop pad; TRL packs as well, which on a CPU means a mask over the whole row.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast import read_metrics
from holdfast.shared.process.child import available_cores

HERE = Path(__file__).parent
SKIPPED_STEPS = 3
SEQ_LEN = 256
KINDS = {"even": (60, 68), "ragged": (4, 120)}
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
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    arguments = parser.parse_args()
    for what, known in (("sizes", SIZES), ("kinds", KINDS)):
        if unknown := set(getattr(arguments, what).split(",")) - set(known):
            parser.error(f"--{what} {','.join(sorted(unknown))}: there are {', '.join(known)}")
    if arguments.steps <= SKIPPED_STEPS:
        parser.error(f"--steps {arguments.steps}: the first {SKIPPED_STEPS} are left out, so give more")
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.sizes.split(","):
            model = write_model(Path(folder) / size, Path(arguments.model), SIZES[size])
            for kind in arguments.kinds.split(","):
                data = write_data(Path(folder) / f"{kind}.jsonl", KINDS[kind])
                compare(f"{size}, {kind}", contestants(Path(folder), model, data, arguments), arguments.rounds)


def contestants(folder: Path, model: Path, data: Path, arguments: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Return what is measured, by name; each gives tokens/s. The first is what the others are compared with."""
    settings = {
        "model": str(model),
        "data": str(data),
        "batch_size": arguments.batch_size,
        "micro_batch_size": arguments.micro_batch_size,
        "steps": arguments.steps,
        "threads": available_cores(),
        "seq_len": SEQ_LEN,
        "samples_per_row": SEQ_LEN / mean_tokens(data),
    }
    return {
        "sft, packed": lambda: run_sft(folder, settings, packed=True),
        "sft, padded": lambda: run_sft(folder, settings, packed=False),
        "TRL, padded": lambda: run_script("trl_sft.py", settings | {"packing": False}),
        "TRL, packed": lambda: run_script("trl_sft.py", settings | {"packing": True}),
        "plain loop": lambda: run_script("plain_loop.py", settings),
    }


def compare(title: str, measured: dict[str, Callable[[], float]], rounds: int) -> None:
    """Measure all in turn, several times, and print tokens/s and the ratios of the first to the others."""
    ours, *others = measured
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for number in range(rounds):
        order = list(measured)
        order = order[number % len(order) :] + order[: number % len(order)]
        rates = {name: measured[name]() for name in order}
        print(f"{title}: " + ", ".join(f"{name} {rates[name]:,.0f} tok/s" for name in measured), flush=True)
        for name in others:
            ratios[name].append(rates[ours] / rates[name])
    for name, found in ratios.items():
        low, high = min(found), max(found)
        print(f"{title}: {ours} / {name}: median {statistics.median(found):.2f} ({low:.2f} to {high:.2f})", flush=True)
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


def write_data(path: Path, lengths: tuple[int, int]) -> Path:
    """Write chats whose messages have a random number of letters within `lengths`."""
    rng = random.Random(0)
    rows = []
    for _ in range(2048):
        text = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(*lengths)))
        rows.append(
            {
                "prompt": [{"role": "user", "content": text}],
                "completion": [{"role": "assistant", "content": text[::-1]}],
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mean_tokens(data: Path) -> float:
    """Return about how many tokens a sample has: its letters, and the template's."""
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    return statistics.mean(2 * len(row["prompt"][0]["content"]) + 8 for row in rows)


def run_sft(folder: Path, settings: dict[str, Any], *, packed: bool) -> float:
    """Return the median tokens/s of the `sft` command."""
    output = Path(tempfile.mkdtemp(dir=folder))
    command = [str(Path(sys.executable).parent / "sft"), "--output-dir", str(output), "--data.name", settings["data"]]
    command += ["--model.name", settings["model"], "--model.init", "random", "--optim.lr", "1e-3"]
    command += ["--data.batch-size", str(settings["batch_size"]), "--max-steps", str(settings["steps"])]
    command += ["--data.micro-batch-size", str(settings["micro_batch_size"]), "--data.seq-len", str(SEQ_LEN)]
    command += ["--no-data.shuffle", "--data.pack" if packed else "--no-data.pack"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    steps = read_metrics(output / "metrics.jsonl")[SKIPPED_STEPS:]
    return statistics.median(step["tokens_per_s"] for step in steps)


def run_script(name: str, settings: dict[str, Any]) -> float:
    """Return the median tokens/s of a script beside this one."""
    done = subprocess.run(
        [sys.executable, str(HERE / name), json.dumps(settings)], check=True, capture_output=True, text=True
    )
    steps = json.loads(done.stdout.splitlines()[-1])[SKIPPED_STEPS:]
    return statistics.median(step["tokens"] / step["seconds"] for step in steps)


if __name__ == "__main__":
    main()
