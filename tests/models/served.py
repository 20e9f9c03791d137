"""Tiny random models in the Hugging Face layout, and what transformers says their logprobs are."""

import functools
import json
import shutil
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.generation import logits_process

BASE = Path(__file__).resolve().parents[2] / "examples" / "reverse_text" / "base"
# The servers under test need the cores.
torch.set_num_threads(1)


def write_model(directory: Path, *, seed: int, tied: bool, weights: bool = True, width: int = 128) -> Path:
    """Write a 0.2M-parameter Qwen3, far from uniform, and return its directory. `width`: of the layers of its MLPs."""
    fields = json.loads((BASE / "config.json").read_text())
    smaller = {"hidden_size": 64, "intermediate_size": width, "num_hidden_layers": 2, "tie_word_embeddings": tied}
    config = Qwen3Config(**(fields | smaller))
    if weights:
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0 if parameter.ndim > 1 else 1.0)
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(directory)
    else:
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BASE / name, directory)
    return directory


@functools.cache
def _load(directory: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def reference_logprobs(
    directory: Path, prompt: list[int], completion: list[int], *, temperature: float = 1.0
) -> list[float]:
    """Return log_softmax(logits / temperature) of each completion token, by transformers in float32."""
    with torch.no_grad():
        logits = _load(directory)(torch.tensor([prompt + completion])).logits[0]
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


def greedy_tokens(directory: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the likeliest continuation, token by token, by transformers in float32."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            tokens.append(int(_load(directory)(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def truncated_logprobs(
    directory: Path, prompt: list[int], completion: list[int], *, temperature: float, top_p: float, top_k: int,
    min_p: float,
) -> list[float]:  # fmt: skip
    """Return the log-probability of each completion token among those that the cuts leave, by transformers' own."""
    with torch.no_grad():
        logits = _load(directory)(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    unused = torch.zeros(len(completion), 1, dtype=torch.long)
    logits = logits_process.TemperatureLogitsWarper(temperature)(unused, logits)
    logits = logits_process.MinPLogitsWarper(min_p)(unused, logits)
    logits = logits_process.TopKLogitsWarper(top_k)(unused, logits)
    logits = logits_process.TopPLogitsWarper(top_p)(unused, logits)
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()
