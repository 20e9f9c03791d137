"""The trainer's side of the canary: see `triad.canary`."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from trainer.models.model import Policy, reshard
from trainer.packing import Sample, build_micro_batch
from trainer.parallel import Parallel
from trainer.step import predict
from triad.canary import MAX_TOKENS, TEXT, Canary


@torch.no_grad()
def measure_canary(policy: Policy, tokenizer: PreTrainedTokenizerBase, parallel: Parallel) -> bytes | None:
    """Return the canary of the current weights as JSON; None where the tokenizer makes one token of it. Collective."""
    token_ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"][:MAX_TOKENS]
    if len(token_ids) < 2:
        return None
    sample = Sample(np.asarray(token_ids, dtype=np.int32), np.ones(len(token_ids), dtype=bool))
    micro = build_micro_batch([sample], [0], pack=True, device=parallel.device)
    policy.eval()  # no dropout: the engine has none, and no random number is drawn
    logprobs_N, _ = predict(policy, micro)
    reshard(policy)
    policy.train()
    return msgspec.json.encode(Canary(list(token_ids), logprobs_N.float().tolist()))
