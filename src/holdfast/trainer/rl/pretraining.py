"""Supervised samples beside the rollouts of RL: PPO-ptx (Ouyang et al. 2022, "Training language models to follow
instructions with human feedback")."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from holdfast.shared.config.algorithm import PretrainingConfig
from holdfast.trainer.data.samples import SampleOrder, fingerprint_samples, load_samples
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.models.policy import Policy
from holdfast.trainer.supervised.step import supervised_step


class PretrainingMix:
    """The samples, in an order that is a pure function of the seed and of how many updates there were.

    Attributes:
        fingerprint: of the samples.
    """

    def __init__(self, config: PretrainingConfig, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, *, seed: int) -> None:
        """Tokenise them, each rank its share. Collective."""
        self._config = config
        self._samples, _ = load_samples(config.data, tokenizer, seed=seed, mesh=mesh)
        self._order = SampleOrder(len(self._samples), seed=seed, shuffle=config.data.shuffle)
        self.fingerprint = fingerprint_samples(self._samples)

    def step(self, policy: Policy, update: int, mesh: Mesh) -> float:
        """Accumulate the gradients of the samples of one update; return their mean cross-entropy. Collective.

        Args:
            update: how many updates of the policy there were before, in the whole run.
        """
        size = self._config.data.batch_size
        batch = [self._samples[index] for index in self._order.batch(update * size, size)]
        return supervised_step(policy, batch, self._config.data, mesh, coef=self._config.coef)
