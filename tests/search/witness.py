"""Watches a run from outside: hard links to every batch and log tell whether a batch was made, or a generation asked
for, twice.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, defaultdict
from pathlib import Path

from holdfast.orchestrator.generation_log import decode_answer
from holdfast.protocol.rollouts import Batch, decode_batch
from holdfast.run.journal import BATCH_NAME
from holdfast.run.record_log import read_records
from holdfast.run.run_dir import RunDir

_PERIOD_S = 0.01


class Witness:
    """Use as a context manager around the whole of a run."""

    def __init__(self, run_dir: RunDir, folder: Path) -> None:
        self._run_dir = run_dir
        self._folder = folder
        self._links: defaultdict[str, dict[int, Path]] = defaultdict(dict)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="witness")

    def __enter__(self) -> Witness:
        self._folder.mkdir(parents=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(_PERIOD_S):
            self._look()
        self._look()

    def _look(self) -> None:
        try:
            paths = list(self._run_dir.rollouts.iterdir())
        except FileNotFoundError:
            return
        for path in paths:
            if path.name.startswith("step_"):
                self._link(path.name, path / BATCH_NAME)
            elif path.name.startswith("generations_"):
                self._link(path.name, path)

    def _link(self, name: str, path: Path) -> None:
        known = self._links[name]
        try:
            inode = path.stat().st_ino
            if inode in known:
                return
            copy = self._folder / f"{name}.{len(known) + 1}"
            os.link(path, copy)
        except FileNotFoundError:  # removed in between
            return
        known[copy.stat().st_ino] = copy

    def batches(self) -> dict[int, list[Batch]]:
        """Every batch that was ever published, by step: more than one for a step means that it was made again."""
        found: dict[int, list[Batch]] = {}
        for name, links in self._links.items():
            if name.startswith("step_"):
                read = [decode_batch(path.read_bytes()) for path in links.values()]
                found[int(name.removeprefix("step_"))] = read
        return dict(sorted(found.items()))

    def generations(self) -> dict[int, Counter[tuple[str, int, int]]]:
        """How often each generation was logged, by step of the batch and (prompt, limit, seed)."""
        found: defaultdict[int, Counter[tuple[str, int, int]]] = defaultdict(Counter)
        for name, links in self._links.items():
            if name.startswith("generations_"):
                for path in links.values():
                    found[int(Path(name).stem.removeprefix("generations_"))].update(_generations(path))
        return dict(found)


def _generations(path: Path) -> list[tuple[str, int, int]]:
    """The (prompt hash, limit, seed) of each generation in a log; what is torn at its end is not there."""
    payloads, _ = read_records(path)
    answers = [decode_answer(payload) for payload in payloads[1:]]
    return [(answer.prompt, answer.max_tokens, seed) for answer in answers for seed in answer.seeds]
