"""Where an attempt starts: its own checkpoints, another run's, other weights; and what is refused, with which words.
The launcher knows checkpoints by their manifests, so files may hold anything here."""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast.config import RlConfig, SftConfig
from holdfast.config.algorithm import KlConfig
from holdfast.config.base import CkptConfig, ModelConfig
from holdfast.config.load import to_toml
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.resolved import choose_for_training
from holdfast.config.rl import hand_down_shared
from holdfast.config.training import LoraConfig, TrainedModelConfig
from holdfast.errors import CheckpointError, ConfigError, RunDirError, StorageError
from holdfast.launcher.resume.attempt import Attempt, with_resume, write_config
from holdfast.launcher.resume.prepare import prepare
from holdfast.protocol.rollouts import Batch, Logprobs, Rollout, TokenIds, VersionSpan, encode_batch
from holdfast.run import atomic, checked, manifest
from holdfast.run.checkpoints import Kind
from holdfast.run.run_dir import RunDir
from tests.builders.checkpoint_files import commit, contents
from tests.builders.launches import start_rl
from tests.builders.sampled_rollouts import sampled_rollout
from tests.builders.toy import MODEL, TOY
from tests.unit.conftest import Command

Sft = Callable[..., tuple[int, str, str]]
STATE = {"orchestrator/orchestrator.json": "{}"}


@pytest.fixture
def sft(run_command: Command, in_root: Path, tmp_path: Path) -> Sft:
    """Run `sft --dry-run` into tmp_path/new; return its exit code and what it printed."""
    return lambda *argv: run_command("sft", *TOY["sft"], "--output-dir", tmp_path / "new", "--dry-run", *argv)


def config_of(run: RunDir, **ckpt: Any) -> SftConfig:
    model = TrainedModelConfig(name=MODEL)
    return SftConfig(output_dir=run.path, max_steps=100, model=model, ckpt=CkptConfig(**ckpt))


def start(config: SftConfig, *, clean: bool = False, dry_run: bool = False) -> Attempt:
    return prepare(config, clean=clean, dry_run=dry_run)


def add_checkpoint(run: RunDir, step: int, *, files: dict[str, str] | None = None, program: str | None = None) -> Path:
    if program is None:
        program = "rl" if files == STATE else "sft"
    directory = run.checkpoint(step)
    for name, content in {"trainer/.metadata": "index", "trainer/__0_0.distcp": f"{step}", **(files or {})}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    return commit(directory, "checkpoint", step, run_id=run.run_id(), program=program)


def add_weights(run: RunDir, version: int) -> Path:
    directory = run.weights_of(version)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    header = json.dumps({f"weights_{version}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return commit(directory, "weights", version)


def add_batch(run: RunDir, step: int, *, version: int, rollouts: Sequence[Rollout] = ()) -> Path:
    directory = run.batch(step)
    directory.mkdir(parents=True)
    batch = Batch(step=step, policy_version=version, weights_digest="", rollouts=list(rollouts))
    (directory / "batch.msgpack").write_bytes(encode_batch(batch))
    return commit(directory, "batch", step, policy_version=version)


@pytest.fixture
def other(tmp_path: Path) -> RunDir:
    """A finished run with checkpoints of steps 5 and 10."""
    run = RunDir(tmp_path / "other")
    run.create()
    for step in (5, 10):
        add_checkpoint(run, step)
    return run


@pytest.fixture
def new(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "new")


def test_a_fork_begins_with_anothers_checkpoint(other: RunDir, new: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    other.create(created_unix_s=1_700_000_000)
    before = contents(other.path)
    attempt = start(config_of(new, resume_dir=other.checkpoint(5)))
    assert (attempt.number, attempt.resume_step) == (1, 5)
    assert new.created_unix_s() == 1_700_000_000, "prompts with a date have that of the other run"
    assert new.committed_steps() == [5] and contents(new.checkpoint(5)) == contents(other.checkpoint(5))
    identity = json.loads((new.path / "run.json").read_text())
    source = {"run_id": other.run_id(), "step": 5, "path": str(other.checkpoint(5))}
    assert identity["forked_from"] == source and identity["run_id"] != other.run_id()
    out = capsys.readouterr().out
    assert f"forked {other.checkpoint(5)} (run {other.run_id()})" in out and "resuming from step 5" in out
    assert (new.checkpoint(5) / "trainer/.metadata").samefile(other.checkpoint(5) / "trainer/.metadata")
    # The other run goes on, and may even lose the step.
    shutil.rmtree(other.checkpoint(5))
    manifest.verify(new.checkpoint(5), step=5)
    del before["checkpoints/step_5/manifest.json"]
    assert {name for name in before if "step_5" not in name} == contents(other.path).keys()


def test_without_links_a_fork_is_a_verified_copy(other: RunDir, new: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def damaging(source: Path, target: Path) -> None:
        data = Path(source).read_bytes()
        target.write_bytes(data if target.name == "manifest.json" else bytes(len(data)))

    config = config_of(new, resume_dir=other.checkpoint(5))
    monkeypatch.setattr(os, "link", refused)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", damaging)
        with pytest.raises(CheckpointError, match="checksum"):
            start(config)
    assert new.committed_steps() == []
    assert start(config).resume_step == 5 and contents(new.checkpoint(5)) == contents(other.checkpoint(5))


def test_a_fork_without_space_leaves_nothing(other: RunDir, new: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> bool:
        if target.name == "manifest.json":
            raise OSError(28, "No space left on device")
        shutil.copyfile(source, target)
        return False

    config = config_of(new, resume_dir=other.checkpoint(5))
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "link_or_copy", full)
        with pytest.raises(CheckpointError, match="step_5 could not be copied to .*No space left on device"):
            start(config)
    assert list(new.checkpoints.iterdir()) == []
    assert start(config).resume_step == 5 and new.committed_steps() == [5]


def test_a_fork_resumes_from_own_checkpoints(other: RunDir, new: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    source = other.checkpoint(5)
    new.create()
    add_checkpoint(new, 3)
    with pytest.raises(RunDirError, match="holds a run that was not forked from .*step_5: continue that run"):
        start(config_of(new, resume_dir=source))
    assert start(config_of(new, resume_dir=source, resume_step="auto")).resume_step == 3
    assert new.forked_from() is None
    start(config_of(new, resume_dir=source), clean=True)
    assert new.committed_steps() == [5]
    add_checkpoint(new, 7)
    shutil.rmtree(other.path)
    for step in (None, "auto"):
        capsys.readouterr()
        assert start(config_of(new, resume_dir=source, resume_step=step)).resume_step == 7
        assert "has a checkpoint of its own (step 7): --ckpt.resume-dir" in capsys.readouterr().out


def test_a_dry_run_of_a_fork_checks_everything_and_touches_nothing(other: RunDir, sft: Sft, tmp_path: Path) -> None:
    code, out, _ = sft("--ckpt.resume-dir", other.checkpoint(5))
    assert code == 0 and f"would start from step 5 of {other.checkpoint(5)}" in out
    assert [path.name for path in (tmp_path / "new").rglob("*") if path.is_file()] == ["sft.toml"]
    (other.checkpoint(5) / "trainer" / ".metadata").write_text("INDEX")
    code, _, err = sft("--ckpt.resume-dir", other.checkpoint(5))
    assert code == 2 and ".metadata is damaged" in err and "Other committed steps there: 10" in err
    code, _, err = sft("--ckpt.resume-dir", other.checkpoint(5), "--ckpt.verify", "size")
    assert code == 0, err


def other_kinds(path: Path, other: RunDir, model: Path) -> dict[Kind | str, tuple[Path, str]]:
    """What else people may name, and what the message must say of it and advise."""
    dcp, file = path / "dcp", path / "model.safetensors"
    dcp.mkdir()
    (dcp / ".metadata").write_text("")
    shutil.copy(model / "model.safetensors", file)
    weights = add_weights(other, 10)
    return {
        Kind.DCP: (dcp, "--ckpt.init-from"),
        Kind.WEIGHTS: (weights, f"--ckpt.init-from {weights}"),
        Kind.HUGGING_FACE: (model, f"--ckpt.init-from {model}"),
        Kind.TENSORS: (file, f"--ckpt.init-from {file}"),
        "a run directory with the steps 5, 10": (other.path, "OTHER/checkpoints/step_"),
        "nothing: there is no such file": (path / "nowhere", "OTHER/checkpoints/step_"),
        "a torch.distributed.checkpoint directory. ": (
            other.checkpoint(5) / "trainer",
            f"--ckpt.resume-dir {other.checkpoint(5)}.",
        ),
    }


def test_what_is_no_checkpoint(other: RunDir, sft: Sft, tmp_path: Path, plain_model: Callable[..., Path]) -> None:
    for found, (path, advice) in other_kinds(tmp_path, other, plain_model()).items():
        code, _, err = sft("--ckpt.resume-dir", path)
        assert code == 2 and err.startswith("error: ") and "Traceback" not in err
        assert f"ckpt.resume_dir = {path} is " in err and str(found) in err and advice in err, err
        assert "Needed: a checkpoint of a run" in err and "optimizer" in err
        assert not RunDir(tmp_path / "new").holds_run()


def test_only_a_checkpoint_of_another_run_before_the_end_is_forked(other: RunDir, new: RunDir, sft: Sft) -> None:
    new.create()
    own = add_checkpoint(new, 5)
    misnamed = other.checkpoint(5).rename(other.checkpoint(7))
    for path, flags, words in (
        (add_batch(other, 6, version=5), (), ["holds batch, not a checkpoint"]),
        (misnamed, (), ["manifest of step 5, not of step 7"]),
        (own, (), ["the run's own directory", "--ckpt.resume-step N"]),
        (other.checkpoint(10), ("--max-steps", 7), ["max_steps = 7 is before step 10", "--max-steps."]),
    ):
        code, _, err = sft("--clean", "--ckpt.resume-dir", path, *flags)
        assert code == 2 and all(word in err for word in words), err
    assert own.exists()


def test_sft_and_rl_do_not_go_on_from_each_others_checkpoints(other: RunDir, new: RunDir) -> None:
    with pytest.raises(CheckpointError, match="a checkpoint of sft, and rl cannot .*--ckpt.init-from"):
        prepare(rl(new, resume_dir=other.checkpoint(5)).trainer, clean=False, dry_run=True)
    for program, said in (("rl", "rl"), ("dpo", "dpo"), ("", "another training loop or an older version")):
        saved = add_checkpoint(other, 13 + len(program), program=program)
        with pytest.raises(CheckpointError, match=f"a checkpoint of {said}, and sft cannot .*--ckpt.init-from"):
            start(config_of(new, resume_dir=saved), dry_run=True)


# Contradictions, and warm starts.


@pytest.mark.parametrize("flag", ["--ckpt.resume-dir", "--ckpt.init-from"])
def test_a_step_of_this_run_and_another_start_contradict_each_other(flag: str, other: RunDir, sft: Sft) -> None:
    for step in ("5", "latest", "-1"):
        code, _, err = sft(flag, other.checkpoint(5), "--ckpt.resume-step", step)
        assert code == 2 and "give one of them" in err
        assert f"--ckpt.resume-step auto {flag} {other.checkpoint(5)}" in err
    code, out, _ = sft(flag, other.checkpoint(5), "--ckpt.resume-step", "auto")
    assert code == 0 and "would start" in out


def test_a_warm_start_is_a_fresh_one_unless_auto_finds_a_checkpoint(other: RunDir, new: RunDir) -> None:
    config = config_of(new, init_from=other.checkpoint(5), resume_step="auto")
    attempt = start(config)
    assert attempt.resume_step is None
    ckpt = with_resume(config, attempt.resume_step).ckpt
    assert ckpt is not None and (ckpt.init_from, ckpt.resume_step) == (other.checkpoint(5), None)
    add_checkpoint(new, 7)
    weights = add_weights(new, 7)
    attempt = start(config)
    assert attempt.resume_step == 7 and weights.is_dir(), "`sft` exports them at its end alone"
    ckpt = with_resume(config, attempt.resume_step).ckpt
    assert ckpt is not None and (ckpt.init_from, ckpt.resume_step) == (None, 7)
    with pytest.raises(RunDirError, match="its settings are not there to compare with"):
        start(config_of(new, init_from=other.checkpoint(5)))


def test_unfit_weights_are_refused(other: RunDir, sft: Sft, tmp_path: Path, plain_model: Callable[..., Path]) -> None:
    model = ("--model.name", plain_model())
    (other.checkpoint(5) / "trainer" / ".metadata").write_text("INDEX")
    code, _, err = sft("--ckpt.init-from", other.checkpoint(5), *model)
    assert code == 2 and ".metadata is damaged" in err
    assert sft("--ckpt.init-from", other.checkpoint(5), "--ckpt.verify", "size", *model)[0] == 0
    file = tmp_path / "cut.safetensors"
    file.write_bytes((plain_model() / "model.safetensors").read_bytes()[:-1])
    code, _, err = sft("--ckpt.init-from", file, *model)
    assert code == 2 and f"{file} (ckpt.init_from) was cut: it has " in err
    weights = add_weights(other, 10)
    assert sft("--ckpt.init-from", weights, *model)[0] == 0
    code, _, err = sft("--ckpt.init-from", weights, *model, "--model.lora.rank", "4")
    assert code == 2 and "model.lora.rank: unset -> 4" in err
    (adapter := tmp_path / "adapter").mkdir()
    save_file({"base_model.model.x.lora_A.weight": np.zeros((4, 2))}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8, "use_rslora": true}')
    code, _, err = sft("--ckpt.init-from", adapter, *model, "--model.lora.rank", "4")
    assert code == 2 and "model.lora.alpha: 16.0 -> 32.0" in err, "peft's product counts 8 / sqrt(4) times"
    assert sft("--ckpt.init-from", adapter, *model, "--model.lora.rank", "4", "--model.lora.alpha", "16")[0] == 0
    assert not RunDir(tmp_path / "new").holds_run()


def test_clean_removes_nothing_for_weights_of_other_sizes(
    other: RunDir, new: RunDir, plain_model: Callable[..., Path], tmp_path: Path
) -> None:
    new.create()
    add_checkpoint(new, 7)
    config = config_of(new, init_from=other.checkpoint(10)).model_copy(
        update={"model": TrainedModelConfig(name=str(plain_model()), lora=LoraConfig(rank=16))}
    )
    sizes = (plain_model() / "config.json").read_bytes()
    shutil.rmtree(other.checkpoint(10))
    wrong = sizes.replace(b'"hidden_size": ', b'"hidden_size": 1')
    for model, settings, says in (
        (sizes, "[model.lora]\nrank = 8", r"model\.lora\.rank: 8 -> 16"),
        (sizes, "[model]", r"model\.lora\.rank: unset -> 16"),
        (sizes, "[model.lora]\nrank = 16\nalpha = 8.0", r"model\.lora\.alpha: 8.0 -> 32.0"),
        (wrong, "[model.lora]\nrank = 16", r"hidden_size: 1\d+ -> \d+\n.*Give a model of these sizes"),
    ):
        path = add_checkpoint(other, 10, files={"model/config.json": model.decode(), "trainer/config.toml": settings})
        with pytest.raises(CheckpointError, match=says):
            start(config, clean=True)
        shutil.rmtree(path)
    fitting = {"model/config.json": sizes.decode(), "trainer/config.toml": "[model.lora]\nrank = 16"}
    add_checkpoint(other, 10, files=fitting)
    assert new.steps_there() == [7]
    start(config, clean=True)
    assert new.steps_there() == []


@pytest.mark.parametrize("flags", [["--clean"], ["--ckpt.resume-step", "auto"]])
def test_start_weights_are_kept(flags: list[str], new: RunDir, sft: Sft, plain_model: Callable[..., Path]) -> None:
    new.create()
    shutil.copytree(plain_model(), new.weights_of(6))
    for flag in ("--ckpt.init-from", "--model.name", "--model.tokenizer"):
        code, _, err = sft(flag, new.weights_of(6), *flags)
        assert code == 2 and f"= {new.weights_of(6)} lies in {new.path}" in err and "--output-dir" in err
    config = config_of(new)
    for place in ("discarded", "rollouts") if flags == ["--clean"] else ():
        (rows := new.path / place / "rows.jsonl").parent.mkdir()
        rows.write_text('{"prompt": "a", "completion": "b"}\n')
        config.data.name = str(rows)
        with pytest.raises(ConfigError, match=re.escape(f"data.name = {rows} lies in")):
            start(config, clean=True)
    code, _, err = sft("--model.name", shutil.copytree(plain_model(), new.path / "model"), *flags)
    assert code == 0, err


# Resuming, and what differs from before.


def test_every_process_is_handed_the_number_and_nothing_else(other: RunDir) -> None:
    ckpt = with_resume(config_of(other, resume_dir=Path("elsewhere"), resume_step="auto"), 10).ckpt
    assert ckpt is not None and (ckpt.resume_step, ckpt.resume_dir) == (10, None)


def test_checkpoints_without_a_run_are_no_fresh_directory(other: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = manifest.read_manifest(other.checkpoint(10)).run_id
    (other.path / "run.json").unlink()
    with pytest.raises(RunDirError, match="not there to compare with: continue with --ckpt.resume-step auto"):
        start(config_of(other))
    assert start(config_of(other, resume_step="latest")).resume_step == 10
    assert other.run_id() == run_id and "has no run.json, and gets the run id of step 10" in capsys.readouterr().out


def test_the_diff_to_the_checkpoint_is_shown_in_groups(other: RunDir, sft: Sft, new: RunDir) -> None:
    before = SftConfig(max_steps=20, output_dir=other.path, ckpt=CkptConfig(interval=5))
    before.model.name, before.data.name = TOY["sft"][1], TOY["sft"][3]
    before.optim.schedule, before.optim.lr, before.optim.warmup_steps = "linear", 0.5, 0
    choose_for_training(before, "cpu", num_devices=0)
    step = add_checkpoint(other, 11, files={"trainer/config.toml": to_toml(before)})
    flags = ["--optim.schedule", "linear", "--optim.lr", 0.5, "--max-steps", 40, "--data.batch-size", 32]
    code, out, _ = sft("--ckpt.resume-dir", step, *flags)
    assert code == 0
    group = "sft: differs from the checkpoint of step 11; "
    assert f"{group}changes what is computed from here on:\n  data.batch_size: 64 -> 32\n{group}free to change:" in out
    assert "  max_steps: 20 -> 40\n" in out and "  ckpt.interval: 5 -> unset\n" in out
    assert "the linear schedule now ends at step 40 instead of 20: the learning rate of step 12 is 0.3625 in" in out


def test_else_the_last_attempt_is_compared(other: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    first = config_of(other, resume_step="latest")
    write_config(Attempt(other, 1, None), "sft", first, dry_run=False)
    changed = first.model_copy(update={"seed": 8})
    write_config(start(changed), "sft", changed, dry_run=False)
    told = "sft: differs from the last attempt; changes what is computed from here on:\n  seed: 0 -> 8"
    assert told in capsys.readouterr().out


def test_another_architecture_is_refused(other: RunDir, sft: Sft, plain_model: Callable[..., Path]) -> None:
    files = {"model/config.json": (plain_model(weights=False) / "config.json").read_text()}
    step = add_checkpoint(other, 11, files=files)
    wider = plain_model(weights=False, hidden_size=64, num_hidden_layers=3)
    code, _, err = sft("--ckpt.resume-dir", step, "--model.name", wider)
    assert code == 2 and f"the checkpoint of step 11 is of another model than model.name = '{wider}'" in err
    assert "hidden_size: 32 -> 64" in err and "num_hidden_layers: 2 -> 3" in err and "Traceback" not in err
    before = contents(other.path)
    config = config_of(other, resume_step=11)
    config.model.name = str(wider)
    with pytest.raises(CheckpointError, match="another model"):
        start(config)
    assert contents(other.path) == before


# RL: weights and journal.


def rl(run: RunDir, *, async_level: int = 1, **ckpt: Any) -> RlConfig:
    ckpt_config, model = CkptConfig(**ckpt), ModelConfig(name=MODEL)
    config = RlConfig(output_dir=run.path, async_level=async_level, max_steps=100, model=model, ckpt=ckpt_config)
    return hand_down_shared(config)


@pytest.mark.parametrize(("async_level", "brought"), [(0, []), (1, [4]), (2, [3, 4]), (3, [3, 4])])
@pytest.mark.parametrize("trainer_alone", [False, True])
def test_a_fork_brings_the_older_weights_that_batches_need(
    async_level: int, brought: list[int], trainer_alone: bool, other: RunDir, new: RunDir,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    add_checkpoint(other, 5, files=STATE)
    for version in (3, 4, 5):
        add_weights(other, version)
    config = rl(new, async_level=async_level, resume_dir=other.checkpoint(5))
    if trainer_alone:
        prepare(config.trainer, clean=False, dry_run=False)
    else:
        start_rl(config)
    assert new.published_weights() == brought
    for version in brought:
        assert contents(new.weights_of(version)) == contents(other.weights_of(version))
    assert (f"{other.weights_of(2)} is no longer there" in capsys.readouterr().out) is (async_level == 3)


def test_damaged_older_weights_are_refused(other: RunDir, new: RunDir) -> None:
    add_checkpoint(other, 5, files=STATE)
    (add_weights(other, 4) / "model.safetensors").write_text("WEIGHTS 4")
    with pytest.raises(CheckpointError, match="weights/step_4/model.safetensors is damaged"):
        start_rl(rl(new, resume_dir=other.checkpoint(5)))


@pytest.fixture
def killed(tmp_path: Path) -> RunDir:
    """An RL run with checkpoints 4 and 6 whose journal went on to batch 9: batch N by version N - 2."""
    run = RunDir(tmp_path / "killed")
    start_rl(rl(run))
    for step in (4, 6):
        add_checkpoint(run, step, files=STATE)
    for step in range(5, 10):
        add_batch(run, step, version=step - 2)
    run.generations(10).write_text("finished")
    return run


def replayed(run: RunDir, resume_step: Any = "latest", **changes: Any) -> list[int]:
    """Resume with changed settings; return the batches behind the resumed step that are kept."""
    config = rl(run, resume_step=resume_step)
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        target: Any = config
        for part in section.split("__"):
            target = getattr(target, part)
        setattr(target, name, value)
    attempt = start_rl(config)
    assert attempt.resume_step is not None
    return [step for step in run.published_batches() if step > attempt.resume_step]


def test_an_unchanged_run_trains_its_journal_again(killed: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    for step in range(1, 5):
        add_batch(killed, step, version=step - 2)
    assert replayed(killed) == [7, 8, 9] and killed.generations(10).exists()
    assert "batches 7 to 9 are in the journal: training them again" in capsys.readouterr().out
    assert killed.published_batches() == list(range(1, 10)), "they stay where they are"
    assert replayed(killed, resume_step=4) == [] and killed.published_batches() == [1, 2, 3, 4]
    assert not killed.generations(10).exists() and (killed.discarded(3) / "rollouts" / "step_9").exists()


@pytest.mark.parametrize(("token_id", "logprob", "said"), [
    (10**6, -1.0, "token_ids holds 1000000, the model has"), (5, math.inf, "logprobs holds inf"),
])  # fmt: skip
def test_a_batch_that_nobody_can_have_sampled_is_made_again(
    killed: RunDir, token_id: int, logprob: float, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A version that checked less may have journaled it, and a trainer that reads it dies at every start."""
    for step, token, value in ((7, 5, -1.0), (8, token_id, logprob)):
        sampled = {"token_ids": TokenIds([1, token]), "logprobs": Logprobs([0.0, value])}
        rollout = sampled_rollout(0.0, sampled=1, versions=[VersionSpan(step - 2, 1, 2)], **sampled)
        shutil.rmtree(killed.batch(step))
        add_batch(killed, step, version=step - 2, rollouts=[rollout])
    assert replayed(killed) == [7]
    assert f"batch 8 is made again, because no engine can have sampled it: a, task 0: {said}" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["trainer/__0_0.distcp", "manifest.json"])
def test_falling_back_past_damage_keeps_the_journal(killed: RunDir, file: str) -> None:
    (killed.checkpoint(6) / file).write_text("damaged")
    assert replayed(killed) == [5, 6, 7, 8, 9] and killed.generations(10).exists()
    assert killed.committed_steps() == [4] and (killed.discarded(2) / "checkpoints" / "step_6").exists()


@pytest.mark.parametrize("written", [(), ("trainer.toml",), ("trainer.toml", "orchestrator.toml")])
def test_a_start_that_was_killed_early_costs_nothing(killed: RunDir, written: tuple[str, ...]) -> None:
    killed.configs(2).mkdir()
    for name in written:
        shutil.copy(killed.configs(1) / name, killed.configs(2))
    assert replayed(killed, trainer__keep_attempts=1) == [7, 8, 9] and killed.generations(10).exists()
    assert (killed.configs(1) / "inference.toml").exists()


@pytest.mark.parametrize("again", [False, True])
def test_deaths_do_not_fill_the_disk_with_weights_that_come_out_again(killed: RunDir, again: bool) -> None:
    """Only a start by hand, which may be one with other settings, keeps the later ones aside."""
    for version in (5, 6, 7, 8):
        add_weights(killed, version)
    config = rl(killed, resume_step="latest")
    prepare(config.trainer, clean=False, dry_run=False, orchestrator=config.orchestrator, again=again)
    assert killed.published_weights() == [5]  # the trainer publishes 6 itself
    assert (killed.discarded(2) / "weights").exists() is not again


def test_only_a_heal_does_without_the_store(killed: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "store").write_text("no directory any more")
    config = rl(killed, resume_step="auto", dir=f"file://{tmp_path}/store/run")
    with pytest.raises(StorageError, match="listing it"):
        prepare(config.trainer, clean=False, dry_run=False, orchestrator=config.orchestrator)
    attempt = prepare(config.trainer, clean=False, dry_run=False, orchestrator=config.orchestrator, again=True)
    assert attempt.resume_step == 6 and killed.published_batches() == [5, 6, 7, 8, 9]
    warning = "WARNING: continuing with the checkpoints of this machine only: "
    assert warning not in capsys.readouterr().out, "with a whole newest step there is nothing to ask the store for"
    (killed.checkpoint(6) / "manifest.json").write_text("damaged")
    attempt = prepare(config.trainer, clean=False, dry_run=False, orchestrator=config.orchestrator, again=True)
    assert attempt.resume_step == 4 and warning in capsys.readouterr().out


@pytest.mark.parametrize("store", [{}, {"dir": "memory://run"}], ids=["without a store", "with a store"])
def test_a_heal_reads_one_step_once(killed: RunDir, store: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[Path, Any]] = []
    verify = manifest.verify

    def noted(directory: Path, **how: Any) -> manifest.Manifest:
        read.append((directory, how["how"]))
        return verify(directory, **how)

    monkeypatch.setattr(manifest, "verify", noted)
    config = rl(killed, resume_step="auto", **store)
    attempt = prepare(config.trainer, clean=False, dry_run=False, orchestrator=config.orchestrator, again=True)
    assert attempt.resume_step == 6
    assert [one for one in read if "checkpoints" in one[0].parts] == [(killed.checkpoint(6), "full")]


def test_a_fresh_start_with_other_weights_makes_the_batches_again(killed: RunDir, other: RunDir) -> None:
    """No checkpoint was committed yet; batches 1 and 2 were sampled by the weights of the model."""
    for step in (4, 6):
        shutil.rmtree(killed.checkpoint(step))
    for step in (1, 2):
        add_batch(killed, step, version=0)
    same, warm = rl(killed, resume_step="auto"), rl(killed, resume_step="auto", init_from=other.checkpoint(5))
    assert start_rl(same).resume_step is None and killed.published_batches() == [1, 2, 5, 6, 7, 8, 9][:2]
    assert start_rl(warm).resume_step is None and killed.published_batches() == []
    add_batch(killed, 1, version=0)
    start_rl(warm)
    assert killed.published_batches() == [1], "these are of the same weights"


def test_a_run_from_other_weights_must_name_its_reference(other: RunDir, new: RunDir) -> None:
    config = rl(new, init_from=other.checkpoint(5))
    config.trainer.kl = KlConfig()
    with pytest.raises(ConfigError, match=r"kl\.reference is needed with ckpt\.init_from"):
        start_rl(config)
    assert not new.holds_run()
    config.trainer.kl.reference = str(other.path)
    assert start_rl(config).resume_step is None


@pytest.mark.parametrize(("changes", "kept"), [
    ({"resume_step": 6}, [7, 8, 9]),
    ({"trainer__max_steps": 200, "orchestrator__max_steps": 200}, [7, 8, 9]),
    ({"orchestrator__client__timeout_s": 5.0, "inference__engines": 2}, [7, 8, 9]),
    ({"inference__server__port": 8017, "inference__engine__max_num_seqs": 3}, [7, 8, 9]),
    ({"orchestrator__group_size": 4}, []),
    ({"inference__model__dtype": "bfloat16"}, []),
    # Versions after 6 come out differently at another learning rate; batch 9 was sampled by version 7.
    ({"trainer__optim__lr": 0.1}, [7, 8]),
    ({"trainer__optim__schedule": "linear"}, [7, 8]),
], ids=str)  # fmt: skip
def test_what_makes_other_batches_makes_them_all_again_and_other_weights_those_behind_them(
    killed: RunDir, changes: dict[str, Any], kept: list[int]
) -> None:
    assert replayed(killed, **changes) == kept and killed.generations(10).exists() is (kept == [7, 8, 9])


@pytest.mark.parametrize("damage", ["gap", "bit"])
def test_the_journal_ends_at_a_gap_or_damage(killed: RunDir, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    if damage == "gap":
        shutil.rmtree(killed.batch(8))
    else:
        (killed.batch(8) / "batch.msgpack").write_text("BATCH 8")
    assert replayed(killed) == [7] and (killed.discarded(2) / "rollouts" / "step_9").exists()
    assert ("WARNING: batch 8 is made again: " in capsys.readouterr().out) is (damage == "bit")


def test_a_journal_of_an_unknown_configuration_is_not_trusted(killed: RunDir) -> None:
    (killed.configs(1) / "trainer.toml").write_text("unknown = 1\n")
    assert replayed(killed) == []


def test_an_orchestrator_alone_does_not_fork(tmp_path: Path, other: RunDir) -> None:
    from holdfast.launcher.launch import launch_orchestrator

    config = OrchestratorConfig(output_dir=tmp_path / "new", ckpt=CkptConfig(resume_dir=other.checkpoint(5)))
    with pytest.raises(ConfigError, match=re.escape("the trainer's command brings the checkpoint into the run")):
        launch_orchestrator(config)


def test_old_attempts_leave_nothing_behind_but_the_settings_that_a_start_compares_its_own_with(new: RunDir) -> None:
    new.create()
    add_checkpoint(new, 3)
    for number in range(1, 8):
        for directory in (new.configs(number), new.logs(number), new.discarded(number)):
            directory.mkdir(parents=True)
            (directory / "something").touch()
    config = config_of(new, resume_step="latest").model_copy(update={"keep_attempts": 3})
    assert start(config).number == 8
    left = {parent: sorted(path.name for path in (new.path / parent).iterdir()) for parent in ("logs", "configs")}
    assert left == {"logs": ["attempt_6", "attempt_7"], "configs": ["attempt_6", "attempt_7"]}
    assert not new.discarded(5).exists() and new.discarded(6).exists()
    (new.configs(8)).mkdir()
    start(config.model_copy(update={"keep_attempts": "all"}))
    assert new.logs(6).exists()
    # The launchers of the attempts since may all have been killed before they started anything.
    (new.configs(6) / "sft.toml").write_bytes(checked.with_first_line("max_steps = 3\n"))
    start(config.model_copy(update={"keep_attempts": 1}))
    assert new.configs(6).exists() and new.configs(7).exists()
