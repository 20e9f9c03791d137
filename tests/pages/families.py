"""The page docs/models.md: what the tests of all families found, as a table.

What `rl` does with each family is in `families_in_rl.json`, by the family's name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.trainer.model.packing_check import Layout
from tests.models.families import Family

IN_RL = Path(__file__).parents[1] / "models" / "families_in_rl.json"
_TEXT = """\
# Models

Which families of models can be trained, and how. The table is written by the test that checks it,
`tests/unit/trainer/test_families.py`: a tiny random model of each family, whose windows, soft caps and multipliers
differ from the values at which they do nothing, is trained packed and unpacked, and its loss and gradient are
within 1e-5 of what `transformers` gives with eager attention, one sample at a time. {count} kinds are in it.

A family that is not listed works as well if its layers allow it: no list of names decides, but a probe of the
model when it is built.

- **Packed.** With `data.pack` a row holds several samples, and attention stays within each. That is right for
  models whose tokens meet in attention alone, and whose attention depends on the distance of two tokens and on
  nothing else: full, or a sliding window.
- **Padded.** Of any other model (convolutions, linear attention, recurrent layers, attention in chunks, ALiBi) each
  sample has a row of its own. `data.pack` then groups samples of about equal length, so that their number times
  the longest stays within the same budget of tokens. Nothing has to be set; the log says `one sample a row` and why.
- **Attention.** `packed` is ours, and knows soft caps and sinks. Where it does not compute what a model's own eager
  attention does, `sdpa` of transformers is taken, or `eager` where that differs too. `model.attention` chooses
  another; one that leaves out a part of the model is refused. On GPUs `packed` is a kernel for samples of any length
  ([gpu.md](gpu.md)). `sdpa` and `eager`, where they are chosen, get one sample a row: several would need a mask of the
  square of the row's length.
- **Shared prompts.** In `rl` the answers to one prompt share its tokens in a row (`trainer.share_prompts`): the prompt
  is computed once, forward and backward, and each answer sees the prompt and itself. Attention alone holds it once for
  each answer, and so a row has no more answers than make four times `trainer.row_tokens`. It needs a packed row and
  `packed` attention; other models are trained with a prompt for each answer. Rotary frequencies that depend on the
  length of a sample exclude it, too. Rollouts of several branches share nothing, nor do those without a trained token.
  Loss and gradient are held to the same 1e-5, and the check of the real model compares two answers that share a prompt
  with two that do not.
- **Answers alone and beside others** have the same bits on a CPU in float32. Tried once with one thread and wide
  layers: 46 of the 48 families that `rl` trains. The two others differ by 5e-7 nats, as PyTorch computes a function of
  a few numbers for each token in another way at the end of a batch: the gate of a shared expert (`qwen2_moe`) and
  inputs of each layer that are narrower than 64 numbers (`gemma4_text`; published models have 256). A run of
  `qwen2_moe` that is killed can end with other bits.
- **Rotary frequencies** that depend on how long a sample is (`longrope`, `dynamic`) are those that it has alone,
  whatever shares its row; `transformers` goes by the longest sample of a batch. vLLM takes the long factors of
  `longrope` for every sample as soon as `model.max_len` is above `original_max_position_embeddings`: keep it below, or
  `rl` ends before its first step.
- **Head.** *plain*: the output embedding, perhaps with a final soft cap. *own*: the model scales or caps its logits in
  a way of its own, and its own code computes them, a chunk of `model.logits_chunk_tokens` at a time as well.

A start of `sft`, `dpo`, `reward-model` and `rl` checks the real model with its real weights, a resumed one only if
model, code, libraries, settings or device are others than those that passed (`checked_models.json` of the run):
two short samples through the trainer's own forward pass against transformers' eager one of each alone, and the second
sample must not change when the first one does. A model that fails is refused with exit code 2. In float32
log-probabilities may be 1e-4 apart, in bfloat16 0.1 in the mean. A model for which `transformers` has eager and sdpa
attention of its own is refused where these two differ: Falcon with ALiBi, to which its eager attention adds that twice.

The names are those of `model_type` in a model's config.json. `bfloat16` is narrower: MiniMax, Mamba and Mamba 2 mix
dtypes in transformers' own code, and are refused unless `model.dtype` is float32. Models for images and text are
trained on text only, where transformers has a causal language model of their type. Tokens that stand for
images are words like any other there. Quantised weights (`quantization_config`) are refused. The auxiliary loss that
balances the experts of a mixture is not part of any loss here, and their choice is not replayed
([why](rl_training.md#mixtures-of-experts)).

The column `rl` is about vLLM on CPU in float32, with heads of attention of 32 numbers: *yes* means that the engine
took changed weights by the names of the original checkpoint, sampled by them, and was within a mismatch KL of 1e-6
of the trainer; otherwise it says what ends the run, and why. `python -m tests.models.families_in_rl` measures it.
Values of published models are taken where vLLM knows no others: a tied output layer of Gemma 2, Cohere, Bloom and
LFM2, which it ties even if config.json does not.
For models with a recurrent state the engine keeps no prefixes of prompts on CPU (vLLM needs chunked prefill for
that, which a seed per request rules out), and the last bits of their log-probabilities depend on which requests share a
batch: no two runs of `rl` have the same bits, whether they die or not, unless `--inference.engine.max-num-seqs 1`
is set. The server says so at its start.
Gated delta nets (Qwen3-Next, Qwen3.5) take bfloat16 alone on CPU, and vLLM imports torchvision for Qwen3.5.
A server does not start whose model has weights that no file sets, nor asks an update for tensors that transformers
leaves out when it loads the original, such as layers that predict several tokens ahead.

| family | rows | attention | head | `sft`, `dpo` | `rl` |
|---|---|---|---|---|---|
{table}
"""


@dataclass(frozen=True)
class Row:
    """What was found of one family.

    Attributes:
        layout: of the model; None if it is refused.
        plain_head: whether the head is an output embedding.
        refusal: the reason, in words.
    """

    family: Family
    layout: Layout | None = None
    plain_head: bool = True
    refusal: str = ""

    def cells(self, in_rl: str) -> list[str]:
        if self.layout is None:
            return [self.family.name, "", "", "", f"refused: {self.refusal}", "refused"]
        rows = "packed" if self.layout.packs else f"padded: {self.layout.reason}"
        return [self.family.name, rows, self.layout.attention, "plain" if self.plain_head else "own", "yes", in_rl]


def page(rows: Mapping[str, Row]) -> str:
    in_rl: dict[str, str] = json.loads(IN_RL.read_text())
    lines = [f"| {' | '.join(rows[name].cells(in_rl.get(name, '')))} |" for name in sorted(rows)]
    return _TEXT.format(count=len(rows), table="\n".join(lines))
