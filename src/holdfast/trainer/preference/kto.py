"""KTO: its data (answers labelled good or bad one by one), its loss, and its estimate of the KL divergence.

KTO compares the log-ratio of each answer with the policy's divergence from the reference. Every step begins with a pass
without gradients that estimates this divergence, on prompts with answers to other prompts. The estimate is the mean
log-ratio of the whole step, over all ranks and micro-batches. It is a function of weights and batch, so checkpoints
keep only the log-probabilities of the reference. Only the data decides which answer goes with which other prompt, so
the reference's log-probabilities of both are computed once.

Shape legend: A answers of a micro-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from holdfast.config import DpoConfig
from holdfast.config.preference import PreferenceDataConfig
from holdfast.errors import DataError
from holdfast.trainer.data.packing import Sample, to_device
from holdfast.trainer.data.rows import ANSWER_FORMATS, ANSWER_SHAPES, PAIR_FORMATS
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.policy import Policy
from holdfast.trainer.preference.losses import kto_loss
from holdfast.trainer.preference.pairs import plan_sides, read_sides, usable_pairs
from holdfast.trainer.preference.reference import Reference, predict_sides
from holdfast.trainer.preference.training import PairObjective

_log = logging.getLogger("trainer")


@dataclass(frozen=True)
class LabelledAnswer:
    """An answer that is good or bad, and one to another prompt.

    Attributes:
        answer: with its prompt; its `value` is 1 for a good one, 0 for a bad one.
        mismatched: the prompt with the answer to another one.
        number: place among all answers of the data that are used, from 0; those held out count too.
        row: of the data; both answers of a pair have the same.
    """

    answer: Sample
    mismatched: Sample
    number: int
    row: int

    @property
    def is_desirable(self) -> bool:
        """Whether it is a good one."""
        return self.answer.value > 0

    @property
    def sides(self) -> tuple[Sample, Sample]:
        """Answer, mismatched."""
        return self.answer, self.mismatched

    @property
    def num_tokens(self) -> int:
        """Tokens of both, each with the prompt."""
        return len(self.answer.token_ids) + len(self.mismatched.token_ids)


def load_answers(
    config: PreferenceDataConfig, tokenizer: PreTrainedTokenizerBase, *, mesh: Mesh | None = None
) -> list[LabelledAnswer]:
    """Return all answers, tokenised, in the order of the file; of a pair first the chosen, then the rejected one.

    Args:
        mesh: the ranks, if there are several: all get all answers. Collective then.

    Raises:
        ConfigError, DataError: the dataset is missing, lacks columns, has a row that cannot be used, or has one prompt
            only.
    """
    samples, form = read_sides(config, tokenizer, ANSWER_FORMATS, shapes=ANSWER_SHAPES, mesh=mesh)
    if form in PAIR_FORMATS:
        pairs = usable_pairs(config, samples)
        answers = [replace(side, value=value) for pair in pairs for side, value in zip(pair.sides, (1, 0), strict=True)]
        rows = [pair.row for pair in pairs for _ in pair.sides]
    else:
        answers = _usable(config, samples)
        rows = list(range(len(answers)))
    others = following_others([_prompt(answer).tobytes() for answer in answers])
    if not others:
        raise DataError(
            f"{config.name}: all answers have the same prompt, and KTO needs at least two: it compares with answers "
            "to another prompt. Use a loss of pairs."
        )
    return [
        LabelledAnswer(answer, _mismatched(answer, answers[other]).cut(config.seq_len), number, row)
        for number, (answer, other, row) in enumerate(zip(answers, others, rows, strict=True))
    ]


def following_others(prompts: Sequence[bytes]) -> list[int]:
    """Return, for each prompt, the place of the next that differs, going round; nothing where all are the same."""
    count = len(prompts)
    if len(set(prompts)) < 2:
        return []
    others = [0] * count
    for place in reversed(range(2 * count - 1)):  # twice round: the last ones find those at the beginning
        here, after = place % count, (place + 1) % count
        others[here] = after if prompts[after] != prompts[here] else others[after]
    return others


def _usable(config: PreferenceDataConfig, samples: Sequence[Sample]) -> list[Sample]:
    """Return the answers that can be trained, as `config` says."""
    fitting = [sample for sample in samples if len(sample.token_ids) <= config.seq_len or config.too_long != "drop"]
    answers = [answer for sample in fitting if (answer := sample.cut(config.seq_len)).num_targets]
    if too_long := sum(len(sample.token_ids) > config.seq_len for sample in samples):
        done = "dropped" if config.too_long == "drop" else "cut"
        _log.warning("%s: %d answers of more than %d tokens were %s", config.name, too_long, config.seq_len, done)
    if untrained := len(fitting) - len(answers):
        _log.warning("%s: %d answers have nothing to train on and are left out", config.name, untrained)
    if not answers:
        raise DataError(f"{config.name}: no answers to train on are left")
    return answers


def _prompt(answer: Sample) -> np.ndarray:
    """Return the tokens before the first that is trained."""
    return answer.token_ids[: answer.targets[0]]


def _mismatched(answer: Sample, other: Sample) -> Sample:
    """Return the prompt of `answer` with the answer of `other`."""
    prompt, begin = _prompt(answer), other.targets[0]
    mask = np.concatenate([np.zeros(len(prompt), dtype=bool), other.loss_mask[begin:]])
    return Sample(np.concatenate([prompt, other.token_ids[begin:]]), mask)


_ANSWER, _MISMATCHED = 0, 1


@dataclass(frozen=True)
class KtoObjective:
    """The mean loss of labelled answers, and what is measured beside it."""

    config: DpoConfig
    reference: Reference
    mesh: Mesh

    def accumulate_gradients(self, model: Policy, batch: Sequence[LabelledAnswer]) -> dict[str, float]:
        """Add the gradients of one optimizer step; return its metrics, over all its answers. Collective."""
        return self._compared_with(self.divergence(model, batch)).accumulate_gradients(model, batch)

    def measure(self, model: Policy, preferences: Sequence[LabelledAnswer]) -> dict[str, float]:
        """Return the metrics of answers without dropout. Collective."""
        return self._compared_with(self.divergence(model, preferences)).measure(model, preferences)

    def divergence(self, model: Policy, batch: Sequence[LabelledAnswer]) -> float:
        """Return z of KTO: the mean of l_pi - l_ref over the mismatched answers in nats, not below 0. Collective.

        It is measured without gradients and without dropout.
        """

        def forward(model: Policy, batch: Sequence[LabelledAnswer], indices: list[int]) -> dict[str, Tensor]:
            return {"kl": self._ratios(model, batch, indices, _MISMATCHED)[0]}

        plan = partial(plan_sides, side=_MISMATCHED)
        measuring = PairObjective(
            forward, self.config.data, self.mesh, plan=plan, measuring="estimating the divergence"
        )
        return max(0.0, measuring.measure(model, batch)["kl"])

    def _ratios(
        self, model: Policy, batch: Sequence[LabelledAnswer], indices: list[int], side: int
    ) -> tuple[Tensor, Tensor]:
        """Return l_pi - l_ref (A,) and l_pi (A,) of one side of `batch[indices]`."""
        device = self.mesh.device
        sides = [answer.sides[side] for answer in batch]
        logprobs_A = predict_sides(model, sides, indices, pack=self.config.data.pack, device=device)
        reference_A = self.reference.of([batch[index] for index in indices], device)[:, side]
        return logprobs_A - reference_A, logprobs_A

    def _compared_with(self, kl: float) -> PairObjective[Policy, LabelledAnswer]:
        def forward(model: Policy, batch: Sequence[LabelledAnswer], indices: list[int]) -> dict[str, Tensor]:
            ratios_A, logprobs_A = self._ratios(model, batch, indices, _ANSWER)
            labels = [batch[index].is_desirable for index in indices]
            is_desirable_A = to_device(torch.tensor(labels, dtype=torch.bool), self.mesh.device)
            losses_A, rewards_A = kto_loss(ratios_A, is_desirable_A, kl, self.config.loss)
            good_A, bad_A = is_desirable_A.double(), (~is_desirable_A).double()
            return {
                "loss": losses_A,
                "rewards/chosen": rewards_A * good_A,
                "rewards/rejected": rewards_A * bad_A,
                "logps/chosen": logprobs_A * good_A,
                "logps/rejected": logprobs_A * bad_A,
                "desirable": good_A,
            }

        def summarize(means: dict[str, float]) -> dict[str, float]:
            shares = {"chosen": means["desirable"], "rejected": 1 - means["desirable"]}
            metrics = {name: means[name] for name in ("loss", "desirable")} | {"kl": kl}
            for side, share in shares.items():
                names = (f"rewards/{side}", f"logps/{side}")
                metrics |= {name: means[name] / share for name in names} if share else {}
            if all(shares.values()):
                metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
            return metrics

        plan = partial(plan_sides, side=_ANSWER)
        return PairObjective(forward, self.config.data, self.mesh, summarize, plan)
