"""The model that a task's runs start from: a tokenizer, random weights, and a short `sft` on demonstrations.

A tokenizer has one token per printable character, as that of the quick start, and one for each phrase of the task, so
that answers of a few tokens can hold JSON or Python. The chat template writes tools by their names, and their calls in
the form of Hermes. Tasks of a model that people know begin with that of examples/smollm2.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path

from benchmarks.learning.commands import run
from benchmarks.learning.tasks import TASKS, demonstrations, phrases

_SPECIAL = ("<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<|unknown|>")
_CHARACTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits + string.punctuation + " \n"
_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool.function.name }}\n{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_NUM_ROWS = 4096


def make_start(task: str, folder: Path) -> Path:
    """Return a Hugging Face directory below `folder`: the weights that all runs of `task` start from.

    What is there already stays, so that it is made once.
    """
    if TASKS[task].is_pretrained:
        from examples.smollm2.make_model import make  # its package is installed by a group of its own

        make(folder / "model")
        return folder / "model"
    steps = TASKS[task].sft_steps
    weights = folder / "sft" / "weights" / f"step_{steps}"
    if weights.exists():
        return weights
    make_base(folder / "base", phrases(task))
    rows = demonstrations(task, _NUM_ROWS)
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(
        "sft",
        "--model.name", folder / "base", "--model.init", "random", "--data.name", folder / "demonstrations.jsonl",
        "--data.batch-size", 64, "--data.micro-batch-size", 8, "--max-steps", steps, "--optim.lr", 3e-3,
        "--optim.schedule", "constant", "--optim.warmup-steps", 10, "--parallel.threads", 1,
        "--output-dir", folder / "sft", "--clean",
    )  # fmt: skip
    return weights


def make_base(folder: Path, phrases: Sequence[str]) -> None:
    """Write the configuration of a model of 0.6 million parameters and its tokenizer, which knows `phrases`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config

    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *_CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<|unknown|>", pad_token="<|pad|>", eos_token="<|end|>",
        chat_template=_TEMPLATE, model_max_length=2048,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=-(-backend.get_vocab_size() // 64) * 64, hidden_size=128, intermediate_size=384,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
        tie_word_embeddings=True, initializer_range=0.05, pad_token_id=vocabulary["<|pad|>"],
        eos_token_id=vocabulary["<|end|>"],
    )  # fmt: skip
    config.architectures = ["Qwen3ForCausalLM"]
    config.dtype = "float32"
    config.save_pretrained(folder)
