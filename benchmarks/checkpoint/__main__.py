"""What a checkpoint costs: `uv run python -m benchmarks.checkpoint`.

A model of 200M parameters with AdamW (2.4 GB of state) takes steps while it is saved in several ways,
all in one process and one run, in turns, so that the ratios hold whatever the disk does today:

- plain: `torch.distributed.checkpoint.save`, stock settings, training waits;
- async: `trainer.checkpoint.checkpointer.Checkpointer`, which copies and writes behind the training; blocked is the
  time in `save` and what the next optimizer step waits for the copy;
- raw: the same number of bytes through `write` and one `fsync`: what the disk can do;
- steps alone, steps beside an asynchronous save, and steps beside another process that hashes and
  writes as many bytes: the difference of the last two is what saving costs beyond the cores it takes.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoint.measure import Beside, PeakMemory, TinyLoop, drop_from_cache, write_raw
from holdfast import Checkpointer
from holdfast.run import manifest


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="rounds; the first warms up and is not counted")
    parser.add_argument("--width", type=int, default=4096, help="width of the 12 square layers (4096: 201M parameters)")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="of the training loop")
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary directory")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            Benchmark(Path(folder), arguments.width).run(arguments.rounds)
        finally:
            dist.destroy_process_group()


class Benchmark:
    """One run of all measurements."""

    def __init__(self, folder: Path, width: int) -> None:
        self.folder = folder
        self.loop = TinyLoop(width)
        self.checkpointer = self.loop.watch_waits(
            lambda: Checkpointer(folder / "checkpoints", self.loop.state, updated_by=[self.loop.optimizer])
        )
        self.plain_loop = Checkpointer(folder / "checkpoints", self.loop.state)
        self.size = self.loop.num_bytes
        self.seconds: dict[str, list[float]] = {}
        self.step = 0

    def run(self, rounds: int) -> None:
        """Take turns, then print medians of all rounds but the first."""
        with PeakMemory() as memory:  # the first save makes the buffers
            self.checkpointer.save(self._next())
            self.checkpointer.wait()
        self._forget()
        self.extra_bytes = memory.grown_bytes
        for number in range(rounds):
            self.seconds = {name: values for name, values in self.seconds.items() if number != 1}
            self._round()
            print(
                f"round {number}: " + ", ".join(f"{name} {values[-1]:.2f} s" for name, values in self.seconds.items())
            )
        self._print()

    def _note(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def _round(self) -> None:
        self._plain()
        self._raw()
        self._quiet_save()
        self._blocking_copy()
        self._note("step alone", statistics.mean(self.loop.steps_for(3.0)))
        self._save_beside_training()
        self._writer_beside_training()
        self._verify_and_load()

    def _plain(self) -> None:
        started = time.perf_counter()
        dcp.save(self.loop.state.tensors(), checkpoint_id=self.folder / "plain")
        self._note("plain save", time.perf_counter() - started)
        shutil.rmtree(self.folder / "plain")
        os.sync()

    def _raw(self) -> None:
        self._note("raw write", write_raw(self.folder / "raw", self.loop.largest(), self.size))
        (self.folder / "raw").unlink()
        os.sync()

    def _quiet_save(self) -> None:
        """Save while nothing else happens: the speed of writing, hashing and committing."""
        started = time.perf_counter()
        self.checkpointer.save(self._next())
        self.checkpointer.wait()
        self._note("async save, quiet", time.perf_counter() - started)
        self._forget()

    def _blocking_copy(self) -> None:
        """Save as loops do that may change their tensors at any time: the copy is made at the call."""
        started = time.perf_counter()
        self.plain_loop.save(self._next())
        self._note("blocked, copy at the call", time.perf_counter() - started)
        self.plain_loop.wait()
        self.plain_loop.poll()
        self._forget()

    def _save_beside_training(self) -> None:
        """Save as `sft`, `dpo` and `rl` do: the copy is made beside the next gradients."""
        started = time.perf_counter()
        self.loop.waited_s = 0.0
        self.checkpointer.save(self._next())
        called = time.perf_counter() - started
        times = self.loop.steps_while(lambda: not self.checkpointer.wait(0))
        self._note("async save", time.perf_counter() - started)
        self._note("blocked", called + self.loop.waited_s)
        self._note("step beside save", statistics.mean(times))

    def _writer_beside_training(self) -> None:
        with Beside(self.folder / "beside", self.size) as other:
            times = self.loop.steps_while(other.is_running)
        self._note("step beside writer", statistics.mean(times))
        os.sync()

    def _verify_and_load(self) -> None:
        directory = self.folder / "checkpoints" / f"step_{self.step}"
        for name, is_cold in (("verify, from disk", True), ("verify, cached", False)):
            if is_cold:
                drop_from_cache(directory)
            started = time.perf_counter()
            manifest.verify(directory, step=self.step)
            self._note(name, time.perf_counter() - started)
        started = time.perf_counter()
        self.checkpointer.load(self.step, verify="size")
        self._note("load, cached", time.perf_counter() - started)
        self._forget()

    def _next(self) -> int:
        self.step += 1
        return self.step

    def _forget(self) -> None:
        self.checkpointer.poll()
        shutil.rmtree(self.folder / "checkpoints")
        os.sync()

    def _print(self) -> None:
        median = {name: statistics.median(values) for name, values in self.seconds.items()}
        table = Table(title=f"{self.size / 1e9:.2f} GB of state, {torch.get_num_threads()} threads, medians")
        for column in ("what", "seconds", "GB/s"):
            table.add_column(column, justify="left" if column == "what" else "right")
        for name, seconds in median.items():
            rate = "" if name.startswith("step") else f"{self.size / 1e9 / seconds:.2f}"
            table.add_row(name, f"{seconds:.3f}", rate)
        console = Console()
        console.print(table)
        beside_save, beside_writer = median["step beside save"], median["step beside writer"]
        for text, ratio in (
            ("loop blocked by an async save / by a plain dcp.save", median["blocked"] / median["plain save"]),
            ("the same where the copy is made at the call", median["blocked, copy at the call"] / median["plain save"]),
            ("steps beside a save / steps alone", beside_save / median["step alone"]),
            ("steps beside a save / steps beside another writer", beside_save / beside_writer),
            ("bytes per second of a save / of raw fsynced writes", median["raw write"] / median["async save, quiet"]),
            ("peak extra memory of an async save / state", self.extra_bytes / self.size),
        ):
            console.print(f"{text}: {ratio:.3f}")


if __name__ == "__main__":
    main()
