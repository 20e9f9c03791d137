"""Names the phase and the policy version in what the engines and the trainer do not do in time, and in heartbeats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.shared.errors import InferenceError
from holdfast.shared.process.heartbeat import moved


@contextmanager
def phase(name: str, *, version: int | None = None) -> Iterator[None]:
    """Have an `InferenceError` say in which phase of the orchestrator it came.

    Args:
        name: of the phase, such as `waiting for weights`.
        version: the policy version that it is about; None while there is none.
    """
    moved(doing=name)
    try:
        yield
    except InferenceError as error:
        at = "" if version is None else f", policy version {version}"
        error.args = (f"{name}{at}: {error}",)
        raise
