"""Compares the lengths of samples with the positions of the model, before the model is loaded.

`trainer.model.structure.longest_sample` finds the same limits in the model; this module reads config.json only, without
torch.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from holdfast.config.data import SftDataConfig
from holdfast.config.training import SupervisedCommand
from holdfast.errors import DataError
from holdfast.trainer.data.remarks import tell_samples
from holdfast.trainer.data.rows import Sample
from holdfast.trainer.data.tokenizing import JoinedSamples, TrainedSamples
from holdfast.trainer.model.model_config import load_model_config
from holdfast.trainer.preference.pairs import Preference

_TABLES = {"biogpt", "codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt", "opt", "xglm"}
"""Model types that look up each position in a table of `max_position_embeddings` rows."""


class Positions(NamedTuple):
    """How long samples may be.

    Attributes:
        limit: the most tokens.
        is_hard: whether the model cannot compute longer samples, or computes them depending on their neighbours.
    """

    limit: int
    is_hard: bool


def positions_of(name: str) -> Positions | None:
    """Return the positions of a model, a local directory or of a hub; None: its config.json names none. Raise DataError
    if transformers has no such kind of model."""
    config = load_model_config(name).get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    hard = [limit] if config.model_type in _TABLES else []
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        kind, original = str(rope.get("rope_type")), rope.get("original_max_position_embeddings")
        if kind == "longrope" and original:
            hard.append(original)
        elif "dynamic" in kind:
            hard.append(original or limit)
        elif kind in ("linear", "yarn"):
            limit = max(limit, int((original or 0) * rope.get("factor", 1)))
    return Positions(min(hard), True) if hard else Positions(limit, False)


def _ropes(found: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of rotary embeddings; some models have other ones for each kind of layer."""
    if isinstance(found, dict):
        yield found
        for inner in found.values():
            yield from _ropes(inner)


def check_lengths(
    config: SupervisedCommand, *parts: Sequence[Sample] | Sequence[Preference], is_told: bool = True
) -> None:
    """Refuse samples that the model cannot compute; warn about samples longer than the model was made for.

    Args:
        parts: what is trained, and what is held out.
        is_told: whether warnings are reported.

    Raise DataError if a sample is longer than the model can compute, or `data.strict` refuses the warning.
    """
    positions = positions_of(config.model.name)
    if positions is None:
        return
    for place, source in enumerate(config.data.sources):
        own = [part.parts[place] if isinstance(part, JoinedSamples) else part for part in parts]
        _check_source(source, own, positions, model=config.model.name, is_told=is_told)


def _check_source(
    source: SftDataConfig,
    parts: Sequence[Sequence[Sample] | Sequence[Preference]],
    positions: Positions,
    *,
    model: str,
    is_told: bool,
) -> None:
    found = [(part, lengths) for part in parts if (lengths := _lengths(part)).max(initial=0) > positions.limit]
    if not found:
        return
    count = int(sum((lengths > positions.limit).sum() for _, lengths in found))
    longest = max(int(lengths.max()) for _, lengths in found)
    first = min(_sides(part[int((lengths > positions.limit).argmax())])[0].row for part, lengths in found)
    told = f"samples have more tokens than the model has positions, up to {longest:,} of {positions.limit:,}"
    if positions.is_hard:
        raise DataError(
            f"{source.name}: {count:,} {told}, the first in row {first + 1:,} (max_position_embeddings, or "
            f"original_max_position_embeddings of its rotary embeddings, in config.json of '{model}'). "
            f"Set --data.seq-len {positions.limit} and --data.too-long drop or truncate, or shorten the rows."
        )
    text = f"{told} (max_position_embeddings): the model was not made for them; data.seq_len bounds the length"
    tell_samples([(text, count, first)], source, is_told=is_told)


def _lengths(part: Sequence[Sample] | Sequence[Preference]) -> np.ndarray:
    if isinstance(part, TrainedSamples):
        return part.lengths
    return np.array([max(len(side.token_ids) for side in _sides(one)) for one in part], dtype=np.int64)


def _sides(one: Sample | Preference) -> tuple[Sample, ...]:
    return (one,) if isinstance(one, Sample) else one.sides
