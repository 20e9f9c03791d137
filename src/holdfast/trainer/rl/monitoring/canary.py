"""The trainer's side of the canary: see `holdfast.shared.wire.canary`."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from holdfast.shared.config import TrainerConfig
from holdfast.shared.wire.canary import MAX_TOKENS, TEXT, Canary
from holdfast.trainer.data.packing import Sample, build_micro_batch
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.models.policy import Policy, predict
from holdfast.trainer.models.sharding import reshard
from holdfast.trainer.rl.monitoring.mismatch import mismatch_limit


@torch.no_grad()
def measure_canary(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, *, config: TrainerConfig
) -> bytes | None:
    """Return the canary of the current weights as JSON; None where the tokenizer makes one token of it. Collective.

    Differences d of log-probabilities make a KL divergence of d^2 / 2 (Schulman, "Approximating KL divergence"), so
    what `mismatch_limit` allows is allowed here.
    """
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
    canary = Canary(list(token_ids), logprobs_N.float().tolist(), allowed if math.isfinite(allowed) else None)
    return msgspec.json.encode(canary)
