"""Log-probabilities of answers as transformers' own modules give them, to compare ours with."""

import numpy as np
import torch
from torch import Tensor

from holdfast.trainer.data.packing import Sample
from holdfast.trainer.model.policy import Policy


def answer_logprob(policy: Policy, sample: Sample) -> Tensor:
    """Return the summed log-probability of what is trained, by transformers' own logits in float64."""
    ids_L = torch.from_numpy(sample.token_ids.astype(np.int64))
    hidden = policy.hf_model.get_decoder()(
        input_ids=ids_L[None], position_ids=torch.arange(len(ids_L))[None], use_cache=False
    ).last_hidden_state[0]
    head = policy.hf_model.get_output_embeddings()
    assert head is not None
    logprobs = head(hidden).double().log_softmax(-1)
    picked = [logprobs[place - 1, ids_L[place]] for place in np.flatnonzero(sample.loss_mask)]
    return sum(picked, torch.zeros((), dtype=torch.float64))
