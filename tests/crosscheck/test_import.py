"""Runs of other programs, taken over by `ckpt import` at step 20, and runs of ours, by `ckpt export`: each time the
program's own continuation is the reference."""

import json
import math
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from transformers import AutoModelForCausalLM

from holdfast.run.checkpoints import TRAINER_DIR
from holdfast.run.metrics import read_metrics
from holdfast.run.run_dir import RunDir
from holdfast.trainer.export import TensorReader
from tests.conftest import ModelFactory
from tests.faults.faulty_calls import read_trail
from tests.forking.commands import Run, shared_commands
from tests.runs.training import PAIRS, write_data

pytestmark = [pytest.mark.trl, pytest.mark.launch]

STEP, LAST, BATCH = 20, 40, 8
SHARED = {
    "data.batch-size": BATCH, "max-steps": LAST, "optim.lr": 1e-3, "optim.schedule": "linear",
    "optim.warmup-steps": 4, "optim.betas": "[0.9,0.999]", "parallel.threads": 1, "seed": 3,
}  # fmt: skip
THEIRS = {
    "max_steps": LAST, "save_steps": STEP, "per_device_train_batch_size": BATCH, "learning_rate": 1e-3,
    "lr_scheduler_type": "linear", "warmup_steps": 4, "seed": 3,
}  # fmt: skip


@dataclass(frozen=True)
class Foreign:
    """A run of another program that ended at step 40, and the settings that make it one of ours."""

    program: str
    directory: Path
    losses: Mapping[int, float]
    settings: Mapping[str, Any]
    resume: Callable[..., dict[int, float]] = dict

    def words(self, output: Path, **changed: Any) -> list[str]:
        settings = {**SHARED, **self.settings, "output-dir": output, **changed}
        flags = (word for key, value in settings.items() for word in (f"--{key}", str(value)))
        return [*flags, "--no-data.shuffle", "--ckpt"]

    def bring(
        self, output: Path, changed: Mapping[str, Any] | None = None, *, source: Path | None = None, fault: str = ""
    ) -> Run:
        argv = ["import", str(source or self.directory), self.program, *self.words(output, **(changed or {}))]
        return shared_commands().start("ckpt", output, argv, fault=fault).wait()

    def check_continuation(self, output: Path) -> None:
        """Continue an imported run, and compare its losses."""
        words = [*self.words(output), "--ckpt.resume-step", str(STEP)]
        log = shared_commands().start(self.program, output, words).succeed().log
        assert "WARNING" not in log and "differs from" not in log, log
        ours = {int(line["step"]): line["loss"] for line in read_metrics(RunDir(output).metrics)}
        assert list(ours) == list(range(STEP + 1, LAST + 1))
        assert ours == pytest.approx({step: self.losses[step] for step in ours}, abs=1e-5)


def rows_of(path: Path, *, count: int) -> list[dict[str, str]]:
    """Keep whole batches in a file of rows, and return them."""
    lines = path.read_text().splitlines()[:count]
    path.write_text("\n".join(lines) + "\n")
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def trained(
    trl_trainers: ModuleType, tiny_model: ModelFactory, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Foreign]:
    """Return a maker of runs of TRL: `sft`, `dpo` or `adapter`."""

    @cache
    def make(kind: str) -> Foreign:
        import peft

        lora = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
        theirs, ours = {
            "sft": ({"weight_decay": 0.1}, {"optim.weight-decay": 0.1}),
            "dpo": ({"beta": 0.2}, {"loss.beta": 0.2}),
            "adapter": ({"peft_config": lora}, {"model.lora.rank": 4, "model.lora.alpha": 8}),
        }[kind]
        model, place = tiny_model(), tmp_path_factory.mktemp("trl")
        program, path = "dpo" if kind == "dpo" else "sft", place / "rows.jsonl"
        rows = rows_of(Path(shutil.copy(PAIRS, path)) if kind == "dpo" else write_data(path), count=5 * BATCH)
        train = partial(trl_trainers.trained, program, model, rows=rows, **THEIRS, **theirs)
        settings = {"model.name": model, "data.name": path, **ours}
        losses = train(output=place)
        state = place / f"checkpoint-{STEP}" / "trainer_state.json"
        state.write_text(state.read_text().replace('"loss":', '"eval_loss": NaN,\n"loss":'))  # as transformers does
        return Foreign(program, state.parent, losses, settings, train)

    return make


@pytest.fixture
def sft(trained: Callable[[str], Foreign]) -> Foreign:
    return trained("sft")


def test_a_run_of_trl_continues_with_its_own_losses(sft: Foreign, tmp_path: Path) -> None:
    log = sft.bring(tmp_path / "run").succeed().log
    assert "taken: AdamW's state: 24 parameters" in log and "taken: step 20" in log, log
    assert "not taken: random generators" in log and "rng_state.pth" in log, log
    sft.check_continuation(tmp_path / "run")


@pytest.mark.parametrize("kind", ["dpo", "adapter"])
def test_pairs_and_adapters_go_on_with_own_losses(kind: str, trained: Callable[[str], Foreign], tmp_path: Path) -> None:
    foreign = trained(kind)
    if kind == "adapter":
        refused = foreign.bring(tmp_path / "run", {"model.lora.alpha": 4})
        assert refused.code == 2 and "--model.lora.rank 4 --model.lora.alpha 8" in refused.log, refused.log
    else:
        refused = foreign.bring(tmp_path / "run", {"model.name": foreign.directory})
        assert refused.code == 2 and "the reference would be the weights of step 20" in refused.log, refused.log
    log = foreign.bring(tmp_path / "run").succeed().log
    assert "taken: AdamW's state:" in log, log
    foreign.check_continuation(tmp_path / "run")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["sft", "dpo", "adapter"])
def test_a_run_of_ours_goes_to_trl_and_comes_back(kind: str, trained: Callable[[str], Foreign], tmp_path: Path) -> None:
    foreign, output = trained(kind), tmp_path / "run"
    words = [*foreign.words(output), "--ckpt.interval", str(STEP)]
    shared_commands().start(foreign.program, output, words).succeed()
    own = TensorReader(RunDir(output).checkpoint(STEP) / TRAINER_DIR)
    for form in ("trainer", "dcp"):
        argv = ["export", str(output), str(STEP), "--format", form, "--to", str(tmp_path / form)]
        exported = shared_commands().start("ckpt", tmp_path / form, argv).wait()
        if (kind, form) == ("adapter", "dcp"):
            assert exported.code == 2 and "takes whole weights" in exported.log, exported.log
            continue
        assert exported.code == 0, exported.log
        foreign.bring(tmp_path / f"of_{form}", source=tmp_path / form).succeed()
        back = TensorReader(RunDir(tmp_path / f"of_{form}").checkpoint(STEP) / TRAINER_DIR)
        assert all(torch.equal(back.read(name), own.read(name)) for name in own.saved)
    theirs = foreign.resume(output=tmp_path / "trl", resume=tmp_path / "trainer")
    ours = {int(line["step"]): line["loss"] for line in read_metrics(RunDir(output).metrics)}
    assert len(ours) == LAST and theirs == pytest.approx(ours, abs=1e-5)
    if kind == "sft":
        model = AutoModelForCausalLM.from_pretrained(foreign.settings["model.name"], dtype="float32")
        optimizer = torch.optim.AdamW(model.parameters())
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        weights, moments = get_state_dict(model, optimizer, options=flat)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        torch_dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
        loaded: dict[str, Any] = {f"model.{name}": one for name, one in state["model"].items()}
        loaded |= {name.replace("state.", "optim.", 1): one for name, one in state["optimizer"].items()}
        assert all(torch.equal(loaded[name], own.read(name)) for name in own.saved)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_two_ranks_of_accelerate_continue_with_their_own_losses(kind: str, sft: Foreign, tmp_path: Path) -> None:
    directory = tmp_path / kind
    directory.mkdir()
    rows, model = Path(sft.settings["data.name"]), Path(sft.settings["model.name"])
    losses = shared_commands().two_ranks("tests.ranks.accelerated", directory, model, rows)[0]
    foreign = Foreign("sft", directory / f"step_{STEP}", losses, {**sft.settings, "optim.weight-decay": 0})
    log = foreign.bring(tmp_path / "run").succeed().log
    assert "random_states_1.pkl" in log, log
    foreign.check_continuation(tmp_path / "run")
    shutil.rmtree(foreign.directory / "optimizer_0", ignore_errors=True)
    (foreign.directory / "optimizer.bin").unlink(missing_ok=True)
    refused = foreign.bring(tmp_path / "other")
    assert refused.code == 2 and "the weights alone" in refused.log, refused.log


def test_an_import_that_is_killed_leaves_nothing_and_works_again(sft: Foreign, tmp_path: Path) -> None:
    def fault(output: Path, **settings: Any) -> str:
        words = str(output), str(output.with_suffix(".trail"))
        return f"from tests.faults.faulty_calls import install; install(*{words!r}, **{settings!r})"

    sft.bring(tmp_path / "whole", fault=fault(tmp_path / "whole")).succeed()
    calls = read_trail(tmp_path / "whole.trail")
    commit = next(call.number for call in calls if call.name == "rename" and call.target.endswith(f"step_{STEP}"))
    output = tmp_path / "run"
    for number in (2, commit // 2, commit - 1, commit):
        (tmp_path / "run.trail").unlink(missing_ok=True)
        assert sft.bring(output, fault=fault(output, kill_at=number)).code == -signal.SIGKILL, number
        assert RunDir(output).committed_steps() == []
    sft.bring(output).succeed()
    assert RunDir(output).committed_steps() == [STEP]
    again = sft.bring(output)
    assert again.code == 2 and "holds a run already (checkpoints: 20)" in again.log, again.log


def drop(name: str) -> Any:
    return lambda path: (path / name).unlink()


def cut(name: str) -> Any:
    def act(path: Path) -> None:
        with open(path / name, "r+b") as file:
            file.truncate((path / name).stat().st_size // 2)

    return act


def with_state(change: Any) -> Any:
    def act(path: Path) -> None:
        saved = torch.load(path / "optimizer.pt")
        change(saved)
        torch.save(saved, path / "optimizer.pt")

    return act


def as_adafactor(saved: dict[str, Any]) -> None:
    saved["state"] = {number: {"step": 20, "RMS": torch.ones(())} for number in saved["state"]}


REFUSED: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "no optimizer": (drop("optimizer.pt"), {}, ["has no optimizer.pt", "--ckpt.init-from"]),
    "half written": (drop("trainer_state.json"), {}, ["has no trainer_state.json", "not whole"]),
    "cut optimizer": (cut("optimizer.pt"), {}, ["optimizer.pt cannot be read", "may not be whole"]),
    "code": (with_state(lambda saved: saved.update(hook=Path("/"))), {}, ["something else than tensors"]),
    "adafactor": (with_state(as_adafactor), {}, ["keeps RMS, step", "it is another optimizer"]),
    "radam": (with_state(lambda saved: [one.pop("amsgrad") for one in saved["param_groups"]]), {}, ["torch's AdamW"]),
    "NaN": (with_state(lambda saved: saved["state"][3]["exp_avg"].fill_(math.nan)), {}, ["has NaN"]),
    "squares": (with_state(lambda saved: saved["state"][3]["exp_avg_sq"].fill_(-1)), {}, ["damaged", "exp_avg_sq of"]),
    "steps": (with_state(lambda saved: saved["state"][3]["step"].fill_(21)), {}, ["is damaged", "from 0 to 20"]),
    "shapes": (with_state(lambda saved: saved["state"][0].update(exp_avg=torch.zeros(3))), {}, ["is (3,) there"]),
    "rate": (None, {"optim.lr": 2e-3}, ["learning rate of step 21", "its peak of optim.lr is 0.001"]),
    "schedule": (None, {"optim.schedule": "cosine"}, ["the learning rate of step"]),
    "end": (None, {"max-steps": 60}, ["the schedule ends at step 40 there, 60 here: --optim.schedule-steps 40"]),
    "betas": (None, {"optim.betas": "[0.9,0.95]"}, ["--optim.betas '[0.9, 0.999]'"]),
    "decay": (None, {"optim.weight-decay": 0}, ["--optim.weight-decay 0.1"]),
    "muon": (None, {"optim.type": "muon"}, ["only states of AdamW"]),
}  # fmt: skip


def test_a_run_that_has_ended_is_taken_further(sft: Foreign, tmp_path: Path) -> None:
    last = sft.directory.with_name(f"checkpoint-{LAST}")
    log = sft.bring(tmp_path / "run", {"max-steps": 60, "optim.schedule-steps": LAST}, source=last).succeed().log
    assert "not taken: the learning rate of step 41: 0 there, after the schedule, 2.77778e-05 here" in log, log


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_and_leaves_nothing(case: str, sft: Foreign, tmp_path: Path) -> None:
    change, settings, words = REFUSED[case]
    source = shutil.copytree(sft.directory, tmp_path / "source")
    if change is not None:
        change(source)
    run = sft.bring(tmp_path / "run", settings, source=source)
    assert run.code == 2 and "Traceback" not in run.log, run.log
    assert all(word in run.log for word in words), run.log
    assert RunDir(tmp_path / "run").entries() == []


def test_weights_in_bfloat16_yield_to_the_optimizers_in_float32(sft: Foreign, tmp_path: Path) -> None:
    source = shutil.copytree(sft.directory, tmp_path / "source")
    weights, saved = load_file(source / "model.safetensors"), torch.load(source / "optimizer.pt")
    order = [group["params"] for group in saved["param_groups"]]
    for numbers, is_vector in zip(order, (False, True), strict=True):  # as transformers groups them
        names = [name for name in AutoModelForCausalLM.from_pretrained(source).state_dict() if name in weights]
        for number, name in zip(numbers, [one for one in names if (weights[one].ndim < 2) is is_vector], strict=True):
            saved["state"][number]["master_param"] = weights[name].clone()
    torch.save(saved, source / "optimizer.pt")
    save_file({name: one.bfloat16() for name, one in weights.items()}, source / "model.safetensors")
    assert "widened" not in sft.bring(tmp_path / "run", source=source).succeed().log
    sft.check_continuation(tmp_path / "run")


def test_another_model_is_refused(sft: Foreign, tiny_model: ModelFactory, tmp_path: Path) -> None:
    run = sft.bring(tmp_path / "run", {"model.name": tiny_model(num_hidden_layers=3)})
    assert run.code == 2 and "does not fit this model" in run.log, run.log
