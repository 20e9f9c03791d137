"""Models beside the policy: critic (value of the rest of a sequence), average of the weights, reference, reward model.

Frozen models (reference, reward model) are the same at every step, so checkpoints hold only their digest, and a resumed
run never continues with another model. A reference that follows the policy changes at every refresh, so checkpoints
hold it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from holdfast.config.algorithm import CriticConfig
from holdfast.config.training import TrainedModelConfig
from holdfast.errors import GO_ON_OR_BEGIN_AGAIN, CheckpointError, DataError, TrainingError
from holdfast.trainer.checkpoint.state import State
from holdfast.trainer.data.packing import Sample
from holdfast.trainer.data.samples import refuse_other_tokens
from holdfast.trainer.mesh import Mesh, Sums
from holdfast.trainer.model.decoder import freeze, reshard, rows_of_update
from holdfast.trainer.model.lora import digest_of
from holdfast.trainer.model.model_config import is_classifier, load_model_config
from holdfast.trainer.model.structure import base_tensors
from holdfast.trainer.model.value_model import build_scalar_model, predict_values, score_samples
from holdfast.trainer.optimizer import build_optimizer, clip_gradients, update_parameters
from holdfast.trainer.rl.batch import RETURN, VALUE, Minibatch, measure_targets, plan_micro_batches
from holdfast.trainer.rl.losses import value_loss
from holdfast.trainer.rl.metrics import explained_variance, value_sums
from holdfast.trainer.state import ModelState


class Critic:
    """Model, optimizer and statistics of the critic. `model_config`: how it is held in memory, and where it starts from
    unless `config.name` says otherwise."""

    def __init__(self, config: CriticConfig, model_config: TrainedModelConfig, mesh: Mesh, *, seed: int):
        self._config = config
        self._mesh = mesh
        init = model_config.init if config.name is None else "pretrained"
        own = model_config.model_copy(update={"name": config.name or model_config.name, "lora": None, "init": init})
        # A head of zeros: its first values are 0, so that the first advantages are just the returns.
        self.model = build_scalar_model(own, mesh, seed=seed, head="zero")
        self.optimizer = build_optimizer(self.model.hf_model, config.optim)
        self.state = ModelState(self.model, self.optimizer)
        self._sums = Sums()

    def measure(self, minibatches: Sequence[Minibatch]) -> None:
        """Give every sample the values before its targets, as `per_token[VALUE]`. Collective."""
        self.model.eval()
        pack = self.model.layout.packs
        measure_targets(VALUE, lambda micro: predict_values(self.model, micro), minibatches, self._mesh, pack=pack)
        reshard(self.model)
        self.model.train()

    def update(self, minibatch: Minibatch, *, lr: float) -> None:
        """Take one optimizer step towards the returns of the minibatch: the mean over its tokens. Collective. Raise
        TrainingError if loss or gradient is not finite; nothing was changed."""
        # At least 1: a minibatch may have nothing to train, and still every rank must take part.
        num_targets = max(1, minibatch.num_targets)
        losses = Sums("value_loss", "value_clip_fraction")
        for indices in rows_of_update(self.model, minibatch.micro_batches):
            micro = minibatch.build(indices, pack=self.model.layout.packs, device=self._mesh.device)
            values_N = predict_values(self.model, micro)
            weights_N = torch.full_like(values_N, 1 / num_targets)
            returns_N = micro.per_token[RETURN]
            loss, counts = value_loss(values_N, micro.per_token[VALUE], returns_N, weights_N, clip=self._config.clip)
            # FSDP averages gradients over ranks; the weights sum to one over all of them.
            (loss * self._mesh.world_size).backward()
            clipped = counts["value_clip_fraction"].double() / num_targets
            losses.add({"value_loss": loss, "value_clip_fraction": clipped})
            of_values = value_sums(returns_N, micro.per_token[VALUE])
            self._sums.add({f"of_values/{name}": value for name, value in of_values.items()})
        norm = clip_gradients(self.model, self._config.optim.max_grad_norm)
        summed = self._mesh.sum(losses.read())
        # Sums over all ranks, so all ranks raise or none.
        if not (math.isfinite(summed["value_loss"]) and math.isfinite(norm)):
            raise TrainingError(
                f"the critic's loss is {summed['value_loss']}, its gradient norm is {norm}. Nothing of this step was "
                "saved or published. Lower critic.optim.lr, or look at this step's rewards; then "
                f"{GO_ON_OR_BEGIN_AGAIN}."
            )
        update_parameters(self.optimizer, lr=lr)
        self._sums.add(summed | {"updates": 1.0, "value_grad_norm": norm})

    def take_metrics(self) -> dict[str, float]:
        """Return `value_loss`, `value_clip_fraction`, `value_grad_norm` as means over the updates since the last call,
        and `explained_variance` of the values before the step. Collective."""
        sums, self._sums = self._sums.read(), Sums()
        num_updates = sums.pop("updates")
        prefix = "of_values/"
        own = {name.removeprefix(prefix): sums.pop(name) for name in list(sums) if name.startswith(prefix)}
        metrics = {name: value / num_updates for name, value in sums.items()}
        return metrics | {"explained_variance": explained_variance(**self._mesh.sum(own))}


class Ema(State):
    """Averages the weights of all steps: `average <- decay * average + (1 - decay) * weights`.

    The average starts as a copy of the weights (as torch.optim.swa_utils.AveragedModel does with
    `get_ema_avg_fn`). It is float32 whatever the weights are, since bfloat16 would round most updates away;
    shards of FSDP2 (DTensor) stay sharded as they are.

    Args:
        tensors: floating-point weights by name; cloned.
        decay: share of the average that an update keeps, such as 0.992.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        # copy=True: `to` returns the very weights where they are float32 already.
        self._averages = {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in tensors.items()}

    @torch.no_grad()
    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Take in the weights after a step, with the names and sharding of the start."""
        for name, average in self._averages.items():
            average.lerp_(tensors[name].detach().to(torch.float32), 1 - self.decay)
        self.num_updates += 1

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by name, without a copy; loading writes into them."""
        return dict(self._averages)

    def values(self) -> dict[str, Any]:
        """Return the number of updates; the decay is configuration."""
        return {"num_updates": self.num_updates}

    def restore(self, values: dict[str, Any]) -> None:
        self.num_updates = int(values["num_updates"])


class FrozenModel(State):
    """The identity of a model, as a part of a run's state. Collective to make.

    Args:
        name: directory or hub name of the model.
        key: the setting that it is from.
    """

    def __init__(self, name: str, hf_model: PreTrainedModel, *, key: str) -> None:
        self._name = name
        self._key = key
        self._digest = digest_of(base_tensors(hf_model))

    def values(self) -> dict[str, Any]:
        """Return name and digest."""
        return {"name": self._name, "digest": self._digest}

    def restore(self, values: dict[str, Any]) -> None:
        """Check that the run began with this model. Raise CheckpointError if it is another."""
        if values["digest"] != self._digest:
            raise CheckpointError(
                f"{self._key} = '{self._name}' holds other weights than those that the run began with "
                f"('{values['name']}'): going on would change what it trains for. Name that model, or start a new run "
                "from the weights of this one with another --output-dir and --ckpt.init-from."
            )


class SyncedReference(State):
    """A reference that takes over the weights of the policy every so often, as a part of a run's state.

    After every `interval` steps (Gorbatovski et al. 2024, "Learn Your Reference Model for Real Good Alignment", the
    hard update). All in float32; shards of FSDP2 stay sharded as they are.

    Args:
        name: directory or hub name of the reference that the run begins with.
        policy: the weights that it will follow, by name.

    Raise DataError if policy and reference are models of other shapes.
    """

    def __init__(self, name: str, hf_model: PreTrainedModel, policy: Mapping[str, Tensor], *, interval: int) -> None:
        self._tensors = base_tensors(hf_model)
        self._interval = interval
        shapes, wanted = ({key: one.shape for key, one in of.items()} for of in (self._tensors, policy))
        if differing := sorted(key for key in shapes | wanted if shapes.get(key) != wanted.get(key)):
            raise DataError(
                f"kl.refresh_interval copies the policy into the reference, and kl.reference = '{name}' is a model of "
                f"another shape ({len(differing)} tensors differ, such as {differing[0]}): name one of the policy's "
                "own shape, or leave refresh_interval out"
            )

    @torch.no_grad()
    def after_step(self, step: int, policy: Mapping[str, Tensor]) -> None:
        """Every `interval` steps: copy the policy's weights, which are sharded as at the start."""
        if step % self._interval:
            return
        for name, tensor in self._tensors.items():
            tensor.copy_(policy[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of the reference by name, without a copy; loading writes into them."""
        return dict(self._tensors)


class RewardModel:
    """Scores whole sequences: the value at their last token, as `reward-model` trains it.

    Args:
        name: directory that `reward-model` published, or a hub model with one score; with the policy's tokenizer.
        model_config: how it is held in memory.

    Raise DataError if it cannot be loaded, is not a reward model, or knows the policy's tokens by other ids.
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
        """Return the score of every sample, the same on every rank; a sample of several sequences has the score of the
        last. Collective.

        The last branch of a rollout is its chat as the template shows it in the end."""
        device = self._mesh.device
        samples = [_last_sequence(sample) for sample in samples]
        own = plan_micro_batches(samples, row_tokens=row_tokens, layout=self.model.layout, mesh=self._mesh)
        found = [score_samples(self.model, samples, indices, pack=True, device=device) for indices in own]
        scores_S = torch.zeros(len(samples))
        # To the CPU in one copy, after all passes: each waits for the device.
        scores_S[[index for indices in own for index in indices]] = torch.cat(found).cpu()
        reshard(self.model)
        # Every sample is one rank's; the others add zero, which changes no bit.
        return self._mesh.sum_tensor(scores_S).tolist()


def _last_sequence(sample: Sample) -> Sample:
    if len(sample.starts) == 1:
        return sample
    return Sample(sample.token_ids[sample.starts[-1] :], sample.loss_mask[sample.starts[-1] :])
