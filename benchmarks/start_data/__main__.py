"""What reading data costs at the start of a run, the first time and again: `uv run python -m benchmarks.start_data`.

Writes chats of several turns and has `sft`'s loader read them in a process of its own: without a cache, with an empty
one, and with the one that was made then. Prints the seconds until the first sample can be trained, and the most memory
that the process and those that it started held at once, without what is only mapped and can be dropped at any moment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import string
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from holdfast.trainer.data.tokenizing import FEW_ROWS

LOAD = """
import json, sys, time
from holdfast.config.data import SftDataConfig
from holdfast.trainer.data.samples import fingerprint_samples, load_samples, load_tokenizer
name, cache, tokenizer = sys.argv[1:]
chat = load_tokenizer(tokenizer)
begin = time.perf_counter()
samples, _ = load_samples(SftDataConfig(name=name, cache_dir=cache, seq_len=2048), chat, seed=0)
loaded = time.perf_counter() - begin
print(json.dumps({"seconds": loaded, "samples": len(samples), "fingerprint": fingerprint_samples(samples)}))
"""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=200_000)
    parser.add_argument("--tokenizer", default="examples/reverse_text/base")
    arguments = parser.parse_args()
    if arguments.chats <= FEW_ROWS:
        parser.error(f"--chats {arguments.chats}: the loader caches data of more than {FEW_ROWS} rows")
    table = Table("start", "seconds", "most memory, MiB", title=f"{arguments.chats:,} chats")
    with tempfile.TemporaryDirectory() as folder:
        data, cache = Path(folder) / "chats.jsonl", Path(folder) / "cache"
        tokens = write_chats(data, arguments.chats)
        fingerprints = set()
        for name, directory in (("without a cache", ""), ("first", str(cache)), ("second", str(cache))):
            found, peak = load(data, directory, arguments.tokenizer)
            assert found["samples"] == arguments.chats, found
            fingerprints.add(found["fingerprint"])
            table.add_row(name, f"{found['seconds']:.1f}", f"{peak / 2**20:,.0f}")
        assert len(fingerprints) == 1, "all three are to give the same samples"
        size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    Console(width=100).print(table)
    print(f"{tokens:,} letters in messages; the cache takes {size / 2**20:,.0f} MiB")


def write_chats(path: Path, count: int) -> int:
    """Write chats of two to six messages of 20 to 200 letters; return how many letters there are."""
    rng = random.Random(0)
    text = "".join(rng.choices(string.ascii_lowercase, k=1 << 16))
    letters = 0
    with path.open("w") as file:
        for _ in range(count):
            messages = []
            for number in range(2 * rng.randint(1, 3)):
                start, length = rng.randrange(len(text) - 200), rng.randint(20, 200)
                messages.append({"role": ("user", "assistant")[number % 2], "content": text[start : start + length]})
                letters += length
            file.write(json.dumps({"messages": messages}) + "\n")
    return letters


def load(data: Path, cache: str, tokenizer: str) -> tuple[dict[str, float | str], int]:
    """Return what a process that loads the data says, and the most bytes that it and its children held."""
    words = [sys.executable, "-c", LOAD, str(data), cache, tokenizer]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    peak, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.2):
            peak[0] = max(peak[0], held_by(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    is_over.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"loading failed with exit code {process.returncode}")
    return json.loads(output.splitlines()[-1]), peak[0]


def held_by(pid: int) -> int:
    """Return the bytes of memory that a process and its children hold; what forks share counts once."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):  # one that ends meanwhile
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))
    return total


if __name__ == "__main__":
    main()
