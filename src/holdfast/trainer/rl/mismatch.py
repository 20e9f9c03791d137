"""Checks that trainer and engine compute the same model, before the trainer trains on fresh rollouts.

If the weights of this very step sampled a rollout (age 0), its log-probabilities must equal the trainer's, except for
rounding. A larger difference means another model: an attention soft cap that trainer or engine leaves out, another
dtype, a faulty kernel. Older rollouts differ because the policy moved, and only the alerts watch them.

With `async_level` above 0, only the first batch has age 0. For the others, the parity check takes its place, at the
start of every attempt: see `ParityPrompt` in `holdfast.protocol.inference`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from holdfast.config import TrainerConfig
from holdfast.errors import TrainingError
from holdfast.process.events import report
from holdfast.protocol.inference import MAX_TOKENS, TEXT, ParityPrompt
from holdfast.protocol.rollouts import Rollout
from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.decoder import reshard
from holdfast.trainer.model.parity_check import is_random_in_training
from holdfast.trainer.model.policy import Policy, predict
from holdfast.trainer.rl.batch import AGE, OLD_LOGPROB, SAMPLER_LOGPROB, SAMPLING
from holdfast.trainer.rl.kl import k3
from holdfast.trainer.rl.metrics import PolicyStatistics

# Mean k3 per token, in nats. Measured: 1e-14 to 1e-11 in float32, 1e-4 in bfloat16; 1e-3 is usual there for large
# models. Attention soft caps of 5 that were left out gave 7e-8 to 0.2, depending on the model.
LIMITS = {"float32": 1e-6, "bfloat16": 0.05}
# For truncated distributions, in float32. Rounding may cut a token at the border on only one side. Then the
# log-probability of the sampled token moves by as much as the probability of the cut token. This is rare, but 0.3 nats
# at one of 100 tokens make 4e-4, and a resume would meet them again. The parity prompt is not truncated,
# so it is held to the limit above.
_TRUNCATED_LIMIT = 1e-3


def mismatch_limit(config: TrainerConfig, *, is_truncated: bool = False) -> float:
    """Return the largest `mismatch_kl` at age 0 that is rounding, in nats."""
    if config.mismatch_limit is not None:
        return config.mismatch_limit
    limit = LIMITS[config.numerics]
    return max(limit, _TRUNCATED_LIMIT) if is_truncated else limit


class MismatchCheck:
    """Compares fresh rollouts of each step, by the log-probabilities that its first update computes anyway.

    With dropout, or what else is random in training, those are noise. Then a pass of its own, without it, compares the
    first fresh rollouts of the attempt, and no others."""

    def __init__(self, config: TrainerConfig, policy: Policy, mesh: Mesh) -> None:
        self._config = config
        self._kind = type(policy.hf_model).__name__
        self._mesh = mesh
        self._is_random = is_random_in_training(policy, mesh)
        if self._is_random and mesh.is_main:
            report(
                f"WARNING: {self._kind} is trained with dropout, or something else that is random, which the engine "
                "does not have: ratios, mismatch_kl and ppo_kl are noisy. Unless you mean it, set what is random in "
                "the model's config.json (names with `drop`, `pdrop` or `jitter`) or the dropout of model.lora to 0"
            )
        self._is_done = False
        self._is_comparable = False
        self._limit = mismatch_limit(config)

    def begin(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        samples: Sequence[Sample],
        measure: Callable[[Sequence[Sample]], None],
        *,
        is_foreign: bool = False,
        is_truncated: bool = False,
    ) -> None:
        """Note what this step trains on; with dropout, compare. Collective.

        Args:
            samples: of `rollouts`, and perhaps others after them.
            measure: fills in `OLD_LOGPROB` without dropout.
            is_foreign: other weights than the trainer's before this step sampled the rollouts; nothing is compared.
            is_truncated: the distributions that they were sampled from were.

        Raise TrainingError if the engine computes another model.
        """
        # A teacher's rollouts have no versions.
        self._limit = mismatch_limit(self._config, is_truncated=is_truncated)
        self._is_comparable = not is_foreign and all(rollout.versions for rollout in rollouts)
        if self._is_done or not (self._is_comparable and self._is_random):
            return
        # Copies: what is measured without dropout must not become the old log-probabilities of the loss.
        copies = [
            replace(
                one, per_token={key: one.per_token[key] for key in (SAMPLER_LOGPROB, SAMPLING) if key in one.per_token}
            )
            for one in samples
            if one.num_targets and not one.per_token[AGE][one.targets].any()
        ]
        if not copies:
            return
        self._is_done = True
        measure(copies)
        log_ratio_N = torch.from_numpy(
            np.concatenate(
                [(one.per_token[OLD_LOGPROB] - one.per_token[SAMPLER_LOGPROB])[one.targets] for one in copies]
            )
        )
        self._refuse_above_limit(step, float(k3(log_ratio_N.double()).mean()))

    def before_update(self, step: int, statistics: PolicyStatistics) -> None:
        """Compare what the forward passes of the step's first update found, before it changes anything. Collective.
        Raise TrainingError if the engine computes another model."""
        if not self._is_comparable or self._is_random:
            return
        if (mismatch_kl := statistics.fresh_mismatch(self._mesh)) is not None:
            self._refuse_above_limit(step, mismatch_kl)

    def _refuse_above_limit(self, step: int, mismatch_kl: float) -> None:
        # `not <=` rather than `>`: NaN is refused, too.
        if not mismatch_kl <= self._limit:
            raise _other_model(step, mismatch_kl, self._limit, self._config, kind=self._kind)


def _other_model(step: int, mismatch_kl: float, limit: float, config: TrainerConfig, *, kind: str) -> TrainingError:
    source = "trainer.mismatch_limit"
    if config.mismatch_limit is None:
        source += f", unset: for {config.numerics}"
    return TrainingError(
        f"step {step}: trainer and engine do not compute the same model. The rollouts are by the very weights that "
        f"this step trains, and their log-probabilities differ from the trainer's by mismatch_kl = {mismatch_kl:.3g} "
        f"nats a token; allowed are {limit:g} ({source}). The step "
        "was not taken.\n"
        f"       model: {config.model.name} ({kind}), dtype {config.model.compute_dtype}, "
        f"attention {config.model.attention}\n"
        "       probable causes: attention soft caps or another detail of the architecture that one side leaves out "
        "(try --trainer.model.attention eager); engines of another dtype (say which with --trainer.sampler-dtype); "
        "quantised engines, other engine.args or a faulty kernel of the engine's build; a config.json that the engine "
        "reads otherwise.\n"
        "       If the difference is meant, allow it with --trainer.mismatch-limit, and set "
        "trainer.loss.correction.type = truncate."
    )


@torch.no_grad()
def measure_parity_prompt(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, *, config: TrainerConfig
) -> bytes | None:
    """Return the parity prompt of the current weights as JSON; None if its text is one token. Collective.

    Differences d of log-probabilities make a KL divergence of d^2 / 2 (Schulman, "Approximating KL divergence"), so
    what `mismatch_limit` allows is allowed here."""
    token_ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"][:MAX_TOKENS]
    if len(token_ids) < 2:
        return None
    sample = Sample(np.asarray(token_ids, dtype=np.int32), np.ones(len(token_ids), dtype=bool))
    micro = build_micro_batch([sample], [0], pack=policy.layout.packs, device=mesh.device)
    policy.eval()  # no dropout: the engine has none, and no random number is drawn
    logprobs_N = predict(policy, micro).logprobs_N
    # No backward pass follows, which would do so.
    reshard(policy)
    policy.train()
    allowed = math.sqrt(2 * mismatch_limit(config))
    allowed_nats = allowed if math.isfinite(allowed) else None
    return msgspec.json.encode(ParityPrompt(list(token_ids), logprobs_N.float().tolist(), allowed_nats))
