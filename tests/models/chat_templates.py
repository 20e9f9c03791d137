# ruff: noqa: E501, RUF001
"""Chat templates as models publish them (shortened where that changes nothing here), and tokenizers of three kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from holdfast.chat.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FILES = Path(__file__).parent / "templates"


def template(name: str) -> str:
    return (_FILES / f"{name.replace(' ', '_')}.jinja").read_text()


_NAMES = [
    "chatml", "llama 3", "gemma", "mistral", "qwen 3", "deepseek r1", "hermes", "phi 3", "zephyr", "alpaca", "marked", "trimmed", "opened",
]  # fmt: skip
TEMPLATES = {name: template(name) for name in _NAMES}
# In tests of their own.
ODD = {name: template(name) for name in ("writes None", "calls as text")}
# That of the example, but of an earlier turn it writes only what is behind the last "e", as if that ended thoughts.
FORGETFUL = template("forgetful")
QWEN_3, HERMES = TEMPLATES["qwen 3"], TEMPLATES["hermes"]
SPECIAL = [
    "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "<｜User｜>", "<｜Assistant｜>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
]  # fmt: skip
_QUIET = {"show_progress": False}
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
    from transformers import PreTrainedTokenizerFast

    backend = make_backend(kind, adds_bos=adds_bos)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **_ROLES)


def make_chat_tokenizer(kind: str, template: str, *, adds_bos: bool) -> Tokenizer:
    """Return the same as a tokenizer of ours, which does without transformers."""
    return Tokenizer(make_backend(kind, adds_bos=adds_bos), name="", templates=template, special=_ROLES)


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
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIAL, **_QUIET)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


def _metaspace(scheme: str) -> Backend:
    """Return one that puts the blank as Llama does, by a pre-tokenizer; `normalizer`: as sentencepiece, by that."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if scheme == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [word for line in _CORPUS for word in line.split()]  # no token is longer than a word
    backend.train_from_iterator(pieces, trainers.BpeTrainer(vocab_size=520, special_tokens=special, **_QUIET))
    return backend


def _wordpiece() -> Backend:
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    alphabet = sorted({character for line in _CORPUS for character in line if not character.isspace()})
    trainer = trainers.WordPieceTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, **_QUIET)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend


_KINDS: dict[str, Callable[[], Backend]] = {
    "byte-level": _byte_level, "llama 3": lambda: _byte_level(_LLAMA_3_WORDS),
    "metaspace-first": lambda: _metaspace("first"), "metaspace-always": lambda: _metaspace("always"),
    "sentencepiece": lambda: _metaspace("normalizer"), "wordpiece": _wordpiece,
}  # fmt: skip
KINDS = tuple(_KINDS)
