"""Which environment gives the next problem: deterministic, exact, and resumable from counters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from fractions import Fraction
from math import gcd, lcm

from holdfast.orchestrator.batches.state import EnvironmentState, OrchestratorState
from holdfast.shared.config.orchestrator import OrchestratorConfig

_log = logging.getLogger("orchestrator")


def integer_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """Return the smallest integers in the ratio of the decimal numbers `weights`: 0.1 counts as 1/10."""
    fractions = {name: Fraction(repr(weight)) for name, weight in weights.items()}
    denominator = lcm(*(fraction.denominator for fraction in fractions.values()))
    scaled = {name: int(fraction * denominator) for name, fraction in fractions.items()}
    divisor = gcd(*scaled.values())
    return {name: value // divisor for name, value in scaled.items()}


def adopt_mix(state: OrchestratorState, config: OrchestratorConfig) -> None:
    """Make `state` fit the environments of `config`: positions stay, new environments begin at 0.

    Credits count in units of the old weights, so a changed mix starts them anew, and says so. A changed `group_size`
    is that of the next batch on.
    """
    integers = integer_weights({section.label: section.weight for section in config.environments})
    before = {name: position.weight for name, position in state.environments.items()}
    for name, weight in integers.items():
        position = state.environments.setdefault(name, EnvironmentState())
        position.weight = weight
    for section in config.environments:
        state.environments[section.label].group_size = config.rollouts_of(section).group_size
    for name, position in state.environments.items():
        if name not in integers:
            # Kept at its place: it goes on there should it come back.
            position.weight = 0
    if before and before != {name: position.weight for name, position in state.environments.items()}:
        _log.warning("the mix of environments changed since the checkpoint: was %s, is %s", before, integers)
        for position in state.environments.values():
            position.credit = 0


def next_environment(state: OrchestratorState) -> str:
    """Return the environment of the next problem, and move `state` on.

    Smooth weighted round-robin (nginx's): everyone earns their weight, the richest pays the total.
    Over any stretch the shares are as near to the weights as whole problems allow.
    """
    positions = {name: position for name, position in state.environments.items() if position.weight}
    for position in positions.values():
        position.credit += position.weight
    # Ties go to the environment that stands first in the state, which keeps its order.
    chosen = max(positions, key=lambda name: positions[name].credit)
    positions[chosen].credit -= sum(position.weight for position in positions.values())
    return chosen
