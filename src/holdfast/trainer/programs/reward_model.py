"""Reward model training: `uv run reward-model @ configs/reverse_text/reward_model.toml`.

The decoder of a language model and a new head learn to score the chosen side of a pair above the
rejected one, each at its last token; the loop over the pairs is in `holdfast.trainer.programs.sft`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from holdfast.chat.tokenizer import Tokenizer, end_token_ids
from holdfast.config import RewardTrainingConfig
from holdfast.config.training import TrainedModelConfig
from holdfast.process.events import report
from holdfast.trainer.data.packing import Sample, to_device
from holdfast.trainer.data.samples import chat_tokenizer
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.value_model import ScalarModel, build_scalar_model, score_samples
from holdfast.trainer.positions import check_lengths
from holdfast.trainer.preference.losses import reward_loss
from holdfast.trainer.preference.objective import PairObjective
from holdfast.trainer.preference.pairs import Pair, fingerprint_preferences, split_preferences
from holdfast.trainer.programs.sft import train_on_rows
from holdfast.trainer.session import start_program, start_session
from holdfast.trainer.survey import load_preferences, survey_of, tell_data


def run(config: RewardTrainingConfig) -> None:
    """Train until `max_steps`, then publish the weights."""
    with start_program(config) as (mesh, tokenizer):
        report("reading data")
        loaded = load_preferences(config, tokenizer, mesh=mesh)
        with_stops = chat_tokenizer(tokenizer, end_token_ids=end_token_ids(config.model.tokenizer_name))
        pairs = [end_at_stop_token(pair, with_stops) for pair in loaded if isinstance(pair, Pair)]
        training, held_out = split_preferences(pairs, config.data.validation_fraction, seed=config.seed)
        check_lengths(config, training, held_out, is_told=mesh.is_main)
        tell_data(config, survey_of(training, len(held_out), tokenizer), is_main=mesh.is_main)
        build = _with_padding(tokenizer, pairs)
        with start_session(
            config, mesh, tokenizer, build, pack=config.data.pack, data_fingerprint=fingerprint_preferences(training)
        ) as session:
            train_on_rows(config, session, reward_objective(config, mesh), training, held_out)
            session.publish_last()


def end_at_stop_token(pair: Pair, tokenizer: Tokenizer) -> Pair:
    """Return the pair without the white space that some chat templates write after an answer's stop token.

    A sampled answer ends with one of the `stop_token_ids`, so this is where its score is read."""

    def shortened(side: Sample) -> Sample:
        stops = np.flatnonzero(np.isin(side.token_ids, tokenizer.stop_token_ids) & side.loss_mask)
        end = int(stops[-1]) + 1 if len(stops) else len(side.token_ids)
        if tokenizer.decode(side.token_ids[end:].tolist(), skip_special_tokens=False).strip():
            return side
        return side.cut(end)

    return replace(pair, chosen=shortened(pair.chosen), rejected=shortened(pair.rejected))


def reward_objective(config: RewardTrainingConfig, mesh: Mesh) -> PairObjective[ScalarModel, Pair]:
    """Return the loss of pairs, with the rewards of both sides as metrics."""

    def forward(model: ScalarModel, pairs: Sequence[Pair], indices: list[int]) -> dict[str, Tensor]:
        rewards_P2 = score_pairs(model, pairs, indices, pack=config.data.pack, device=mesh.device)
        margins_P = to_device(
            torch.tensor([pairs[index].margin for index in indices], dtype=torch.float64), mesh.device
        )
        losses_P = reward_loss(rewards_P2[:, 0], rewards_P2[:, 1], margins_P, config.loss)
        rewards_P2 = rewards_P2.detach()
        chosen_P, rejected_P = rewards_P2.unbind(1)
        return {
            "loss": losses_P,
            "rewards/chosen": chosen_P,
            "rewards/rejected": rejected_P,
            "rewards/margins": chosen_P - rejected_P,
            "rewards/accuracies": (chosen_P > rejected_P).double(),
            "rewards/squares": rewards_P2.square().mean(1),
        }

    def summarize(means: dict[str, float]) -> dict[str, float]:
        mean = (means["rewards/chosen"] + means["rewards/rejected"]) / 2
        variance = means.pop("rewards/squares") - mean**2
        return means | {"rewards/mean": mean, "rewards/std": max(0.0, variance) ** 0.5}

    return PairObjective(forward, config.data, mesh, summarize)


def score_pairs(
    model: ScalarModel, pairs: Sequence[Pair], indices: list[int], *, pack: bool, device: torch.device
) -> Tensor:
    """Return the rewards (P, 2) in float64 of both sides of `pairs[indices]`, in one forward pass.

    With no indices it takes part in the collectives of the pass, and the empty result has a gradient."""
    sides = [side for pair in pairs for side in pair.sides]
    places = [2 * index + side for index in indices for side in (0, 1)]
    return score_samples(model, sides, places, pack=pack, device=device).double().reshape(-1, 2)


def _with_padding(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair]) -> Callable[..., ScalarModel]:
    """Return the builder of a model whose config names the token that transformers pads with.

    transformers reads the score at the last token that is not padding, so nothing may end in that."""

    def build(config: TrainedModelConfig, mesh: Mesh, *, seed: int, weights: bool) -> ScalarModel:
        model = build_scalar_model(config, mesh, seed=seed, weights=weights)
        published = model.hf_model.config
        if published.pad_token_id is None:
            published.pad_token_id = tokenizer.pad_token_id
        padding = published.pad_token_id
        if padding is None:
            report("WARNING: neither model nor tokenizer has a pad token: transformers will score single texts only")
        elif any(side.token_ids[-1] == padding for pair in pairs for side in pair.sides):
            report(
                f"WARNING: answers end in token {padding}, which is also the padding: transformers' own classification "
                "takes the token before it, so its scores differ from those trained here. Set another pad_token_id in "
                "the model's config.json."
            )
        return model

    return build
