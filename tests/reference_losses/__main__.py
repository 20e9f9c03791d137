"""Renew the reference losses: make the four runs, print what has changed, and write `recorded.json`."""

import os
import sys
import tempfile
from pathlib import Path

from tests.reference_losses.machine import numerics
from tests.reference_losses.record import PATH, Record, differences, other_numerics, read_records, write_records
from tests.reference_losses.runs import COMMANDS, command_line, numbers_of
from tests.runs.ports import free_port
from tests.runs.training import run_command


def main() -> int:
    old = read_records() if PATH.exists() else {}
    new: dict[str, Record] = {}
    with tempfile.TemporaryDirectory(prefix="reference-losses-") as folder:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=f"{folder}/datasets", OMP_NUM_THREADS="1")
        for command in COMMANDS:
            new[command] = _record(command, Path(folder) / command)
            _print_change(command, old.get(command), new[command])
    write_records(new)
    print(f"wrote {PATH}; the commit that changes it must say why the numbers change")
    return 0


def _record(command: str, output: Path) -> Record:
    server = ("--inference.server.port", str(free_port())) if command == "rl" else ()
    run = run_command([*command_line(command, output), *server], output, starts_python=True)
    return Record(numerics(command), numbers_of(command, run))


def _print_change(command: str, old: Record | None, new: Record) -> None:
    if old is None:
        print(f"{command}: recorded for the first time")
        return
    changed = differences(old.numbers, new.numbers)
    print(f"{command}: {'changed' if changed else 'as recorded, bit for bit'}")
    for line in [*other_numerics(old.numerics, new.numerics), *changed]:
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
