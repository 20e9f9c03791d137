"""Rotary frequencies that depend on the length of a sample are those that it has alone, whatever is in its row."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.training import TrainedModelConfig
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.parity_check import check_model
from holdfast.trainer.model.policy import build_policy
from tests.models.families import Family, Outcome, random_samples, reference_outcome, trainer_outcome, write_model

ORIGINAL = 16
LENGTHS = (23, 5, ORIGINAL, ORIGINAL + 1, 31, 2, 14)
FACTORS = [3.0, 2.0, 5.0, 1.5, 4.0, 7.0, 2.0, 3.0]
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.1] * 8, "long_factor": FACTORS,
    "original_max_position_embeddings": ORIGINAL, "short_mscale": 1.2, "long_mscale": 1.4,
}  # fmt: skip
PER_LAYER = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": ORIGINAL}),
    ("phimoe", {"rope_parameters": LONGROPE, "num_local_experts": 4}),
    ("stablelm", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),  # cannot be packed
    (
        "gemma3_text",
        {"rope_parameters": PER_LAYER, "max_position_embeddings": ORIGINAL, "sliding_window": 8,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
]  # fmt: skip


def each_alone(directory: Path, samples: Sequence[Sample]) -> Outcome:
    """Return what a fresh model of transformers gives for each sample: `dynamic` remembers those before."""
    total, loss, gradients = sum(sample.num_targets for sample in samples), 0.0, {}
    for sample in samples:
        if sample.num_targets:
            share, alone = sample.num_targets / total, reference_outcome(directory, [sample])
            loss += share * alone.loss
            gradients = {name: gradients.get(name, 0) + share * one for name, one in alone.gradients.items()}
    return Outcome(loss, gradients)


@pytest.mark.parametrize(("kind", "fields"), KINDS, ids=[kind for kind, _ in KINDS])
def test_each_sample_has_the_frequencies_that_it_has_alone(
    kind: str, fields: dict[str, Any], mesh: Mesh, tmp_path: Path
) -> None:
    directory = write_model(Family(kind, deepcopy(fields)), tmp_path, seed=3)  # transformers writes into them
    samples = random_samples(LENGTHS, seed=3)
    expected = each_alone(directory, samples)
    policy = build_policy(TrainedModelConfig(name=str(directory)), mesh, seed=0)
    check_model(policy, mesh, name=kind, pack=True, dtype="float32")
    policy.eval()
    for pack in (True, False, True):  # the last: nothing of the passes before is left
        loss, gradient = trainer_outcome(policy, samples, pack=pack, budget=64).difference(expected)
        assert loss < 1e-5 and gradient < 1e-5, f"pack = {pack}"
