"""A tokenizer of bytes with a chat template of its own, for environments that are tried without a model."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from holdfast.shared.chat.tokenizer import Tokenizer

_START, _END = "<|im_start|>", "<|im_end|>"
# ChatML, with tools and their calls as Hermes and Qwen write them. Nothing that was said is left out later.
_TEMPLATE = (
    "{%- if tools %}{{- '<|im_start|>system\\nTools, to be called as "
    '<tool_call>{"name": "...", "arguments": {...}}</tool_call>:\' }}'
    "{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def plain_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for each byte, which writes every message, its tools and what they answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_START, _END])
    return Tokenizer(backend, name="plain chat", templates=_TEMPLATE, special={"eos_token": _END})
