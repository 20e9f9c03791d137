"""One train step of RL: from a batch of rollouts to changed weights.

    learn: rollouts -> samples -> measure (no gradient) -> rewards and advantages -> updates -> averages

`forward_backward` accumulates the gradients of one update of the policy. `holdfast.trainer.rl.components` holds the
models beside the policy. With the default settings there is nothing to measure, and one update.

Shape legend: N predicted tokens of one forward pass.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from holdfast.config import TrainerConfig
from holdfast.config.advantages import MODEL_ADVANTAGES
from holdfast.config.algorithm import PretrainingConfig, UpdatesConfig
from holdfast.config.training import learning_rate
from holdfast.errors import ConfigError
from holdfast.protocol.rollouts import ZERO_VARIANCE, Batch, Rollout, zero_variance
from holdfast.run.journal import TrainedRewards
from holdfast.trainer.data.packing import MicroBatch, Sample, to_device
from holdfast.trainer.data.samples import SampleOrder, fingerprint_samples, load_samples
from holdfast.trainer.mesh import Mesh, Sums
from holdfast.trainer.model.decoder import reshard, rows_of_update
from holdfast.trainer.model.logprobs import Reading
from holdfast.trainer.model.policy import Policy, predict, supervised_step
from holdfast.trainer.optimizer import check_finite, clip_gradients, update_parameters
from holdfast.trainer.rl import batch as batches
from holdfast.trainer.rl.assign_advantages import (
    add_distillation,
    advantage_metrics,
    assign_advantages,
    assign_gae_advantages,
    build_advantage,
    mean_advantages,
    whiten_advantages,
)
from holdfast.trainer.rl.components import RlComponents
from holdfast.trainer.rl.kl import KlPenalty, kl_of_sequences
from holdfast.trainer.rl.losses import (
    PolicyLoss,
    PolicyLossInput,
    build_policy_loss,
    with_distillation_term,
    with_entropy_bonus,
    with_kl_term,
)
from holdfast.trainer.rl.metrics import PolicyStatistics
from holdfast.trainer.rl.mismatch import MismatchCheck
from holdfast.trainer.rl.rewards import rewards_of_batch
from holdfast.trainer.rl.token_rewards import attach_rewards
from holdfast.trainer.session import Stopwatch, TrainSession


def forward_backward(
    policy: Policy,
    minibatch: batches.Minibatch,
    loss_function: PolicyLoss,
    mesh: Mesh,
    statistics: PolicyStatistics,
    *,
    reading: Reading,
    teacher: Policy | None = None,
) -> float:
    """Accumulate the gradients of one update; return its loss, of all ranks. Collective. `teacher`: what
    `PolicyLossInput.teacher_kl_N` measures the divergence from; its parameters stay whole. If samples have no
    log-probabilities from before the step, the weights have not changed since: the update is the only one of its step.
    Under `torch.no_grad` only the forward passes are made, for `statistics`."""
    reading = replace(reading, entropy=True)
    samples = minibatch.samples
    num_targets = minibatch.num_targets
    # At least 1: a sequence whose mask is empty has no token that bears its weight.
    weights = [1 / (len(samples) * max(1, sample.num_targets)) for sample in samples]
    weights_S = to_device(torch.tensor(weights, dtype=torch.float32), mesh.device)
    losses = Sums("loss")
    for indices in rows_of_update(policy, minibatch.micro_batches):
        micro = minibatch.build(indices, pack=policy.layout.packs, device=mesh.device)
        predicted = predict(policy, micro, batches.reading_of(micro, reading), teacher=teacher)
        logprobs_N, entropy_N = predicted.logprobs_N, predicted.entropy_N
        assert entropy_N is not None  # the reading asks for it
        data = PolicyLossInput(
            logprobs_N=logprobs_N,
            # Not measured before the step: this is its only update, and the weights have not changed since.
            old_logprobs_N=micro.per_token.get(batches.OLD_LOGPROB, logprobs_N.detach()),
            sampler_logprobs_N=micro.per_token[batches.SAMPLER_LOGPROB],
            reference_logprobs_N=micro.per_token.get(batches.REFERENCE_LOGPROB),
            advantages_N=micro.per_token[batches.ADVANTAGE],
            entropy_N=entropy_N,
            teacher_kl_N=predicted.teacher_kl_N,
            weights_N=weights_S[micro.sample_index_N],
            correction_N=torch.ones_like(logprobs_N),
            sequence_N=micro.sample_index_N,
            sequence_lengths=micro.targets_per_sample,
            step_sequences=len(samples),
            step_tokens=num_targets,
        )
        loss, counts = loss_function(data)
        if torch.is_grad_enabled():
            # FSDP averages gradients over ranks; the weights sum to one over all of them.
            (loss * mesh.world_size).backward()
        losses.add({"loss": loss})
        statistics.add(data, counts, entropy_N.detach(), micro.per_token[batches.AGE])
    own = losses.read()
    statistics.add_update(own["loss"])
    return mesh.sum(own)["loss"]


class PretrainingMix:
    """Supervised samples beside the rollouts: PPO-ptx (Ouyang et al. 2022, "Training language models to follow
    instructions with human feedback"). Their order is a pure function of the seed and of how many updates there were.
    `fingerprint`: of the samples."""

    def __init__(self, config: PretrainingConfig, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, *, seed: int) -> None:
        """Tokenise them. Collective."""
        self._config = config
        self._samples, _ = load_samples(config.data, tokenizer, seed=seed, mesh=mesh)
        self._order = SampleOrder(len(self._samples), seed=seed, shuffle=config.data.shuffle)
        self.fingerprint = fingerprint_samples(self._samples)

    def step(self, policy: Policy, update: int, mesh: Mesh) -> float:
        """Accumulate the gradients of the samples of one update; return their mean cross-entropy. Collective. `update`:
        how many updates of the policy there were before, in the whole run."""
        size = self._config.data.batch_size
        batch = [self._samples[index] for index in self._order.batch(update * size, size)]
        return supervised_step(policy, batch, self._config.data, mesh, coef=self._config.coef)["loss"]


class Learner:
    """Trains policy and critic on one batch after another. `trained`: rewards and advantages of the last batch."""

    trained: TrainedRewards

    def __init__(
        self,
        config: TrainerConfig,
        session: TrainSession[Policy],
        components: RlComponents,
        pretraining: PretrainingMix | None,
    ) -> None:
        self._config = config
        self._session = session
        self._mesh = session.mesh
        self._policy = session.policy
        self._components = components
        self._pretraining = pretraining
        self._loss = build_policy_loss(config.loss)
        self._layout = replace(session.policy.layout, shares=components.shares_prompts(session.policy))
        self._mismatch = MismatchCheck(config, session.policy, session.mesh)
        self._advantage = None if config.advantage.type in MODEL_ADVANTAGES else build_advantage(config)
        kl = config.kl
        if kl is not None and components.kl is not None and kl.place == "loss" and kl.coef > 0:
            assert kl.estimator is not None  # the config fills it in
            self._loss = with_kl_term(self._loss, config.loss, components.kl, kl.estimator)
        distillation = config.distillation
        self._teacher = None
        if distillation is not None and distillation.divergence == "full":
            self._teacher = components.reference
            self._loss = with_distillation_term(self._loss, config.loss, distillation.coef)
        if components.entropy is not None:
            self._loss = with_entropy_bonus(self._loss, components.entropy)

    def learn(self, batch: Batch, stopwatch: Stopwatch, *, is_foreign: bool = False) -> dict[str, float]:
        """Train on the batch of the next step; return its metrics. Collective. `is_foreign`: other weights than the
        published ones of its version sampled it, so its log-probabilities say nothing about whether the engine computes
        the same model. Raise TrainingError if something is not finite, or the engine computes another model; then the
        step must not be published or saved."""
        step, config, components = batch.step, self._config, self._components
        rollouts = batch.rollouts
        groups = batches.group_rollouts(rollouts)
        # Step N trains version N - 1.
        samples = batches.to_samples(rollouts, trained_version=step - 1)
        trained = batches.without_truncated(samples, rollouts) if config.rewards.truncated == "mask" else samples
        epochs = self._plan(step, trained, config.updates)
        _check_cuts(batch, config)
        # A teacher's weights have no digest here.
        reading = Reading(batches.learned_distributions(rollouts, samples, is_imitation=not batch.weights_digest))
        with stopwatch.phase("experience"):
            # Samples without training are measured, too: their penalties and values count in the advantages of the
            # others.
            left_out = [sample for sample, own in zip(samples, trained, strict=True) if own is not sample]
            self._measure(reading, [*epochs[0], *self._plan_once(step, left_out)])
            metrics = self._compute_advantages(groups, samples, trained)
        self._mismatch.begin(
            step,
            rollouts,
            trained,
            lambda found: self._measure_policy(
                batches.OLD_LOGPROB, self._policy, reading, self._plan_once(step, found)
            ),
            is_foreign=is_foreign,
            is_truncated=reading.sampling.is_truncated,
        )
        entropy = components.entropy
        has_bonus = entropy is not None and entropy.coef > 0
        learning = replace(reading, entropy_gradient=has_bonus or ":" in config.loss.type)  # the user's may need it
        metrics |= {"entropy_coef": entropy.coef} if entropy is not None else {}
        metrics |= self._update(step, learning, trained, epochs, stopwatch)
        # After the update, which the coefficient before has penalised: this one is for the next step.
        metrics |= self._steer_kl(step, samples)
        # Without a trained token there is no mean entropy to follow.
        if entropy is not None and self._trains_policy(step) and any(sample.num_targets for sample in trained):
            entropy.update(metrics["entropy"])
        components.after_step(step, self._policy)
        if ZERO_VARIANCE not in batch.metrics:  # dynamic sampling counts the groups that it leaves out, too
            metrics |= zero_variance(groups, "parts" if config.tells_tokens_apart else "sum")
        return metrics

    def _plan(self, step: int, samples: Sequence[Sample], updates: UpdatesConfig) -> list[list[batches.Minibatch]]:
        config = self._config
        return batches.plan_epochs(
            samples,
            updates,
            row_tokens=config.row_tokens,
            layout=self._layout,
            mesh=self._mesh,
            seed=config.seed,
            step=step,
        )

    def _plan_once(self, step: int, samples: Sequence[Sample]) -> list[batches.Minibatch]:
        return self._plan(step, samples, UpdatesConfig())[0]

    def _compute_advantages(
        self, groups: list[list[Rollout]], samples: list[Sample], trained: list[Sample]
    ) -> dict[str, float]:
        """Give every sample its advantages; return metrics.

        Args:
            samples: of the rollouts, measured.
            trained: the same, with an empty mask where a rollout is not trained.
        """
        config, components = self._config, self._components
        rewards_PG, metrics = rewards_of_batch(
            groups, samples, config, reward_model=components.reward_model, moments=components.moments
        )
        penalty = None
        if config.kl is not None and components.kl is not None:
            metrics["kl_coef"] = components.kl.coef
            if config.kl.place == "reward" and config.kl.coef > 0:
                assert config.kl.estimator is not None  # the config fills it in
                penalty = KlPenalty(components.kl.coef, config.kl.estimator)
        masks = config.rewards.truncated == "mask"
        scored = attach_rewards(groups, samples, rewards_PG, penalty, mask_truncated=masks)
        if config.critic is not None:
            assign_gae_advantages(samples, scored, config.critic)
            if config.critic.whiten:
                whiten_advantages(trained)
        elif self._advantage is not None:
            assign_advantages(samples, self._advantage(scored))
        else:
            assign_advantages(samples, [[0.0 for _ in group] for group in groups])
        if config.distillation is not None and config.distillation.divergence == "sampled":
            metrics |= add_distillation(trained, config.distillation.coef)
        self.trained = TrainedRewards(list(chain.from_iterable(rewards_PG)), mean_advantages(trained))
        return metrics | advantage_metrics(trained)

    def _trains_policy(self, step: int) -> bool:
        """Whether `step` trains the policy, which the first steps of a run may leave as it is."""
        critic = self._config.critic
        return critic is None or step > critic.warmup_steps

    def _steer_kl(self, step: int, samples: Sequence[Sample]) -> dict[str, float]:
        """Take the divergence of the samples before this step into the coefficient of the next; return it."""
        coefficient, sampled = self._components.kl, [sample for sample in samples if sample.num_targets]
        measured = self._needs_old_logprobs and self._needs_reference_logprobs
        if coefficient is None or not measured or not sampled:
            return {}
        sums = kl_of_sequences(sampled)
        # Every rank has all samples, so all ranks compute the same coefficient without a collective.
        mean = math.fsum(sums) / len(sums)
        if self._trains_policy(step):
            coefficient.update(mean, len(sums))
        return {"kl/sequence": mean}

    @property
    def _needs_old_logprobs(self) -> bool:
        """Whether log-probabilities before the step are needed beside the update's."""
        config, kl, distillation = self._config, self._config.kl, self._config.distillation
        several = config.updates.epochs * config.updates.minibatches > 1
        for_kl = kl is not None and (kl.target is not None or (kl.place == "reward" and kl.coef > 0))
        has_sampled_divergence = distillation is not None and distillation.divergence == "sampled"
        for_advantages = has_sampled_divergence or "online_dpo" in config.advantages
        return several or for_kl or for_advantages

    @property
    def _needs_reference_logprobs(self) -> bool:
        """Whether the reference is measured before the update; a teacher of whole vocabularies is read within it."""
        kl, compares = self._config.kl, "online_dpo" in self._config.advantages
        return kl is not None and (self._teacher is None or kl.coef > 0 or compares)

    def _measure(self, reading: Reading, minibatches: Sequence[batches.Minibatch]) -> None:
        """Give every sample the numbers that no gradient is needed for. Collective."""
        if self._needs_old_logprobs:
            self._measure_policy(batches.OLD_LOGPROB, self._policy, reading, minibatches)
        if self._components.reference is not None and self._needs_reference_logprobs:
            self._measure_policy(batches.REFERENCE_LOGPROB, self._components.reference, reading, minibatches)
        if self._components.critic is not None:
            self._components.critic.measure(minibatches)

    def _measure_policy(
        self, key: str, policy: Policy, reading: Reading, minibatches: Sequence[batches.Minibatch]
    ) -> None:
        """Give every sample its log-probabilities under `policy` as `key`. Collective."""
        reading = replace(reading, entropy=False)
        was_training = policy.training
        policy.eval()  # no dropout

        def read(micro: MicroBatch) -> Tensor:
            return predict(policy, micro, batches.reading_of(micro, reading)).logprobs_N

        batches.measure_targets(key, read, minibatches, self._mesh, pack=policy.layout.packs)
        # Without a backward pass nothing else puts the parameters back into shards.
        reshard(policy)
        policy.train(was_training)

    def _update(
        self,
        step: int,
        reading: Reading,
        samples: list[Sample],
        epochs: Sequence[Sequence[batches.Minibatch]],
        stopwatch: Stopwatch,
    ) -> dict[str, float]:
        """Take all updates of the step; return their metrics."""
        config, components, session = self._config, self._components, self._session
        # Every rank sees all samples, so all agree on the names of the metrics.
        ages = sorted(
            {int(age) for sample in samples for age in set(sample.per_token[batches.AGE][sample.loss_mask].tolist())}
        )
        statistics = PolicyStatistics(
            ages, has_reference=all(batches.REFERENCE_LOGPROB in sample.per_token for sample in samples)
        )
        critic_alone = not self._trains_policy(step)
        lr = 0.0 if critic_alone else learning_rate(step, config.optim, config.max_steps)
        value_lr = learning_rate(step, config.critic.optim, config.max_steps) if config.critic is not None else 0.0
        # Counted from the step, as if none had taken fewer updates: a resumed run draws what an uninterrupted one does.
        done = (step - 1) * config.updates.epochs * config.updates.minibatches
        grad_norms, pretraining_losses = [], []
        if critic_alone:
            with stopwatch.phase("forward"), torch.no_grad():
                for minibatch in epochs[0]:
                    self._step(minibatch, statistics, reading)
                reshard(self._policy)
                self._mismatch.before_update(step, statistics)
        for minibatch in (minibatch for epoch in epochs for minibatch in epoch):
            if not critic_alone:
                with stopwatch.phase("forward_backward"):
                    loss = self._step(minibatch, statistics, reading)
                    if self._pretraining is not None:
                        pretraining_losses.append(self._pretraining.step(self._policy, done, self._mesh))
                # After the first update the weights have changed, and cannot be compared.
                if not grad_norms:
                    self._mismatch.before_update(step, statistics)
                with stopwatch.phase("optimizer"):
                    grad_norms.append(clip_gradients(self._policy, config.optim.max_grad_norm))
                    # Before the weights change: what is not finite must not reach them.
                    check_finite(step, loss=loss, grad_norm=grad_norms[-1])
                    update_parameters(session.optimizer, lr=lr)
            if components.critic is not None:
                with stopwatch.phase("critic"):
                    components.critic.update(minibatch, lr=value_lr)
            done += 1
        metrics = statistics.reduce(self._mesh) | {"lr": lr}
        for name, values in (("grad_norm", grad_norms), ("pretraining_loss", pretraining_losses)):
            metrics |= {name: sum(values) / len(values)} if values else {}
        if components.critic is not None:
            metrics |= components.critic.take_metrics() | {"value_lr": value_lr}
        return metrics

    def _step(self, minibatch: batches.Minibatch, statistics: PolicyStatistics, reading: Reading) -> float:
        loss = forward_backward(
            self._policy, minibatch, self._loss, self._mesh, statistics, reading=reading, teacher=self._teacher
        )
        if self._teacher is not None:
            reshard(self._teacher)
        return loss


def _check_cuts(batch: Batch, config: TrainerConfig) -> None:
    """Refuse a divergence between distributions that have different tokens. Raise ConfigError if it is asked for."""
    cut = next((rollout for rollout in batch.rollouts if rollout.sampling.is_truncated), None)
    if batch.weights_digest and config.kl is not None and cut is not None:
        raise ConfigError(
            f"batch {batch.step}: environment '{cut.environment}' was sampled at {cut.sampling}, and trainer.kl "
            "compares distributions over all tokens: leave orchestrator.sampling.top_p, top_k and min_p at 1, 0 and 0, "
            "or leave trainer.kl out"
        )
