"""The learned reward model of an RL run: frozen, beside the policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.shared.config.trainer import TrainedModelConfig
from holdfast.shared.errors import DataError
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.data.samples import refuse_other_tokens
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.models.decoder import freeze
from holdfast.trainer.models.pretrained import is_classifier, load_model_config
from holdfast.trainer.models.scalar_model import build_scalar_model, score_samples
from holdfast.trainer.models.sharding import reshard
from holdfast.trainer.rl.batches.minibatches import plan_micro_batches


class RewardModel:
    """Scores whole sequences: the value at their last token, as `reward-model` trains it.

    Args:
        name: directory that `reward-model` published, or a hub model with one score; with the policy's tokenizer.
        model_config: how it is held in memory.

    Raises:
        DataError: it cannot be loaded, is no reward model, or knows the policy's tokens by other ids.
    """

    def __init__(self, name: str, model_config: TrainedModelConfig, mesh: Mesh) -> None:
        if not is_classifier(load_model_config(name)):
            raise DataError(
                f"reward_model.name = '{name}' is a language model without a score. Train one with `reward-model`, or "
                "name the directory of a model for sequence classification with num_labels = 1."
            )
        refuse_other_tokens(name, model_config.tokenizer_name, key="reward_model.name")
        own = model_config.model_copy(update={"name": name, "init": "pretrained", "lora": None})
        self.model = build_scalar_model(own, mesh, seed=0)
        self._mesh = mesh
        freeze(self.model)

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], *, row_tokens: int) -> list[float]:
        """Return the score of every sample, the same on every rank; of several sequences that of the last. Collective.

        The last branch of a rollout is its chat as the template shows it in the end.
        """
        device = self._mesh.device
        samples = [_last_sequence(sample) for sample in samples]
        own = plan_micro_batches(samples, row_tokens=row_tokens, layout=self.model.layout, mesh=self._mesh)
        found = [score_samples(self.model, samples, indices, pack=True, device=device) for indices in own]
        scores_S = torch.zeros(len(samples))
        # To the CPU in one copy, behind all passes: each waits for the device.
        scores_S[[index for indices in own for index in indices]] = torch.cat(found).cpu()
        reshard(self.model)
        # Every sample is one rank's; the others add zero, which changes no bit.
        return self._mesh.sum_tensor(scores_S).tolist()


def _last_sequence(sample: Sample) -> Sample:
    if len(sample.starts) == 1:
        return sample
    return Sample(sample.token_ids[sample.starts[-1] :], sample.loss_mask[sample.starts[-1] :])
