"""Run the checks on this machine's GPU, and print the table of docs/developing.md: `python -m tests.gpu [-k …]`."""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.gpu.gpu_place import FIGURES_ENV, Figure


def table(lines: list[str]) -> str:
    """Return figures, one JSON object a line, as a Markdown table."""
    figures = [Figure(**json.loads(line)) for line in lines]
    rows = [f"| {one.check} | {one.what} | {one.value:.4g} {one.unit} | {one.expected} |" for one in figures]
    return "\n".join(["| check | what | found | expected |", "|---|---|---|---|", *rows])


def main(words: list[str]) -> int:
    if not torch.cuda.is_available():
        print("error: torch finds no GPU here, and these checks need one", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "figures.jsonl"
        found.touch()
        os.environ[FIGURES_ENV] = str(found)
        # Of the project's options only those that stock pytest knows.
        options = ["-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider", "-p", "no:xdist", "-s", "-ra"]
        code = int(pytest.main([str(Path(__file__).parent), *options, *words]))
        print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}\n")
        print(table(found.read_text().splitlines()))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
