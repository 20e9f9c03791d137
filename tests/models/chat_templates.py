# ruff: noqa: E501, RUF001
"""Chat templates as models publish them (shortened where that changes nothing here), and tokenizers of three kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from holdfast.shared.chat.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

_LLAMA_3 = """{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

_MISTRAL = """{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""

# That of the example, but of an earlier turn it writes only what is behind the last "e", as if that ended thoughts.
FORGETFUL = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'].split('e')[-1] if message['role'] == 'assistant' else message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QWEN_3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string \
and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

DEEPSEEK_R1 = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{{ bos_token }}{%- for message in messages %}{%- if message['role'] == 'system' %}{{ message['content'] }}{%- endif %}\
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}\
{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}\
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ '<｜Assistant｜>' + content + eos_token }}{%- endif %}{%- endfor -%}\
{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

HERMES = """{{ bos_token }}{% if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}\
{{ '\\n' + tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}\
{% if message.content %}{{ message.content }}{% endif %}\
{% if message.tool_calls %}{% for call in message.tool_calls %}\
{{ '\\n<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '\\n</tool_call>' }}\
{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

PHI_3 = """{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' + message['content'] + '<|end|>\\n' }}\
{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + message['content'] + '<|end|>\\n' }}\
{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

_ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

_ALPACA = """{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}\
{% elif message['role'] == 'user' %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}\
{% else %}{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"""

MARKED = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}\
{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_TRIMMED = """{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] | trim + eos_token + '  \\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

# Strips what was thought before, and opens the thoughts in the generation prompt (as QwQ does).
OPENED = """{%- for message in messages %}{%- set content = message.content %}\
{%- if message.role == 'assistant' and not loop.last %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}\
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""

TEMPLATES = {
    "chatml": _CHATML,
    "llama 3": _LLAMA_3,
    "gemma": _GEMMA,
    "mistral": _MISTRAL,
    "qwen 3": QWEN_3,
    "deepseek r1": DEEPSEEK_R1,
    "hermes": HERMES,
    "phi 3": PHI_3,
    "zephyr": _ZEPHYR,
    "alpaca": _ALPACA,
    "marked": MARKED,
    "trimmed": _TRIMMED,
    "opened": OPENED,
}
# In tests of their own.
ODD = {
    "writes None": "{% for message in messages %}{{ '<|' + message.role + '|>' }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "documents": "{% for document in documents or [] %}{{ document.title ~ ': ' ~ document.text ~ '\n' }}{% endfor %}"
    + _CHATML,
    # As DeepSeek's and Mistral's, which read arguments as text.
    "calls as text": """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}{{- message.content or '' }}\
{%- for call in message.tool_calls or [] %}{%- set function = call.function or call %}\
{{- '<call>' + function.name + ' ' + function.arguments + '</call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
}
SPECIAL = [
    "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<｜User｜>", "<｜Assistant｜>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
]  # fmt: skip
_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# How Llama 3 and Qwen split text before they look for tokens: line breaks stay together.
_LLAMA_3_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CORPUS = [
    "The quick brown fox jumps over the lazy dog. user assistant system model",
    "### Instruction:\nSay it.\n\n### Response:\nIt is said.\n\n",
    "[INST] What is it? [/INST] It is this, and that.",
    "<think>\nLet me think.\n</think>\n\nIt is 12. naïve café 東京 😀",
]


def make_tokenizer(kind: str, template: str, *, adds_bos: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer of transformers, see `make_backend`."""
    from transformers import PreTrainedTokenizerFast

    backend = make_backend(kind, adds_bos=adds_bos)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **_ROLES)


def make_chat_tokenizer(kind: str, template: str, *, adds_bos: bool) -> Tokenizer:
    """Return the same as a tokenizer of ours, which does without transformers."""
    backend = make_backend(kind, adds_bos=adds_bos)
    return Tokenizer(backend, name="", templates=template, special=_ROLES)


def write_tokenizer(directory: Path, template: str) -> Path:
    """Write the files of a byte-level tokenizer; return their directory."""
    make_backend("byte-level", adds_bos=False).save(str(directory / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **_ROLES}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    return directory


def make_backend(kind: str, *, adds_bos: bool) -> Backend:
    """Return a tokenizer trained on a few lines: `byte-level`, `llama 3`, `metaspace-first`, `metaspace-always`, `sentencepiece`
    (a normalizer that puts the blank, and byte fallback) or `wordpiece`."""
    backend = _KINDS[kind]()
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    if adds_bos:
        bos = ("<s>", backend.token_to_id("<s>"))
        eos = ("</s>", backend.token_to_id("</s>"))
        ends = " </s>" if kind == "wordpiece" else ""  # as BERT, which ends a text as well
        backend.post_processor = processors.TemplateProcessing(single=f"<s> $A{ends}", special_tokens=[bos, eos])
    return backend


def _byte_level(pattern: str | None = None) -> Backend:
    """Return one that splits as GPT-2 does, or by `pattern`."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _metaspace(scheme: str) -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _train_with_bytes(backend)
    return backend


def _sentencepiece() -> Backend:
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    _train_with_bytes(backend)
    return backend


def _train_with_bytes(backend: Backend) -> None:
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [word for line in _CORPUS for word in line.split()]  # no token is longer than a word
    trainer = trainers.BpeTrainer(vocab_size=520, special_tokens=special, show_progress=False)
    backend.train_from_iterator(pieces, trainer)


def _wordpiece() -> Backend:
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    alphabet = sorted({character for line in _CORPUS for character in line if not character.isspace()})
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


_KINDS: dict[str, Callable[[], Backend]] = {
    "byte-level": _byte_level,
    "llama 3": lambda: _byte_level(_LLAMA_3_WORDS),
    "metaspace-first": lambda: _metaspace("first"),
    "metaspace-always": lambda: _metaspace("always"),
    "sentencepiece": _sentencepiece,
    "wordpiece": _wordpiece,
}
KINDS = tuple(_KINDS)
