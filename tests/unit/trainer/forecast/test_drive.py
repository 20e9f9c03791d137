"""Parts of a forecast that need no driving."""

import gc

import pytest
import torch
from torch import nn
from transformers import Qwen3Config

from holdfast.config import SftConfig, TrainerConfig
from holdfast.errors import HoldfastError
from holdfast.run.forecast import Load
from holdfast.trainer.forecast.drive import Planner, _changes, with_layers
from holdfast.trainer.forecast.tracker import StepTracker, collective_of


def test_a_model_has_its_first_layers() -> None:
    config = Qwen3Config(num_hidden_layers=4, layer_types=["full_attention", "sliding_attention"] * 2)
    few = with_layers(config, 2)
    assert (few.num_hidden_layers, few.layer_types) == (2, ["full_attention", "sliding_attention"])
    assert config.num_hidden_layers == 4


def test_ways_out_begin_with_the_cheapest() -> None:
    sft = SftConfig.model_validate({"model": {"name": "x", "logits_chunk_tokens": 1024}, "data": {"name": "x"}})
    flags = [flag for flag, _ in _changes(sft, Load(), "")]
    assert flags == [
        "--model.activation-checkpointing", "--model.logits-chunk-tokens 256", "--data.micro-batch-size 1",
        "--model.activation-checkpointing --model.logits-chunk-tokens 256 --data.micro-batch-size 1", "--model.lora",
        "--parallel.num-ranks 2", "--parallel.num-ranks 4", "--parallel.num-ranks 8",
    ]  # fmt: skip
    rl = TrainerConfig.model_validate({
        "model": {"name": "x", "lora": {}, "activation_checkpointing": True, "logits_chunk_tokens": 256},
        "parallel": {"num_ranks": 2}, "row_tokens": 8192,
    })  # fmt: skip
    found = dict(_changes(rl, Load(seq_len=4096), "trainer."))
    more = [f"--trainer.parallel.num-ranks {n}" for n in (4, 8, 16)]
    assert list(found) == ["--trainer.row-tokens 4096", *more]
    assert found["--trainer.row-tokens 4096"].row_tokens == 4096 and rl.row_tokens == 8192  # type: ignore[attr-defined]
    divided = "--trainer.parallel.expert-parallel 2"
    found = dict(_changes(rl, Load(seq_len=4096), "trainer.", 6))
    assert list(found) == ["--trainer.row-tokens 4096", divided, f"--trainer.row-tokens 4096 {divided}", *more]
    assert found[divided].parallel.expert_parallel == 2
    for refused in (
        {"optim": {"type": "muon"}, "model": {"name": "x"}},
        {"model": {"name": "x", "compile": True}},
        {"parallel": {"num_ranks": 2, "replicas": 2}},
        {"parallel": {"num_ranks": 2, "expert_parallel": 2}},
    ):
        other = TrainerConfig.model_validate({"model": {"name": "x"}, "parallel": {"num_ranks": 2}} | refused)
        assert not [flags for flags, _ in _changes(other, Load(), "", 6) if "expert" in flags]


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
    assert size == 64 * 512 * 4
    assert tracker.peaks["parameters", 0].parts == {"parameters": size}
    assert tracker.peaks["forward", 1].parts == {"parameters": size, "logits": 32 * 512 * 4, "activations": 32 * 64 * 4}
    assert tracker.peaks["optimizer", 0].parts == {"parameters": size, "gradients": size}


def test_collectives_have_a_kind() -> None:
    assert collective_of("c10d._reduce_scatter_base_.default") == "reduce-scatter"
    assert collective_of("_c10d_functional.all_gather_into_tensor.default") == "all-gather"
    assert collective_of("_c10d_functional.wait_tensor.default") is collective_of("aten.add.Tensor") is None
