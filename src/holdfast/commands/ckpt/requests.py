"""What the command asks of `python -m holdfast.trainer.conversion`, the part of it that needs torch.

A request is one JSON argument, the answer one JSON document on stdout. Errors are messages on stderr
with the exit codes of `holdfast.shared.errors`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Literal, TypeVar

import msgspec

from holdfast.shared.process.child import LAUNCHER_ENV
from holdfast.shared.process.import_path import module_command

DTypeName = Literal["float32", "bfloat16"]


class Describe(msgspec.Struct, tag="describe"):
    """Count the tensors of a torch.distributed.checkpoint directory. Answered by `Description`."""

    directory: str


class Group(msgspec.Struct):
    """Tensors whose names begin alike, such as `model` or `optim`."""

    tensors: int = 0
    elements: int = 0
    bytes: int = 0


class Description(msgspec.Struct):
    """What a torch.distributed.checkpoint directory holds, by the first part of the names."""

    groups: dict[str, Group]


class Compare(msgspec.Struct, tag="compare"):
    """Compare two torch.distributed.checkpoint directories tensor by tensor. Answered by `Comparison`."""

    before: str
    after: str


class Difference(msgspec.Struct):
    """How one tensor differs.

    Attributes:
        norm_before: its Euclidean norm; computed in float64, like all here.
        relative: norm of the difference divided by `norm_before`; None where that is no number.

    Numbers that are not finite are None: JSON has none of them.
    """

    name: str
    equal: bool
    norm_before: float | None
    norm_after: float | None
    relative: float | None


class Comparison(msgspec.Struct):
    """How two checkpoints differ.

    Attributes:
        tensors: those that both have in the same shape, the most different first.
        only_before: names that only the first has.
        only_after: names that only the second has.
        reshaped: names whose shape or dtype differs.
    """

    tensors: list[Difference]
    only_before: list[str]
    only_after: list[str]
    reshaped: list[str]


class Export(msgspec.Struct, tag="export"):
    """Write the model of a checkpoint as a Hugging Face directory. Answered by `Written`.

    Attributes:
        step_directory: a committed checkpoint, verified by the caller.
        target: the directory to publish; it must not exist.
        dtype: of the floating-point tensors; unset: as the run publishes its weights.
        max_file_bytes: no file is larger, unless one tensor alone is; unset: 4 GiB.
        model: where config and tokenizer come from when the checkpoint has none.
        base: of a run with LoRA, the weights to merge the adapter into; unset: the adapter alone is written.
    """

    step_directory: str
    target: str
    dtype: DTypeName | None = None
    max_file_bytes: int | None = None
    model: str | None = None
    base: str | None = None


class Import(msgspec.Struct, tag="import"):
    """Turn weights of any kind into a Hugging Face directory of ours. Answered by `Written`.

    Attributes:
        source: file or directory.
        target: the directory to publish; it must not exist.
        model: where config and tokenizer come from; unset: `source` itself.
    """

    source: str
    target: str
    model: str | None = None


class Written(msgspec.Struct):
    """What an export or import wrote."""

    directory: str
    dtype: str
    tensors: int
    parameters: int
    files: int
    bytes: int


Request = Describe | Compare | Export | Import
Answer = TypeVar("Answer", Description, Comparison, Written)


class Failed(Exception):
    """The torch part ended with `exit_code` and has said why."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code


def ask(request: Request, answer: type[Answer]) -> Answer:
    """Run the torch part on `request` and return its answer.

    Raises:
        Failed: it failed; its message has been shown.
    """
    command = module_command("holdfast.trainer.conversion", msgspec.json.encode(request).decode())
    environment = {**os.environ, LAUNCHER_ENV: str(os.getpid())}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        try:
            output, messages = process.communicate()
        except KeyboardInterrupt:
            process.wait()  # Ctrl-C reached it, too, and it removes what it has begun
            raise
    sys.stderr.write(messages.decode(errors="replace"))
    code = process.returncode
    if code == -signal.SIGKILL:
        print("error: the process that reads tensors was killed; was the memory enough?", file=sys.stderr)
    if code != 0:
        raise Failed(code if code > 0 else 128 - code)
    return msgspec.json.decode(output, type=answer)
