"""Checks before vLLM is imported, and what is exported by then."""

import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from holdfast.config import InferenceConfig
from holdfast.config.base import is_loopback
from holdfast.config.inference import ServerConfig
from holdfast.config.orchestrator import ClientConfig
from holdfast.errors import ConfigError, DataError
from holdfast.inference import main
from holdfast.inference.main import _read_arguments as read_arguments
from holdfast.inference.main import bind, check, required_token, resolve_model
from holdfast.orchestrator.client.http import HttpTransport
from tests.runs.ports import free_port


def _server(**fields: str | int) -> ServerConfig:
    return ServerConfig.model_validate(fields)


def test_only_loopback_addresses_are_private() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_a_public_server_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    public = _server(host="0.0.0.0", admin_token_env="SOME_TOKEN")
    for value in (None, ""):
        monkeypatch.delenv("SOME_TOKEN", raising=False)
        if value is not None:
            monkeypatch.setenv("SOME_TOKEN", value)
        with pytest.raises(ConfigError, match="SOME_TOKEN"):
            required_token(public)
    monkeypatch.setenv("SOME_TOKEN", "secret")
    assert required_token(public) == "secret"
    assert required_token(_server(admin_token_env="SOME_TOKEN")) == "secret", "on loopback too"
    monkeypatch.delenv("SOME_TOKEN")
    assert required_token(_server(admin_token_env="SOME_TOKEN")) is None


@pytest.mark.parametrize("token", ["S3CRET\n", " S3CRET", "S3 CRET", "S3CRETé", " ", "S3CRET\x7f"])
def test_a_token_that_no_header_can_hold_is_refused_on_both_sides(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_ADMIN_TOKEN", token)
    for read in (lambda: required_token(_server()), lambda: HttpTransport(ClientConfig(), key="client")):
        with pytest.raises(ConfigError, match="HOLDFAST_ADMIN_TOKEN holds spaces, line breaks or") as caught:
            read()
        assert "S3" not in str(caught.value)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot listen on 192.0.2.1:8000"):
        bind(_server(host="192.0.2.1"))
    for host in ("", "a" * 70, "a..b", "\u202e"):
        with pytest.raises(ValueError, match="at least 1 character|is not the name or address of a machine"):
            _server(host=host)


def _config(**model: str) -> InferenceConfig:
    return InferenceConfig.model_validate({"model": model})


def test_a_model_directory_must_be_complete(tmp_path: Path) -> None:
    """What else can be wrong with one: `tests/unit/run/test_local_inputs.py`."""
    with pytest.raises(DataError, match="is not a directory"):
        resolve_model(_config(name="./nowhere"))
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    model.mkdir()
    tokenizer.mkdir()
    with pytest.raises(DataError, match="has no config.json"):
        resolve_model(_config(name=str(model)))
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(DataError, match="--model.load dummy"):
        resolve_model(_config(name=str(model)))
    with pytest.raises(DataError, match="has no tokenizer"):
        resolve_model(_config(name=str(model), load="dummy"))
    (tokenizer / "tokenizer.json").write_text("{}")
    assert resolve_model(_config(name=str(model), load="dummy", tokenizer=str(tokenizer))) == (model, tokenizer)


def test_a_model_of_the_hub_is_taken_from_the_cache_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--someone--model/snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"max_position_embeddings": 16}')
    (snapshot / "tokenizer.json").write_text("{}")
    (tmp_path / "models--someone--model/refs").mkdir()
    (tmp_path / "models--someone--model/refs/main").write_text("c" * 40)
    assert resolve_model(_config(name="someone/model", load="dummy")) == (snapshot, snapshot)
    config = _config(name="someone/model", load="dummy")
    config.server.port = free_port()
    with pytest.raises(ConfigError, match="inference.model.max_len = 2048 is more than the 16 positions"):
        check(config, key="inference.model")
    with pytest.raises(
        DataError, match=r"'someone/other': there is no such directory, and the hub gave no such model \("
    ):
        resolve_model(_config(name="someone/other", load="dummy"))


def test_configurations_that_are_none_of_the_inference_server(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("max_steps = 3")
    for arguments, said in (
        ([], "usage: python -m holdfast.inference.main .* got 0 arguments"),
        ([str(tmp_path / "no.toml")], r"no\.toml: there is no such file"),
        ([str(wrong)], r"wrong\.toml: .*max_steps"),
    ):
        with pytest.raises(ConfigError, match=re.compile(said, re.DOTALL)):
            read_arguments(arguments)


_OURS = ("OMP_", "MKL_", "OPENBLAS_", "VLLM_", "HF_HUB", "TORCHDYNAMO", "TOKENIZERS")
_SET = """
import os
from holdfast.inference.main import set_environment
from holdfast.config import InferenceConfig

before = set(os.environ)
set_environment(InferenceConfig.model_validate({settings}), {device!r})
print({{name: os.environ[name] for name in os.environ if name not in before}})
"""


def exported(device: str, **settings: Any) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    command = [sys.executable, "-c", _SET.format(settings=settings, device=device)]
    return ast.literal_eval(subprocess.check_output(command, env=environment, text=True))


@pytest.mark.launch
def test_on_a_cpu_threads_are_bound_and_nothing_is_compiled() -> None:
    names = exported("cpu", engine={"eager": True, "threads": 3}, deterministic=True)
    assert names["OMP_NUM_THREADS"] == names["MKL_NUM_THREADS"] == "3" and names["TORCHDYNAMO_DISABLE"] == "1"
    assert names["VLLM_CPU_ATTN_SPLIT_KV"] == "0" and "VLLM_BATCH_INVARIANT" not in names
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in names
    assert int(exported("cpu", engine={"eager": False})["OMP_NUM_THREADS"]) >= 1
    assert "TORCHDYNAMO_DISABLE" not in exported("cpu", engine={"eager": False})


@pytest.mark.launch
def test_on_gpus_nothing_of_that_is_exported() -> None:
    names = exported("cuda", engine={"eager": True})
    assert names == {
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }  # fmt: skip
    assert exported("cuda", engine={"threads": 4})["OMP_NUM_THREADS"] == "4"
    assert exported("cuda", deterministic=True)["VLLM_BATCH_INVARIANT"] == "1"


def test_a_taken_port_is_told_before_vllm_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "require_vllm", lambda: "cpu")
    monkeypatch.setattr(main.child, "heavy_imports", Mock(side_effect=AssertionError("it imports vLLM")))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = InferenceConfig.model_validate({"server": {"port": taken.getsockname()[1]}})
        with pytest.raises(ConfigError, match="cannot listen on .*: Address already in use"):
            main.run(config)
