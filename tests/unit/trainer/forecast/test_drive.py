"""Parts of a forecast that need no driving."""

import gc
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import Qwen3Config

from holdfast.config import SftConfig, TrainerConfig
from holdfast.config.resolved import PICKABLE
from holdfast.config.training import TrainedModelConfig, TrainingCommand
from holdfast.errors import HoldfastError
from holdfast.run.forecast import GIB, Collectives, Forecast, Load, Peak, Room, Step
from holdfast.trainer.forecast import drive
from holdfast.trainer.forecast.drive import Planner, _flags, changes, with_layers, with_picks
from holdfast.trainer.forecast.tracker import StepTracker, collective_of
from holdfast.trainer.mesh import Mesh


def test_a_model_has_its_first_layers() -> None:
    config = Qwen3Config(num_hidden_layers=4, layer_types=["full_attention", "sliding_attention"] * 2)
    few = with_layers(config, 2)
    assert (few.num_hidden_layers, few.layer_types) == (2, ["full_attention", "sliding_attention"])
    assert config.num_hidden_layers == 4


def test_ways_out_begin_with_the_cheapest() -> None:
    sft = SftConfig.model_validate({"model": {"name": "x", "logits_chunk_tokens": 1024}, "data": {"name": "x"}})
    flags = [_flags(values, "") for values in changes(sft, Load())]
    assert flags == [
        "--model.activation-checkpointing", "--model.logits-chunk-tokens 256", "--data.micro-batch-size 1",
        "--model.activation-checkpointing --model.logits-chunk-tokens 256 --data.micro-batch-size 1",
        "--optim.moments-dtype bfloat16",
        "--model.activation-checkpointing --model.logits-chunk-tokens 256 --data.micro-batch-size 1 "
        "--optim.moments-dtype bfloat16", "--model.lora",
        "--parallel.num-ranks 2", "--parallel.num-ranks 4", "--parallel.num-ranks 8",
    ]  # fmt: skip
    sft.optim.betas = (0.9, 0.999)
    assert [_flags(values, "") for values in changes(sft, Load())] == [flag for flag in flags if "moments" not in flag]
    rl = TrainerConfig.model_validate({
        "model": {"name": "x", "lora": {}, "activation_checkpointing": True, "logits_chunk_tokens": 256},
        "parallel": {"num_ranks": 2}, "row_tokens": 8192,
    })  # fmt: skip
    found = [_flags(values, "trainer.") for values in changes(rl, Load(seq_len=4096))]
    assert found == ["--trainer.row-tokens 4096", *(f"--trainer.parallel.num-ranks {n}" for n in (4, 8, 16))]
    divided = "--parallel.expert-parallel 2"
    found = [_flags(values, "") for values in changes(rl, Load(seq_len=4096), experts=6)]
    assert found[:3] == ["--row-tokens 4096", divided, f"--row-tokens 4096 {divided}"]
    for refused in (
        {"optim": {"type": "muon"}, "model": {"name": "x"}},
        {"model": {"name": "x", "compile": True}},
        {"parallel": {"num_ranks": 2, "replicas": 2}},
        {"parallel": {"num_ranks": 2, "expert_parallel": 2}},
    ):
        other = TrainerConfig.model_validate({"model": {"name": "x"}, "parallel": {"num_ranks": 2}} | refused)
        assert not [flags for flags in changes(other, Load(), experts=6) if "parallel.expert_parallel" in flags]


_LORA = {"model.lora": {"rank": 16, "alpha": 32.0, "use_rslora": False, "dropout": 0.0, "target_modules": "all-linear"}}


@pytest.mark.parametrize(("card", "only", "init", "picked"), [
    (9.5, PICKABLE, "pretrained", {"model.logits_chunk_tokens": 256}),
    (8, PICKABLE, "pretrained", {"row_tokens": 1024}),
    (6.5, PICKABLE, "pretrained", {"model.logits_chunk_tokens": 256, "row_tokens": 1024}),
    (5.5, PICKABLE, "pretrained", _LORA),
    (5.5, PICKABLE, "random", {}),  # which has nothing to adapt
    (8, ("model.logits_chunk_tokens", "model.lora"), "pretrained", _LORA),  # the user sets row_tokens
    (4, PICKABLE, "pretrained", {}),  # never more ranks
    (8, (), "pretrained", {}),
])  # fmt: skip
def test_the_first_open_change_that_fits_is_picked(card: float, only: tuple[str, ...], init: str, picked: Any) -> None:
    class Planned:
        def forecast(self, config: TrainingCommand, _: Load) -> Forecast:
            assert isinstance(config, TrainerConfig)
            less = (config.row_tokens < 4096) * 3 + (config.model.head_chunk_tokens < 1024)
            size = (5 if config.model.lora else 10 - less) / config.parallel.ranks
            step = Step({"backward": Peak({"moments": int(size * GIB)})}, *[Collectives()] * 3, 0, 0)
            return Forecast("", 1, 1, 1, 1, step)

    model = {"name": "x", "init": init, "activation_checkpointing": True, "logits_chunk_tokens": 1024}
    config = TrainerConfig.model_validate({"model": model, "parallel": {"num_ranks": 1}})
    planner: Any = Planned()
    room = Room(int(card * GIB), open=only)
    found = with_picks(planner, config, Load(), room, planner.forecast(config, Load()))
    assert found.picked == picked and found.unpicked_bytes == 10 * GIB and room.fits(found) is bool(picked)


def test_no_line_goes_through_peaks_of_two_moments() -> None:
    """The peak of 4 layers is that of the logits; from 6 layers on it is that of activations, 2 of each layer."""

    def step(layers: int) -> Step:
        largest = {"logits": 10 * GIB} if 2 * layers < 10 else {"activations": 2 * layers * GIB}
        return Step({"backward": Peak({"parameters": layers * GIB} | largest)}, *[Collectives()] * 3, layers, layers)

    class Planned(Planner):
        def __init__(self) -> None:
            self._kinds, self._depths, self.asked = ["full_attention"] * 20, (4, 6), list[int]()
            self._like: Any = SimpleNamespace(hf_model=None)

        def driven(self, config: TrainingCommand, load: Load, count: int) -> Any:
            self.asked.append(count)
            return step(count), SimpleNamespace(rows=1, row_tokens=1, updates=1)

    planner, config = Planned(), SftConfig.model_validate({"model": {"name": "x"}, "data": {"name": "x"}})
    assert planner.forecast(config, Load()).step == step(20) and planner.asked == [4, 6, 8]


def test_what_is_not_driven_is_named() -> None:
    parallel = {"num_ranks": 2, "cpu_offload": True}
    config = SftConfig.model_validate({"model": {"name": "x"}, "data": {"name": "x"}, "parallel": parallel})
    with pytest.raises(HoldfastError, match=r"parallel\.cpu_offload"):
        object.__new__(Planner).driven(config, Load(), 1)


def test_bytes_alive_have_a_purpose() -> None:
    tracker = StepTracker()
    with tracker.watching():
        layer = nn.Linear(64, 512, bias=False)
        size = tracker.now
        tracker.know(layer, vocabulary=512)
        tracker.begin("forward", 1)
        logits = layer(torch.ones(32, 64))
        tracker.begin("backward", 1)
        logits.sum().backward()
        tracker.retag([layer.weight.grad], "gradients")
        del logits
        gc.collect()
        tracker.begin("optimizer")
    assert size == 64 * 512 * 4 and tracker.peaks["parameters", 0].parts == {"parameters": size}
    assert tracker.peaks["forward", 1].parts == {"parameters": size, "logits": 32 * 512 * 4, "activations": 32 * 64 * 4}
    assert tracker.peaks["optimizer", 0].parts == {"parameters": size, "gradients": size}


def test_sums_of_ranks_are_gradients(mesh: Mesh) -> None:
    tracker, own = StepTracker(), torch.ones(64, 64)
    with tracker.watching():
        tracker.begin("backward", 1)
        summed = torch.empty(64 // mesh.world_size, 64)
        dist.reduce_scatter_tensor(summed, own)
        tracker.begin("optimizer")
    # Not all parts: a thread of gloo may still hold its copy of the input.
    assert tracker.peaks["optimizer", 0].parts["gradients"] == summed.nbytes


def test_logits_of_as_many_tokens_as_hidden_numbers() -> None:
    tracker = StepTracker()
    tracker.know(nn.Linear(64, 512), vocabulary=512, chunk=64)
    with tracker.watching():
        tracker.begin("backward", 1)
        made = torch.ones(64, 512), torch.ones(64, 512, dtype=torch.bfloat16)
    assert tracker.peaks["backward", 1].parts == {"logits": made[0].nbytes, "gradients": made[1].nbytes}


def test_a_model_that_cannot_be_built_has_its_name(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drive, "_ranks", lambda _: nullcontext(mesh))  # this process may have its ranks already
    wrong = Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=3, head_dim=16, num_hidden_layers=1)
    wrong.save_pretrained(tmp_path)
    with pytest.raises(HoldfastError, match=f"model.name = '{tmp_path}'"):
        Planner(TrainedModelConfig(name=str(tmp_path)), is_gpu=True)


def test_collectives_have_a_kind() -> None:
    assert collective_of("c10d._reduce_scatter_base_.default") == "reduce-scatter"
    assert collective_of("_c10d_functional.all_gather_into_tensor.default") == "all-gather"
    assert collective_of("_c10d_functional.wait_tensor.default") is collective_of("aten.add.Tensor") is None
