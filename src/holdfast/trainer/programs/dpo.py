"""Preference optimisation: `uv run dpo @ configs/reverse_text/dpo.toml`.

The loss compares what the policy and a frozen reference say about both sides of a pair, or (KTO) about one
answer; the loop over them is in `holdfast.trainer.programs.sft`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.config import DpoConfig
from holdfast.process.events import report
from holdfast.trainer.data.packing import to_device
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.policy import WATCHED, Policy, build_policy
from holdfast.trainer.positions import check_lengths
from holdfast.trainer.preference.kto import KtoObjective
from holdfast.trainer.preference.losses import PairLogprobs, preference_loss
from holdfast.trainer.preference.objective import PairObjective
from holdfast.trainer.preference.pairs import Pair, fingerprint_preferences, plan_preferences, split_preferences
from holdfast.trainer.preference.reference import Reference, ReferenceWork, read_pairs
from holdfast.trainer.programs.sft import Objective, train_on_rows
from holdfast.trainer.session import start_program, start_session
from holdfast.trainer.survey import load_preferences, survey_of, tell_data


def run(config: DpoConfig) -> None:
    """Train until `max_steps`, then publish the weights."""
    with start_program(config) as (mesh, tokenizer):
        report("reading data")
        preferences = list(load_preferences(config, tokenizer, mesh=mesh))
        training, held_out = split_preferences(preferences, config.data.validation_fraction, seed=config.seed)
        check_lengths(config, training, held_out, is_told=mesh.is_main)
        tell_data(config, survey_of(training, len(held_out), tokenizer), is_main=mesh.is_main)
        work = None
        if config.has_reference:
            work = ReferenceWork(config, mesh, preferences, training, held_out)
            work.compute_beside()
        with start_session(
            config,
            mesh,
            tokenizer,
            build_policy,
            pack=config.data.pack,
            share=config.data.pack and config.loss.type != "kto",  # whose answers do not share
            data_fingerprint=fingerprint_preferences(training),
        ) as session:
            none = Reference(np.zeros((len(preferences), 2)), {})
            reference = none if work is None else work.finish(session)
            objective = _objective(config, reference, mesh)
            train_on_rows(config, session, objective, training, held_out, attachments=reference.attachments)
            session.publish_last()


def _objective(config: DpoConfig, reference: Reference, mesh: Mesh) -> Objective[Policy, Any]:
    make = KtoObjective if config.loss.type == "kto" else dpo_objective
    return make(config, reference, mesh)


def dpo_objective(config: DpoConfig, reference: Reference, mesh: Mesh) -> PairObjective[Policy, Pair]:
    """Return the configured loss of pairs, with the rewards and log-probabilities of both sides as metrics.
    `reference`: what the loss compares the policy with."""

    def forward(policy: Policy, pairs: Sequence[Pair], indices: list[int]) -> dict[str, Tensor]:
        device, chosen = mesh.device, [pairs[index] for index in indices]
        found = read_pairs(policy, pairs, indices, WATCHED, pack=config.data.pack, share=True, device=device)
        logprobs_P2 = found.logprobs_N
        assert found.entropy_N is not None and found.accuracy_N is not None  # WATCHED asks for both
        reference_P2 = reference.of(chosen, device)
        lengths = [[side.num_targets for side in pair.sides] for pair in chosen]
        tokens_P2 = to_device(torch.tensor(lengths, dtype=torch.float64), device).reshape(-1, 2)
        given = PairLogprobs(
            chosen_P=logprobs_P2[:, 0],
            rejected_P=logprobs_P2[:, 1],
            reference_chosen_P=reference_P2[:, 0],
            reference_rejected_P=reference_P2[:, 1],
            chosen_tokens_P=tokens_P2[:, 0],
            rejected_tokens_P=tokens_P2[:, 1],
            margins_P=to_device(torch.tensor([pair.margin for pair in chosen], dtype=torch.float64), device),
        )
        losses_P, chosen_rewards_P, rejected_rewards_P = preference_loss(given, config.loss)
        return {
            "loss": losses_P,
            "rewards/chosen": chosen_rewards_P,
            "rewards/rejected": rejected_rewards_P,
            "rewards/margins": chosen_rewards_P - rejected_rewards_P,
            "rewards/accuracies": (chosen_rewards_P > rejected_rewards_P).double(),
            "logps/chosen": logprobs_P2[:, 0],
            "logps/rejected": logprobs_P2[:, 1],
            "entropy": found.entropy_N[:, 0].detach() / tokens_P2[:, 0],
            "token_accuracy": found.accuracy_N[:, 0] / tokens_P2[:, 0],
        }

    return PairObjective(forward, config.data, mesh, plan=partial(plan_preferences, share=True))
