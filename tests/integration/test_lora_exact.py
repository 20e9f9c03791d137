"""`sft`, `dpo` and `rl` with LoRA: exact after a stop on one rank and two, adapters alone on disk and to engines."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from holdfast.shared.files import manifest
from holdfast.shared.files.adapter import ADAPTER_DIR, ADAPTER_NAME
from holdfast.shared.files.checkpoints import TRAINER_DIR, Kind, kind_of
from holdfast.shared.files.metrics import read_metrics
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.files.weights_digest import weights_digest
from holdfast.trainer.conversion.reading import TensorReader
from tests.conftest import ROOT
from tests.faults.held_steps import NEVER, at_start, held_after
from tests.integration.conftest import UsedServer
from tests.runs.rl import MODEL, RlRun, assert_same, complete, exact_metrics, outcome, succeeded
from tests.runs.training import Runs, SftRun, run_sft

STEPS = 6
HALF = 3
LORA = ("--model.lora.rank", "2", "--model.lora.alpha", "8")
DROPOUT = ("--model.lora.dropout", "0.3")
# Trainer against sampler, float32 on both sides.
LOG_RATIO_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path], sft_data: Path) -> Runs:
    """Runs of `sft` by name."""
    home, model = tmp_path_factory.mktemp("lora"), tiny_model()
    common = ("--model.init", "pretrained", "--optim.lr", "1e-2", "--ckpt.interval", str(HALF), *LORA)
    runs = Runs()

    def define(name: str, *flags: str, after: str | None = None) -> None:
        def make() -> SftRun:
            if after is not None:
                shutil.copytree(runs.succeeded(after).run_dir.path, home / name)
            return run_sft(home / name, model, sft_data, *common, *flags)

        runs.define(name, make)

    two, whole = ("--parallel.num-ranks", "2"), ("--max-steps", str(STEPS))
    again = (*whole, "--ckpt.resume-step", str(HALF))
    define("two", *two, *DROPOUT, *whole)
    define("one", *DROPOUT, *whole)
    define("plain", *whole)
    define("two_plain", *two, *whole)
    define("one_resumed", *DROPOUT, *again, after="one")
    define("two_resumed", *two, *DROPOUT, *again, after="two")
    define("two_loaded_by_one", *whole, *DROPOUT, "--ckpt.resume-step", "latest", after="two")
    return runs


def published(run: SftRun) -> dict[str, bytes]:
    """The published tensors, merged and of the adapter."""
    directory = run.run_dir.weights_of(STEPS)
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*.safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["one", "two"])
def test_a_resumed_run_equals_the_straight_one_bit_for_bit(runs: Runs, ranks: str) -> None:
    straight, resumed = runs.succeeded(ranks), runs.succeeded(f"{ranks}_resumed")
    assert f"resuming from step {HALF}" in resumed.output
    assert published(straight) == published(resumed)
    assert set(published(straight)) == {"model.safetensors", f"{ADAPTER_DIR}/{ADAPTER_NAME}"}
    for name in ("loss", "grad_norm", "step"):
        assert straight.column(name) == resumed.column(name) != [], name
    # Dropout draws numbers: a generator that is not restored would show above.
    assert straight.column("loss")[-1] != pytest.approx(runs.succeeded("plain").column("loss")[-1], rel=1e-5)


@pytest.mark.slow
def test_two_ranks_start_and_train_as_one(runs: Runs) -> None:
    one, two = runs.succeeded("plain"), runs.succeeded("two_plain")
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-5)
    assert two.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=1e-4)
    assert one.column("loss")[-1] < one.column("loss")[0]


@pytest.mark.slow
def test_one_rank_loads_what_two_have_saved(runs: Runs) -> None:
    two, one = runs.succeeded("two"), runs.succeeded("two_loaded_by_one")
    assert published(one) == published(two)


def test_checkpoints_hold_adapters_and_the_base_stays_as_it_was(runs: Runs, tiny_model: Callable[..., Path]) -> None:
    run = runs.succeeded("one")
    saved = TensorReader(run.run_dir.checkpoint(STEPS) / TRAINER_DIR).saved
    assert saved and all(".lora_" in name for name in saved)
    base, trained = (load_file(place / "model.safetensors") for place in (tiny_model(), run.run_dir.weights_of(STEPS)))
    changed = {name for name in base if not base[name].equal(trained[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}
    progress = json.loads((run.run_dir.checkpoint(STEPS) / TRAINER_DIR / "progress.json").read_text())
    assert progress["base"]["name"] == str(tiny_model())


@pytest.mark.slow
def test_another_base_or_other_adapters_are_refused(
    runs: Runs, tiny_model: Callable[..., Path], sft_data: Path, tmp_path: Path
) -> None:
    first = runs.succeeded("one").run_dir
    resume = ("--model.init", "pretrained", "--max-steps", "9", "--ckpt.resume-step", str(STEPS))
    for model, flags, code, message in (
        (tiny_model(seed=1), LORA, 2, "adapters were trained on other weights"),
        (tiny_model(), (), 2, "model.lora: set -> unset"),
        (tiny_model(), ("--model.lora.rank", "4"), 2, "model.lora.rank: 2 -> 4"),
    ):
        copy = shutil.copytree(first.path, tmp_path / f"{len(list(tmp_path.iterdir()))}")
        run = run_sft(copy, model, sft_data, *resume, *flags)
        assert (run.code, message in run.output, "Traceback" in run.output) == (code, True, False), run.output
        assert manifest.verify(run.run_dir.checkpoint(STEPS)).step == STEPS


@pytest.mark.slow
def test_an_export_is_the_adapter_or_the_merged_model(
    runs: Runs, tiny_model: Callable[..., Path], command: Callable[[str], str], tmp_path: Path
) -> None:
    run_dir = runs.succeeded("one").run_dir
    weights = run_dir.weights_of(STEPS)

    def export(name: str, *flags: object) -> subprocess.CompletedProcess[str]:
        argv = (command("ckpt"), "export", STEPS, "--to", tmp_path / name, "--output-dir", run_dir.path, *flags)
        return subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=280, check=False)

    assert export("alone").returncode == 0
    assert kind_of(tmp_path / "alone") is Kind.ADAPTER and manifest.verify(tmp_path / "alone").step == STEPS
    for path in (weights / ADAPTER_DIR).iterdir():
        assert (tmp_path / "alone" / path.name).read_bytes() == path.read_bytes(), path
    done = export("merged", "--base", tiny_model())
    assert done.returncode == 0, done.stderr
    assert weights_digest(tmp_path / "merged") == weights_digest(weights)
    for path in weights.rglob("*"):
        if path.is_file() and path.name != "manifest.json":
            assert (tmp_path / "merged" / path.relative_to(weights)).read_bytes() == path.read_bytes(), path
    for flags, message in (
        (("--base", tiny_model(seed=1)), "has other weights"),
        (("--dtype", "bfloat16"), "an adapter alone is one file in float32"),
    ):
        done = export("refused", *flags)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert "Traceback" not in done.stderr and not (tmp_path / "refused").exists()


@pytest.mark.slow
def test_the_reference_of_dpo_is_the_model_without_the_adapter(command: Callable[[str], str], tmp_path: Path) -> None:
    settings = {
        "output-dir": tmp_path / "run", "model.name": MODEL, "data.batch-size": 8, "optim.lr": 1e-2, "max-steps": 3,
        "data.name": ROOT / "examples" / "reverse_text" / "preferences.jsonl", "parallel.threads": 1,
    }  # fmt: skip
    words = (word for key, value in settings.items() for word in (f"--{key}", str(value)))
    done = subprocess.run([command("dpo"), *words, *LORA], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[0]["loss"] == pytest.approx(math.log(2)) and abs(lines[0]["rewards/margins"]) < 1e-6
    assert lines[-1]["loss"] < lines[0]["loss"] and lines[-1]["rewards/margins"] > 0


def test_rl_sends_adapters_to_the_engine_and_is_exact_after_a_kill(rl_server: UsedServer, tmp_path: Path) -> None:
    lora = (f"--trainer.{flag.removeprefix('--')}" if flag.startswith("--") else flag for flag in LORA)
    flags = (*rl_server.flags, *lora, "--trainer.optim.lr", "5e-3", "--async-level", "0", "--ckpt.interval", "2")
    flags = (*flags, "--max-steps", str(STEPS), "--ckpt.resume-step", "auto")
    straight = succeeded(tmp_path / "straight", *flags).run_dir
    held = at_start(held_after(STEPS - 1, until=NEVER))
    with RlRun(tmp_path / "killed", *flags, environment=held) as run:
        run.wait_for_step(HALF)
        run.interrupt(signal.SIGKILL)
        assert complete(run).exit_code == -signal.SIGKILL
    resumed = succeeded(tmp_path / "killed", *flags)
    assert "resuming from step" in resumed.output
    assert_same(outcome(resumed.run_dir, STEPS), outcome(straight, STEPS))
    assert exact_metrics(resumed.run_dir, range(1, STEPS + 1)) == exact_metrics(straight, range(1, STEPS + 1))
    _check_what_engines_got(straight)


def _check_what_engines_got(run_dir: RunDir) -> None:
    for version in run_dir.published_weights():
        directory = run_dir.weights_of(version)
        assert kind_of(directory) is (Kind.WEIGHTS if version == STEPS else Kind.ADAPTER)
    # Of a fresh batch, the ratio shows whether the engine computes what the trainer computes.
    lines = read_metrics(run_dir.metrics)
    for line in lines:
        assert 0 < line["mismatch/max_log_ratio"] <= LOG_RATIO_TOLERANCE, line
    base, trained = (load_file(place / "model.safetensors") for place in (MODEL, run_dir.weights_of(STEPS)))
    changes = [float((base[name] - trained[name]).abs().max()) for name in base]
    assert max(changes) > 1e-2, "an adapter that does not matter would show nothing"
