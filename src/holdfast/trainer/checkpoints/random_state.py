"""The random generators of one rank, for any loop: captured with every save, restored after loading.

Each rank has a file of its own. Where another number of ranks goes on, generators are derived from seed and step.
"""

from __future__ import annotations

import random
from typing import cast

import msgspec
import numpy as np
import torch


class RandomState(msgspec.Struct):
    """State of the random generators of one rank."""

    torch_cpu: bytes
    numpy_keys: bytes
    numpy_rest: tuple[int, int, float]
    python_version: int
    python_keys: list[int]
    python_gauss: float | None
    torch_cuda: bytes | None = None


def capture_random_state() -> RandomState:
    """Return the state of python's, numpy's and torch's generators of this rank."""
    python_version, python_keys, python_gauss = random.getstate()
    _, keys, position, has_gauss, gauss = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())
    return RandomState(
        torch_cpu=torch.get_rng_state().numpy().tobytes(),
        # Little-endian: the same bytes whatever machine reads them.
        numpy_keys=keys.astype("<u4").tobytes(),
        numpy_rest=(position, has_gauss, gauss),
        python_version=python_version,
        python_keys=list(python_keys),
        python_gauss=python_gauss,
        # Not on a machine with GPUs that this process leaves alone: asking would take memory of the first one.
        torch_cuda=torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else None,
    )


def restore_random_state(state: RandomState) -> None:
    """Put the generators of this rank back into `state`."""
    # A bytearray: torch warns of memory that cannot be written.
    torch.set_rng_state(torch.frombuffer(bytearray(state.torch_cpu), dtype=torch.uint8))
    keys = np.frombuffer(state.numpy_keys, dtype="<u4")
    np.random.set_state(("MT19937", keys, *state.numpy_rest))
    random.setstate((state.python_version, tuple(state.python_keys), state.python_gauss))
    if state.torch_cuda is not None and torch.cuda.is_available():  # untested: needs a GPU
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state.torch_cuda), dtype=torch.uint8))


def seed_everything(seed: int, *, step: int, rank: int) -> None:
    """Seed all generators of this rank as a function of (run seed, step, rank)."""
    # numpy never changes what its SeedSequence gives, and neighbouring ranks get unlike seeds.
    entropy = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    random.seed(int(entropy[0]))
    np.random.seed(int(entropy[1]))
    torch.manual_seed(int(entropy[2]))
