"""Tiny models of many families, no field at a value at which it does nothing, and what transformers makes of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from holdfast.trainer.data.packing import Sample, build_micro_batch, plan_rows
from holdfast.trainer.model.policy import Policy
from holdfast.trainer.rl.batch import plan_shared_prompts

VOCABULARY = 97
_BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


_WITHOUT = {"falcon": ("head_dim",)}  # they compute it


@dataclass(frozen=True)
class Family:
    """A kind of models by its `model_type`, and the fields of its tiny config beside the common ones."""

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def name(self) -> str:
        """How the table calls it."""
        return f"{self.kind} ({self.label})" if self.label else self.kind


def _read_families() -> list[Family]:
    table = json.loads(Path(__file__).with_suffix(".json").read_text())
    families = []
    for row in table["families"]:
        fields = {key: value for name in row.get("like", ()) for key, value in table["common"][name].items()}
        families.append(Family(row["kind"], fields | row.get("fields", {}), row.get("label", "")))
    return families


FAMILIES = _read_families()


def write_model(family: Family, directory: Path, *, seed: int) -> Path:
    """Write a random model of the family, whose vectors (norms, biases, sinks) are no constants."""
    base = {name: value for name, value in _BASE.items() if name not in _WITHOUT.get(family.kind, ())}
    config = AutoConfig.for_model(family.kind, **(base | family.fields))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        config.save_pretrained(directory)
        return directory
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.05))
    model.save_pretrained(directory)
    return directory


def random_samples(lengths: Sequence[int], *, seed: int) -> list[Sample]:
    """Return samples of random tokens that are no special ones; a third of the tokens is not trained."""
    generator = np.random.default_rng(seed)
    return [Sample(generator.integers(3, VOCABULARY, n).astype(np.int32), generator.random(n) < 0.7) for n in lengths]


def group_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Return three answers to each of two prompts, one behind the other and mixed, of the tokens of the samples."""
    first, second, *answers = (sample.token_ids for sample in samples)
    found = []
    for place, (prompt, own) in enumerate(zip([first, second] * 3, (answers * 2)[:6], strict=True)):
        tokens = np.concatenate([prompt, own[place // 4 :]])
        mask = np.arange(len(tokens)) >= len(prompt)
        mask[len(prompt) + 1 :: 3] = False  # as where a tool or a user speaks in between
        found.append(Sample(tokens, mask))
    return found


@dataclass(frozen=True)
class Outcome:
    """Mean cross-entropy over all targets, and its gradient by parameter."""

    loss: float
    gradients: dict[str, Tensor]

    def difference(self, other: Self) -> tuple[float, float]:
        """Return the differences of the losses, and of the gradients relative to the norm of all of them."""
        assert self.gradients.keys() == other.gradients.keys()
        norm = torch.stack([gradient.norm() for gradient in other.gradients.values()]).norm()
        apart = torch.stack([(self.gradients[name] - other.gradients[name]).norm() for name in other.gradients]).norm()
        return abs(self.loss - other.loss), float(apart / norm)


def reference_outcome(path: Path, samples: Sequence[Sample], weights: Mapping[str, Tensor] | None = None) -> Outcome:
    """Return what transformers' own forward gives, sample by sample. `weights`: to take instead of the directory's."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    if weights is not None:
        assert not model.load_state_dict(weights, strict=False).unexpected_keys
    total = sum(sample.num_targets for sample in samples)
    loss = torch.zeros(())
    for sample in samples:
        ids_L = torch.as_tensor(sample.token_ids, dtype=torch.long)
        logprobs_LV = model(input_ids=ids_L[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        targets = torch.as_tensor(sample.targets)
        loss = loss - logprobs_LV[targets - 1, ids_L[targets]].sum() / total
    loss.backward()
    return Outcome(float(loss.detach()), gradients_of(model))


def trainer_outcome(policy: Policy, samples: list[Sample], *, pack: bool, budget: int, share: bool = False) -> Outcome:
    policy.zero_grad(set_to_none=True)
    arrangement = policy.layout.arrangement(pack=pack)
    total, loss_sum = sum(sample.num_targets for sample in samples), 0.0
    if share:
        (plan,) = plan_shared_prompts(samples, row_tokens=budget, layout=policy.layout, num_ranks=1)
    else:
        (plan,) = plan_rows(
            [len(sample.token_ids) for sample in samples], arrangement=arrangement, budget=budget,
            rows_per_micro_batch=3, world_size=1,
        )  # fmt: skip
    for indices in plan:
        device = next(policy.parameters()).device
        micro = build_micro_batch(samples, indices, pack=arrangement == "packed", share=share, device=device)
        logprobs_N, *_ = policy(
            micro.input_ids_BL, micro.position_ids_BL, micro.predict_index_N, micro.target_ids_N,
            packed_index=micro.packed_index,
        )  # fmt: skip
        loss = -logprobs_N.sum() / total
        loss.backward()
        loss_sum += float(loss.detach())
    return Outcome(loss_sum, gradients_of(policy.hf_model))


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a copy of each gradient, which is whole where it is sharded. Collective."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: (one.full_tensor() if isinstance(one, DTensor) else one).cpu().clone() for name, one in found.items()}
