"""Sums over the micro-batches of a step, which stay on the device until they are read.

Reading a number of a GPU waits for everything that was queued before it. Between two micro-batches that would leave
the GPU without work while the next one is being prepared, so numbers are added up where they are, and read once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Sums:
    """Sums by name, in float64.

    Args:
        names: that begin with 0; others begin with their first term.
    """

    def __init__(self, *names: str) -> None:
        self._sums: dict[str, Tensor | float] = dict.fromkeys(names, 0.0)

    def add(self, terms: Mapping[str, Tensor | float]) -> None:
        """Add numbers, or scalars on a device, which lose their graphs."""
        for name, term in terms.items():
            value = term.detach().double() if isinstance(term, Tensor) else term
            self._sums[name] = self._sums.get(name, 0.0) + value

    def read(self) -> dict[str, float]:
        """Return all sums, in one transfer from the device."""
        on_device = {name: value for name, value in self._sums.items() if isinstance(value, Tensor)}
        moved = dict(zip(on_device, torch.stack(list(on_device.values())).tolist(), strict=True)) if on_device else {}
        return {name: moved[name] if isinstance(value, Tensor) else value for name, value in self._sums.items()}
