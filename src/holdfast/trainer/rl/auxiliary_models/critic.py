"""The critic of PPO: a model beside the policy that says what the rest of a sequence is worth, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from holdfast.shared.config.algorithm import CriticConfig
from holdfast.shared.config.trainer import TrainedModelConfig
from holdfast.shared.errors import GO_ON_OR_BEGIN_AGAIN, TrainingError
from holdfast.trainer.data.packing import build_micro_batch
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.models.scalar_model import build_scalar_model, predict_values
from holdfast.trainer.models.sharding import reshard
from holdfast.trainer.optim.optimizers import build_optimizer, clip_gradients, update_parameters
from holdfast.trainer.rl.advantages.gae import explained_variance, value_loss, value_sums
from holdfast.trainer.rl.batches.minibatches import Minibatch, measure_targets
from holdfast.trainer.rl.batches.per_token import RETURN, VALUE
from holdfast.trainer.session.train_state import ModelState
from holdfast.trainer.sums import Sums


class Critic:
    """Model, optimizer and statistics of the critic.

    Args:
        model_config: how it is held in memory, and where it starts from unless `config.name` says otherwise.
    """

    def __init__(self, config: CriticConfig, model_config: TrainedModelConfig, mesh: Mesh, *, seed: int):
        self._config = config
        self._mesh = mesh
        init = model_config.init if config.name is None else "pretrained"
        own = model_config.model_copy(update={"name": config.name or model_config.name, "lora": None, "init": init})
        # A head of zeros: its first values are 0, so that the first advantages are the returns alone.
        self.model = build_scalar_model(own, mesh, seed=seed, head="zero")
        self.optimizer = build_optimizer(self.model.hf_model, config.optim)
        self.state = ModelState(self.model, self.optimizer)
        self._sums = Sums()

    def measure(self, minibatches: Sequence[Minibatch]) -> None:
        """Give every sample the values before its targets, as `per_token[VALUE]`. Collective."""
        self.model.eval()
        measure_targets(
            [VALUE],
            lambda micro: [predict_values(self.model, micro)],
            minibatches,
            self._mesh,
            pack=self.model.layout.packs,
        )
        reshard(self.model)
        self.model.train()

    def update(self, minibatch: Minibatch, *, lr: float) -> None:
        """Take one optimizer step towards the returns of the minibatch: the mean over its tokens. Collective.

        Raises:
            TrainingError: loss or gradient is not finite; nothing was changed.
        """
        # At least 1: a minibatch may have nothing to train, and still every rank must take part.
        num_targets = max(1, minibatch.num_targets)
        losses = Sums("value_loss", "value_clip_fraction")
        for indices in minibatch.micro_batches:
            micro = build_micro_batch(
                minibatch.samples, indices, pack=self.model.layout.packs, device=self._mesh.device
            )
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
        # Numbers of all ranks, so that all come to the same verdict.
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
        and `explained_variance` of the values before the step. Collective.
        """
        sums, self._sums = self._sums.read(), Sums()
        num_updates = sums.pop("updates")
        prefix = "of_values/"
        own = {name.removeprefix(prefix): sums.pop(name) for name in list(sums) if name.startswith(prefix)}
        metrics = {name: value / num_updates for name, value in sums.items()}
        return metrics | {"explained_variance": explained_variance(**self._mesh.sum(own))}
