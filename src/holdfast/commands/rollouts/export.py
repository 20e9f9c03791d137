"""Writing rollouts as JSON lines or Parquet: one rollout per line or row, with step and version of its batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from holdfast.shared.errors import ConfigError, RunDirError
from holdfast.shared.files import durable
from holdfast.shared.wire.arrays import list_packed
from holdfast.shared.wire.rollouts import Batch


def check_target(path: Path) -> None:
    """Refuse a file that exists or that has no known format.

    Raises:
        ConfigError: naming it.
    """
    if path.suffix not in _WRITERS:
        raise ConfigError(f"--to {path}: the name must end in {' or '.join(_WRITERS)}, which says the format.")
    if path.exists():
        raise ConfigError(f"--to {path} exists already; nothing is written over. Name a new file.")


def write_rollouts(path: Path, batches: Iterable[Batch]) -> int:
    """Write `batches` to the new file `path`, one in memory at a time; return how many rollouts they hold.

    Raises:
        RunDirError: it cannot be written; then nothing is left.
    """
    temporary = durable.temporary_sibling(path)
    try:
        durable.make_directory(path.parent.absolute())
        count = _WRITERS[path.suffix](temporary, batches)
        durable.fsync_file(temporary)
        os.rename(temporary, path)
        durable.fsync_directory(path.parent)
    except OSError as error:
        raise RunDirError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _rows(batch: Batch) -> Iterator[dict[str, Any]]:
    head = {"step": batch.step, "policy_version": batch.policy_version}
    for rollout in batch.rollouts:
        row = msgspec.to_builtins(rollout, enc_hook=list_packed)
        yield head | row.pop("sampling") | row


def _write_lines(path: Path, batches: Iterable[Batch]) -> int:
    count = 0
    with open(path, "wb") as file:
        for batch in batches:
            for row in _rows(batch):
                file.write(msgspec.json.encode(row) + b"\n")
                count += 1
    return count


def _write_parquet(path: Path, batches: Iterable[Batch]) -> int:
    import pyarrow
    from pyarrow import parquet

    span = pyarrow.struct([(name, pyarrow.int64()) for name in ("version", "start", "end")])
    steps = pyarrow.struct([("places", pyarrow.list_(pyarrow.int32())), ("rewards", pyarrow.list_(pyarrow.float64()))])
    schema = pyarrow.schema(
        [
            ("step", pyarrow.int64()),
            ("policy_version", pyarrow.int64()),
            ("temperature", pyarrow.float64()),
            ("top_p", pyarrow.float64()),
            ("top_k", pyarrow.int64()),
            ("min_p", pyarrow.float64()),
            ("environment", pyarrow.string()),
            ("task_id", pyarrow.int64()),
            ("sample_index", pyarrow.int64()),
            ("level", pyarrow.int64()),
            ("token_ids", pyarrow.list_(pyarrow.int32())),
            ("loss_mask", pyarrow.list_(pyarrow.bool_())),
            ("logprobs", pyarrow.list_(pyarrow.float32())),
            ("versions", pyarrow.list_(span)),
            ("reward", pyarrow.float64()),
            ("truncated", pyarrow.bool_()),
            ("metrics", pyarrow.map_(pyarrow.string(), pyarrow.float64())),
            ("reference_logprobs", pyarrow.list_(pyarrow.float32())),
            ("step_rewards", steps),
            ("branch_starts", pyarrow.list_(pyarrow.int64())),
        ]
    )
    count = 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in batches:
            rows = [row | {"metrics": list(row["metrics"].items())} for row in _rows(batch)]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
            count += len(rows)
    return count


_WRITERS: dict[str, Callable[[Path, Iterable[Batch]], int]] = {".jsonl": _write_lines, ".parquet": _write_parquet}
