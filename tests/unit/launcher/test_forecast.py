"""The plan of a dry run, given the needs of a step."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from holdfast.config import RlConfig, SftConfig
from holdfast.config.inference import InferenceConfig
from holdfast.config.resolved import PICKABLE
from holdfast.config.rl import hand_down_shared
from holdfast.config.training import LoraConfig, ParallelConfig, TrainingCommand
from holdfast.errors import ConfigError, HoldfastError
from holdfast.launcher import devices, forecast, launch, preflight
from holdfast.launcher.devices import Placement, keep_picks, settings_of_run
from holdfast.launcher.forecast import PlannedEngine, fit_gpu, forecast_alone, forecast_beside, tell_forecast
from holdfast.launcher.launch import launch_training
from holdfast.launcher.resume.attempt import Attempt, write_config
from holdfast.process.gpus import Gpu
from holdfast.run import forecast as run_forecast
from holdfast.run.forecast import GIB, Collectives, Forecast, Load, NoForecast, Peak, Room, Step, crosses, depths
from holdfast.run.run_dir import RunDir

Say = Callable[..., list[TrainingCommand]]
_ROW = Collectives({"all-gather": (4, 8 * GIB)})


def _found(**parts: float) -> Forecast:
    sizes = {tag: int(size * GIB) for tag, size in parts.items()}
    peaks = {"backward 2": Peak(sizes), "clipping": Peak({"moments": 1})}
    step = Step(peaks, _ROW, _ROW, Collectives({"all-reduce": (1, 8)}), 8 * 10**9, 8 * 10**9, 16 * 10**9, 147_456)
    return Forecast("Qwen3ForCausalLM", 8, 3, 8192, 2, step, {"--model.lora": 9 * GIB})


@pytest.fixture
def config(tmp_path: Path) -> SftConfig:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    parts = {"model": {"name": str(tmp_path)}, "parallel": {"card_gb": 24}, "data": {"name": "x"}}
    return SftConfig.model_validate(parts | {"dry_run": True})


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Return what sets the needs of a step, and the size of the model; it returns the configs that were asked for."""

    def say(found: Forecast | NoForecast, num_parameters: int | None = None) -> list[TrainingCommand]:
        asked: list[TrainingCommand] = []
        monkeypatch.setattr(forecast, "_driven", lambda config, *_: asked.append(config) or found)
        if num_parameters is not None:
            monkeypatch.setattr(forecast, "count_parameters", lambda _: num_parameters)
        return asked

    return say


def test_a_step_that_fits(config: SftConfig, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    asked = say(_found(parameters=4, logits=2.5))
    assert launch_training(config) == 0  # neither data nor tokenizer are there
    assert asked[0].model.dtype == "bfloat16"  # as on a GPU, which is not here
    told = capsys.readouterr().out
    assert told.startswith("planning a step")  # which takes long
    model = "8 ranks of Qwen3ForCausalLM, 8B parameters, bfloat16"
    assert f"{model}; 3 rows of up to 8,192 tokens on each, 2 updates" in told
    assert "the backward pass, on each rank: 6.50 GiB (parameters 4.00, logits 2.50)" in told
    assert "a step 24 all-gathers (51.5 GB), 2 all-reduces (16 B)" in told
    assert "fits: 6.5 GiB and 2 GiB for CUDA and the allocator, of 22.4 GiB" in told and "assumed" not in told
    config.parallel = ParallelConfig(num_ranks=8, expert_parallel=8, card_gb=24)
    forecast_alone(config)
    assert "  assumed: all experts get equally many tokens;" in capsys.readouterr().out
    say(_found(parameters=0.004, logits=0.004))
    forecast_alone(config)
    assert "the backward pass, on each rank: 0.01 GiB\n" in capsys.readouterr().out, "no part is large enough to name"


def test_a_step_that_does_not_fit(config: SftConfig, say: Say) -> None:
    say(_found(parameters=12, moments=12, logits=2))
    told = r"(?s)first that does not fit: moments \(12.00 GiB\).*--model.lora: 9.0 GiB.*calculated: --parallel.cpu-off"
    with pytest.raises(ConfigError, match=told):
        forecast_alone(config)


@pytest.mark.parametrize(("found", "told"), [
    (_found(parameters=8), "  fits: 8.0 GiB and 2 GiB for CUDA"),
    (_found(parameters=30), r"warning: the step does not fit the GPU.* --model.lora: 9.0 GiB.* The run goes on."),
    (HoldfastError("the check was killed by SIGINT. Give the command again"), "plan: none: .* by SIGINT\n$"),
])  # fmt: skip
def test_a_run_that_starts(
    found: Any, told: str, config: SftConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The plan of a run on GPUs comes meanwhile, and stops nothing."""
    monkeypatch.setattr(forecast, "_driven", Mock(side_effect=[found]))
    gpu = Placement((Gpu("0", num_bytes=24 * GIB),), ())
    places = {"check_training": Mock(), "settle_length": Mock(), "summary": Mock(return_value="")}
    for name, stands_in in places.items():
        monkeypatch.setattr(preflight, name, stands_in)
    monkeypatch.setattr(devices, "place_training", Mock(return_value=gpu))
    monkeypatch.setattr(devices, "choose_training", Mock(return_value={}))
    monkeypatch.setattr(launch, "watch", Mock(return_value=7))
    config.dry_run, config.parallel.card_gb, config.output_dir = False, None, tmp_path / "run"
    assert launch_training(config) == 7
    for thread in threading.enumerate():
        if thread.name == "plan":
            thread.join()
    assert re.search(told, capsys.readouterr().out, re.DOTALL)


def test_an_unknown_gpu(config: SftConfig, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    for size, told in ((12, "fits GPUs of 24, 48, 80 GB"), (60, "fits GPUs of 80 GB"), (90, "fits no GPU of 80")):
        found = _found(parameters=size)
        found.rows = 1
        say(found)
        tell_forecast(config, Load(), None)
        said = capsys.readouterr().out
        assert told in said and "1 row of up" in said


@pytest.mark.parametrize(("shares", "card", "refusal"), [
    (False, 24, ""),
    (False, 16, r"the engine does not fit: 14.9 GiB of weights.* first that does not fit: the weights"),
    (True, 80, ""),
    (True, 40, r"the engine does not fit"),  # its share, not all of the GPU
    (True, 16, r"the step does not fit the GPU.*GiB for the engine"),
])  # fmt: skip
def test_an_engine_beside(shares: bool, card: float, refusal: str, config: SftConfig, say: Say) -> None:
    model = {"name": "x", "dtype": "bfloat16", "max_len": 4096}
    engine = {"gpu_memory_utilization": 0.4 if shares else 0.9}
    inference = InferenceConfig.model_validate({"model": model, "engine": engine})
    say(_found(parameters=8))
    if not refusal:
        tell_forecast(config, Load(), card * 1e9, engine=PlannedEngine(inference, shares))
        return
    with pytest.raises(ConfigError, match=f"(?s){refusal}"):
        tell_forecast(config, Load(), card * 1e9, engine=PlannedEngine(inference, shares))


def test_an_engine_is_split_by_its_heads(config: SftConfig, say: Say) -> None:
    found = _found(parameters=8)
    found.step.heads = (32, 4)
    for ranks, parts in ((2, 2), (8, 4)):  # each GPU holds at least one head of keys
        assert run_forecast.EngineSize(2, ranks, 100).needs(found.step) == (16e9 / ranks, 147_456 * 100 / parts)
    engine = {"tensor_parallel_size": 3, "gpu_memory_utilization": 0.9}
    inference = InferenceConfig.model_validate({"model": {"name": "x", "dtype": "bfloat16"}, "engine": engine})
    say(found)
    with pytest.raises(ConfigError, match=r"size 3 cannot divide the 32 .*, with 4 .*Allowed: 1, 2, 4, 8, 16, 32"):
        tell_forecast(config, Load(), 80e9, engine=PlannedEngine(inference, shares=False))


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RlConfig, tuple[str, ...] | None]]:
    """Return what fits a run into a GPU; it returns its settings, and which the plan may pick; None: without a plan."""

    def fit(found: Forecast | NoForecast, card: float = 40, clean: bool = False, **given: Any) -> Any:
        asked: list[Room] = []
        monkeypatch.setattr(forecast, "_driven", lambda _config, _load, room, _prefix: asked.append(room) or found)
        given |= {"output_dir": tmp_path / "run", "model": {"name": "x/y"}, "clean": clean}
        given["orchestrator"] = {"environments": [{"id": "reverse_text"}]}
        config = hand_down_shared(RlConfig.model_validate(given))
        before = settings_of_run(config.trainer, clean=clean)
        keep_picks(config.trainer, before)
        fit_gpu(config, card * 1e9 or None, before)
        return config, asked[0].open if asked else None

    return fit


_PICKED = {"row_tokens": 1024, "model.lora": LoraConfig().model_dump()}


def test_trainer_and_engine_fit_their_only_gpu(fit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fits, picks = _found(moments=8), _found(moments=8)
    picks.picked, picks.unpicked_bytes = _PICKED, 20 * GIB
    share = "inference.engine.gpu_memory_utilization ="
    # What a step leaves, at most 0.9, and what the engine needs, by its weights or by its longest session.
    for card, max_len, gets in ((40, 2048, 0.73), (200, 2048, 0.9), (28.3, 2048, 0.62), (200, 1_140_000, 0.93)):
        config, may_pick = fit(fits, card, inference={"model": {"max_len": max_len}})
        assert config.inference.engine.gpu_memory_utilization == gets and may_pick == PICKABLE
    assert f"{share} 0.73, which a step leaves: it takes 8.0 GiB and 2 GiB for CUDA" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"(?s)allocator and 16.3 GiB for the engine.*--model.lora: 9.0 GiB"):
        fit(fits, 28.2)
    assert fit(fits, inference={"engine": {"gpu_memory_utilization": 0.3}})[1] is None
    assert fit(fits, inference={"engine": {"args": {"gpu-memory-utilization": 0.3}}})[1] is None
    for found, card, why in ((NoForecast("trainer.critic"), 40, "trainer.critic"), (fits, 0, "the GPU does not say")):
        assert fit(found, card)[0].inference.engine.gpu_memory_utilization is None
        assert f"{share} 0.4: no plan could be made: {why}" in capsys.readouterr().out
    assert "row_tokens" not in fit(fits, trainer={"row_tokens": 4096})[1]
    assert "model.lora" not in fit(fits, ckpt={"init_from": "weights"})[1]
    trainer = fit(picks)[0].trainer
    assert trainer.picked == [*_PICKED] and trainer.row_tokens == 1024 and trainer.model.lora == LoraConfig()
    told = "picked so that a step fits beside the engine: 8.0 GiB in place of 20.0 GiB\ntrainer.model.lora.rank = 16, "
    assert f"trainer.row_tokens = 1024, {told}" in capsys.readouterr().out
    write_config(Attempt(RunDir(tmp_path / "run"), 1, None), "trainer", trainer, dry_run=False)
    assert fit(fits, 200)[1] == PICKABLE[:2]  # nothing is trained yet
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    kept, may_pick = fit(fits, 200)
    assert kept.trainer == trainer and may_pick == () and kept.inference.engine.gpu_memory_utilization == 0.9
    assert "model.lora.rank = 16, kept from the run, which picked it" in capsys.readouterr().out
    assert fit(fits, trainer={"row_tokens": 2048})[0].trainer.row_tokens == 2048
    assert fit(fits, clean=True)[0].trainer.picked == []


def test_what_cannot_be_driven_is_named(config: SftConfig, say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    say(NoForecast("trainer.critic"))
    assert forecast_alone(config) == 0
    assert capsys.readouterr().out.endswith("cannot be driven without numbers: trainer.critic\n")
    config.dry_run = False
    with pytest.raises(ConfigError, match="card_gb is for a plan without a run: add --dry-run"):
        launch_training(config)


@pytest.mark.parametrize(("kinds", "found"), [
    ("a" * 36, (4, 6)),
    ("a" * 6, None),
    ("b" + "a" * 30, (4, 6)),  # the first layer of a mixture of experts
    ("aaaaab" * 4 + "aa", (8, 14)),  # sliding windows
    ("abcdefghijkl", None),
])  # fmt: skip
def test_layers_follow_from_a_whole_pattern_of_them(kinds: str, found: tuple[int, int] | None) -> None:
    assert depths(kinds) == found


def test_layers_are_on_a_line() -> None:
    def step(layers: int) -> Step:
        row = Collectives({"all-gather": (2 * layers + 2, 100 * layers)})
        peaks = {"clipping": Peak({"moments": 8 * layers + 3})}
        return Step(peaks, row, row, Collectives(), 4 * layers, layers, 0, layers)

    assert run_forecast.extended(step(4), step(6), (4, 6), 36) == step(36)
    assert not crosses(step(4), step(6)) and crosses(_found(logits=2).step, _found(gradients=3).step)


@pytest.mark.parametrize(("parameters", "card", "told"), [
    (10**6, None, "no GPU is known here"), (10**8, None, "plan: 8 ranks"), (1, 8e10, "plan: 8 ranks"),
])  # fmt: skip
def test_a_small_model_without_a_gpu_takes_no_time(
    parameters: int, card: float | None, told: str, config: SftConfig, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    say(_found(parameters=8), parameters)
    forecast_beside(config, card)
    assert told in capsys.readouterr().out
    config.parallel.device = "cpu"
    forecast_beside(config, None)
    assert not capsys.readouterr().out  # `memory:` is all
