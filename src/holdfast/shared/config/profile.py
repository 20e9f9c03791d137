"""Which steps of the trainer a run profiles: `FIRST:LAST`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator

MANY_STEPS = 20
"""More than these are seldom looked at, and need much memory and disk."""
_STEPS = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")


@dataclass(frozen=True)
class ProfiledSteps:
    """The steps from `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: object) -> ProfiledSteps:
        """Return what `FIRST:LAST` names.

        Raises:
            ValueError: it names no steps.
        """
        match = _STEPS.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError("should be FIRST:LAST, the first and the last step to profile, such as 3:5")
        steps = cls(int(match[1]), int(match[2]))
        if steps.first < 1:
            raise ValueError("begins before the first step, which is 1")
        if steps.last < steps.first:
            raise ValueError(f"ends before it begins: {steps.last}:{steps.first} is the other way round")
        return steps

    def check(self, max_steps: int) -> None:
        """Check that the run comes to all of them.

        Raises:
            ValueError: it ends before.
        """
        if self.last > max_steps:
            raise ValueError(
                f"profile = '{self}' goes on to step {self.last}, and the run ends with step {max_steps}: choose steps "
                "up to there, or raise max_steps"
            )

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


def _names_steps(value: object) -> object:
    ProfiledSteps.parse(value)
    return value


StepWindow = Annotated[str, BeforeValidator(_names_steps)]
"""The text `FIRST:LAST`, checked."""
