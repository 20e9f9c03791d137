"""Training data beside the fresh rollouts: replayed prompt groups of earlier steps, and supervised samples.

`PretrainingMix` is PPO-ptx (Ouyang et al. 2022, "Training language models to follow instructions with human feedback").
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from holdfast.config.algorithm import PretrainingConfig
from holdfast.errors import CheckpointError
from holdfast.protocol.rollouts import Rollout, Sampling, decode_packed, encode_packed
from holdfast.trainer.data.samples import SampleOrder, fingerprint_samples, load_samples
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.policy import Policy, supervised_step


class _ReplayedGroup(msgspec.Struct, frozen=True):
    """The rollouts of one problem, and the step that first trained on them."""

    step: int
    rollouts: list[Rollout]


class _Sampled(msgspec.Struct):
    """What a kept rollout must say: a default in its place would be trained on as if it were true."""

    sampling: Sampling


class _SampledGroup(msgspec.Struct):
    rollouts: list[_Sampled]


class ReplayBuffer:
    """The newest groups, whole: an advantage compares the rollouts of one problem.

    What `sample` returns depends on the groups, the seed and the step alone, not on what was sampled before,
    so the groups are all its state. The buffer holds the rollouts themselves, not copies.

    Args:
        capacity: groups to keep; above it the oldest go first.
        max_age: steps after which a group is too old to train on.
        seed: seed of the run.
    """

    def __init__(self, capacity: int, *, max_age: int, seed: int) -> None:
        self._capacity = capacity
        self._max_age = max_age
        self._seed = seed
        self._groups: list[_ReplayedGroup] = []

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self._groups)

    def add(self, step: int, groups: Sequence[Sequence[Rollout]]) -> None:
        """Keep the fresh groups of the batch of `step`; forget what is over capacity or too old for `step`."""
        young = [group for group in self._groups if step - group.step <= self._max_age]
        self._keep(young + [_ReplayedGroup(step, list(rollouts)) for rollouts in groups])

    def sample(self, step: int, num_groups: int) -> list[list[Rollout]]:
        """Return `num_groups` different groups to train on again at `step`, or all that there are.

        They were first trained on 1 to `max_age` steps before; each is as likely as any other. The groups come
        in the order of a key that numpy's SeedSequence, whose output numpy never changes, gives each of them.
        """
        eligible = [group for group in self._groups if 1 <= step - group.step <= self._max_age]
        keys = np.random.SeedSequence(self._seed, spawn_key=(step,)).generate_state(len(eligible), np.uint64)
        chosen = np.argsort(keys, kind="stable")[:num_groups]
        return [list(eligible[index].rollouts) for index in chosen]

    def encode(self) -> bytes:
        """Return the groups as msgpack, exactly."""
        return msgspec.msgpack.encode(self._groups, enc_hook=encode_packed)

    def decode(self, data: bytes) -> None:
        """Take over the groups that `encode` returned; the newest, where the capacity is smaller now.

        Raises:
            CheckpointError: `data` is something else; then nothing is changed.
        """
        try:
            msgspec.msgpack.decode(data, type=list[_SampledGroup])
            self._keep(msgspec.msgpack.decode(data, type=list[_ReplayedGroup], dec_hook=decode_packed))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"the replay buffer of the checkpoint ({len(data)} bytes) cannot be read: {error}. Resume from another "
                "step, see `ckpt ls`, or without trainer.replay"
            ) from error

    def _keep(self, groups: list[_ReplayedGroup]) -> None:
        # max: a negative start would count from the end, and keep too few.
        self._groups = groups[max(0, len(groups) - self._capacity) :]


class PretrainingMix:
    """The samples, in an order that is a pure function of the seed and of how many updates there were.

    Attributes:
        fingerprint: of the samples.
    """

    def __init__(self, config: PretrainingConfig, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, *, seed: int) -> None:
        """Tokenise them. Collective."""
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
