"""What two ranks read of one dataset, through caches of one machine and of two."""

import os
from pathlib import Path
from unittest.mock import patch

from holdfast.config.data import SftDataConfig
from holdfast.errors import DataError
from holdfast.trainer.data import samples as read_samples
from holdfast.trainer.data.samples import fingerprint_samples, load_samples, load_tokenizer
from holdfast.trainer.mesh import Mesh
from tests.ranks.two import run_on_ranks

MACHINES = {"one": ("0", "1"), "two": ("0", "0")}
"""Local ranks of the two ranks, by the number of machines."""


def compute(mesh: Mesh, directory: Path) -> dict[str, str]:
    """Return the fingerprint of the samples with each layout of caches, and the error of a bad row."""
    tokenizer = load_tokenizer("examples/reverse_text/base")
    found = {}
    with patch.object(read_samples, "FEW_ROWS", 10), patch.object(read_samples, "_TELL_S", 0.0):
        for machines, local_ranks in MACHINES.items():
            os.environ["LOCAL_RANK"] = local_ranks[mesh.rank]
            cache = directory / f"cache_{machines}" / (str(mesh.rank) if machines == "two" else "shared")
            config = SftDataConfig(name=str(directory / "rows.jsonl"), cache_dir=str(cache))
            for start in ("first", "second"):
                samples, _ = load_samples(config, tokenizer, seed=0, mesh=mesh)
                found[f"{machines}, {start}"] = fingerprint_samples(samples)
        for who, unwritable in (("kept by none", (0, 1)), ("kept by one of two", (1,))):
            own = config.name if mesh.rank in unwritable else str(directory / "cache_half")
            half = config.model_copy(update={"cache_dir": own})
            found[who] = fingerprint_samples(load_samples(half, tokenizer, seed=0, mesh=mesh)[0])
        others = config.model_copy(update={"name": str(directory / ("rows.jsonl", "other.jsonl")[mesh.rank])})
        try:
            load_samples(others, tokenizer, seed=0, mesh=mesh)
        except DataError as error:
            found["others"] = str(error)
        try:
            bad = config.model_copy(update={"name": str(directory / "bad.jsonl")})
            load_samples(bad, tokenizer, seed=0, mesh=mesh)
        except DataError as error:
            found["error"] = str(error)
    return found


if __name__ == "__main__":
    run_on_ranks(compute)
