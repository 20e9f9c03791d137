"""Trained tokens/s of `sft` beside a plain PyTorch loop: `uv run python -m benchmarks.sft_throughput`.

Same model, samples, batch and threads, in turn, several rounds; prints the ratio round by round.
Trained tokens are those of the samples, without padding. Two kinds of data: samples of about equal
length, unpacked, and ragged samples, where `sft` packs and the plain loop pads.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast import read_metrics
from holdfast.shared.process.child import available_cores

PLAIN = Path(__file__).parent / "plain_loop.py"
SKIPPED_STEPS = 5


def main() -> None:
    """Measure both kinds of data and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="examples/reverse_text/base")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for kind, lengths, packed in (("even, unpacked", (60, 68), False), ("ragged, packed", (4, 120), True)):
            data = write_data(Path(folder) / f"{lengths[0]}_{lengths[1]}.jsonl", lengths)
            rounds = []
            for number in range(arguments.rounds):
                ours = run_sft(Path(folder) / f"{kind[:4]}_{number}", data, arguments, packed=packed)
                plain = run_plain(data, arguments)
                rounds.append(ours / plain)
                print(
                    f"{kind}: sft {ours:,.0f} tok/s, plain loop {plain:,.0f} tok/s, ratio {ours / plain:.2f}",
                    flush=True,
                )
            print(
                f"{kind}: ratio median {statistics.median(rounds):.2f} (min {min(rounds):.2f}, max {max(rounds):.2f})\n"
            )


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


def run_sft(folder: Path, data: Path, arguments: argparse.Namespace, *, packed: bool) -> float:
    """Return the median tokens/s of the `sft` command."""
    command = [str(Path(sys.executable).parent / "sft"), "--output-dir", str(folder), "--data.name", str(data)]
    command += ["--model.name", arguments.model, "--model.init", "random", "--optim.lr", "1e-3"]
    command += ["--data.batch-size", str(arguments.batch_size), "--max-steps", str(arguments.steps)]
    command += ["--data.micro-batch-size", str(arguments.micro_batch_size), "--data.seq-len", "256"]
    command += ["--no-data.shuffle", "--data.pack" if packed else "--no-data.pack"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    steps = read_metrics(folder / "metrics.jsonl")[SKIPPED_STEPS:]
    return statistics.median(step["tokens_per_s"] for step in steps)


def run_plain(data: Path, arguments: argparse.Namespace) -> float:
    """Return the median tokens/s of the plain loop."""
    settings = {
        "model": arguments.model,
        "data": str(data),
        "batch_size": arguments.batch_size,
        "micro_batch_size": arguments.micro_batch_size,
        "steps": arguments.steps,
        "threads": available_cores(),
    }
    done = subprocess.run(
        [sys.executable, str(PLAIN), json.dumps(settings)], check=True, capture_output=True, text=True
    )
    steps = json.loads(done.stdout.splitlines()[-1])[SKIPPED_STEPS:]
    return statistics.median(step["tokens"] / step["seconds"] for step in steps)


if __name__ == "__main__":
    main()
