"""Who gets which GPUs, on machines with none, one, two and eight, and what commands there say and refuse."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli

from holdfast.config import InferenceConfig, RlConfig, TrainerConfig
from holdfast.config.training import ParallelConfig
from holdfast.errors import ConfigError
from holdfast.launcher.cluster.cluster import requests_of
from holdfast.launcher.devices import Machine, Placement, inference_gpus, place_rl, place_training, with_engines
from holdfast.launcher.placement import _starts_inference
from holdfast.launcher.resume.attempt import Attempt, write_config
from holdfast.process.gpus import Gpu, Inventory, TorchBuild
from holdfast.run.run_dir import RunDir
from tests.builders.nvml import loading
from tests.builders.nvml import machine as nvml_machine
from tests.conftest import ROOT, ModelFactory
from tests.forking.commands import Run, shared_commands

TORCH = TorchBuild("2.13.0+cu130", "13.0")


def machine(count: int, *, first: int = 0, engine: Any = "cuda") -> Machine:
    """Return a machine with so many GPUs, whose numbers begin at `first`."""
    gpus = tuple(Gpu(str(number)) for number in range(first, first + count))
    return Machine(Inventory(gpus, "580.65.06", (13, 0)), TORCH, engine)


def placed(settings: dict[str, Any], machine: Machine, *, starts_inference: bool = True) -> Placement:
    config = with_engines(RlConfig.model_validate(settings), machine)
    return place_rl(config, machine, starts_inference=starts_inference)


def names(placement: Placement) -> tuple[list[str], list[list[str]]]:
    return [gpu.name for gpu in placement.trainer], [[gpu.name for gpu in engine] for engine in placement.engines]


def refusal(settings: dict[str, Any], machine: Machine) -> str:
    with pytest.raises(ConfigError) as raised:
        placed(settings, machine)
    assert raised.value.exit_code == 2
    return str(raised.value)


def ranks(count: int) -> dict[str, Any]:
    return {"trainer": {"parallel": {"num_ranks": count}}}


def tensor_parallel(size: int, **inference: Any) -> dict[str, Any]:
    return {"inference": {"engine": {"tensor_parallel_size": size}, **inference}}


def test_without_gpus_all_is_on_the_cpu() -> None:
    placement = placed({}, machine(0, engine="cpu"))
    assert placement == Placement() and placement.trainer_device == "cpu" and not placement.shares
    assert placement.environment(()) == {} and placed({"share_gpus": True}, machine(0, engine="cpu")) == Placement()
    assert "build for GPUs, and there is no NVIDIA GPU here" in refusal({}, machine(0))
    on_gpu = {"trainer": {"parallel": {"device": "cuda"}}}
    assert "parallel.device = 'cuda', and there is no NVIDIA GPU here" in refusal(on_gpu, machine(0, engine="cpu"))


def test_the_only_gpu_is_shared_unless_that_is_refused() -> None:
    said = refusal({"share_gpus": False}, machine(1))
    assert "the run needs 1 for the engines and at least 1 for the trainer, and there is 1 GPU" in said
    assert "leave share_gpus = false out, and they share it" in said
    for share in ({}, {"share_gpus": True}):
        shared = placed(share, machine(1))
        assert names(shared) == (["0"], [["0"]]) and shared.shares and shared.is_one_gpu
        too_few = refusal({**share, **tensor_parallel(2)}, machine(1))
        assert "needs 2 for the engines" in too_few and "there is 1 GPU: lower --inference.engines" in too_few
    # One that does not share: with engines elsewhere, on the CPU, or a trainer there.
    assert names(placed({}, machine(1, engine="cpu"), starts_inference=False)) == (["0"], [])
    assert "To sample on the CPU all the same: --inference.engine.device cpu" in refusal({}, machine(1, engine="cpu"))
    engine_on_cpu: dict[str, Any] = {"inference": {"engine": {"device": "cpu"}}}
    assert names(placed(engine_on_cpu, machine(1, engine="cpu"))) == (["0"], [])
    said = refusal(engine_on_cpu, machine(1))
    assert "inference.engine.device = 'cpu', and the installed vLLM is its build for GPUs" in said
    on_cpu = placed({"trainer": {"parallel": {"device": "cpu"}}}, machine(1))
    assert names(on_cpu) == ([], [["0"]]) and on_cpu.trainer_device == "cpu"
    assert on_cpu.environment(on_cpu.trainer)["CUDA_VISIBLE_DEVICES"] == ""


def test_nccl_is_not_asked_to_send_to_the_gpu_that_sends() -> None:
    collective: dict[str, Any] = {"weights": {"transport": "collective"}}
    of_trainer: dict[str, Any] = {"trainer": collective}
    for settings, count in ((collective, 1), (of_trainer, 1), ({**collective, "share_gpus": True}, 2)):
        assert "by NCCL, which takes a GPU only once, and an engine is on that GPU" in refusal(settings, machine(count))
    assert names(placed(collective, machine(2))) == (["0"], [["1"]])
    apart = {**collective, "share_gpus": True, "inference": {"engines": 1}}
    assert names(placed(apart, machine(2))) == (["0", "1"], [["1"]])
    assert placed(collective, machine(0, engine="cpu")) == Placement()


def test_two_gpus_are_one_for_each() -> None:
    placement = placed({}, machine(2))
    assert names(placement) == (["0"], [["1"]]) and not placement.shares and not placement.is_one_gpu
    assert placement.environment(placement.trainer) == {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    said = refusal(tensor_parallel(2), machine(2))
    assert "needs 2 for the engines and at least 1 for the trainer, and there are 2 GPUs" in said
    assert names(placed({"share_gpus": True}, machine(2))) == (["0", "1"], [["0"], ["1"]])
    assert names(placed({"share_gpus": True, **ranks(1), **tensor_parallel(2)}, machine(2))) == (["0"], [["0", "1"]])


def test_eight_gpus_are_divided_as_told() -> None:
    eight = machine(8)
    assert names(placed({**ranks(4), **tensor_parallel(4)}, eight)) == (list("0123"), [list("4567")])
    # Half for each, and neighbours for an engine, in twos that begin at even numbers.
    assert names(placed({}, eight)) == (list("0123"), [["4"], ["5"], ["6"], ["7"]])
    assert names(placed(tensor_parallel(2), eight)) == (list("0123"), [["4", "5"], ["6", "7"]])
    assert names(placed(tensor_parallel(2, engines=1), eight)) == (list("012345"), [list("67")])
    assert names(placed({**ranks(3), **tensor_parallel(2)}, eight)) == (list("012"), [["4", "5"], ["6", "7"]])
    assert names(placed({**ranks(2), **tensor_parallel(4)}, eight)) == (["0", "1"], [list("4567")])
    on_cpu = {"trainer": {"parallel": {"device": "cpu"}}, **tensor_parallel(4)}
    assert names(placed(on_cpu, eight)) == ([], [list("0123"), list("4567")])
    named = {"orchestrator": {"client": {"urls": ["http://there:1"]}}}
    assert with_engines(RlConfig.model_validate(named), eight).inference.engines == 1
    wide = tensor_parallel(2)
    wide["inference"]["engine"]["args"] = {"pipeline_parallel_size": 2, "seed": 1}
    assert names(placed(wide, eight)) == (list("0123"), [list("4567")])
    on_a_cluster = requests_of(RlConfig.model_validate({**ranks(2), **wide}), on_gpus=True, starts_inference=True)
    assert [need.gpus for need in on_a_cluster] == [2, 4, 0]
    # By the names that CUDA_VISIBLE_DEVICES has, whatever they are.
    placement = placed(ranks(2), machine(4, first=4))
    assert names(placement) == (["4", "5"], [["6"], ["7"]])
    assert placement.environment(placement.engines[0])["CUDA_VISIBLE_DEVICES"] == "6"


@pytest.mark.parametrize(("settings", "words"), [
    (ranks(8), "needs 1 for the engines and 8 for the trainer, and there are 8 GPUs: lower"),
    ({**ranks(2), **tensor_parallel(1, engines=7)}, "needs 7 for the engines and 2 for the trainer"),
    ({**ranks(9), "share_gpus": True}, "needs 8 for the engines and 9 for the trainer"),
    (tensor_parallel(1, engines=9), "needs 9 for the engines and at least 1"),
    ({"trainer": {"parallel": {"device": "cpu"}}, **tensor_parallel(9)}, "needs 9 for the engines and 0 for the"),
])  # fmt: skip
def test_what_does_not_fit_on_eight_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        placed(settings, machine(8))


def test_a_training_program_has_the_machine_for_itself() -> None:
    assert len(place_training(ParallelConfig(), machine(8)).trainer) == 8
    assert names(place_training(ParallelConfig(num_ranks=2), machine(8))) == (["0", "1"], [])
    assert place_training(ParallelConfig(num_ranks=4), machine(0)) == Placement()
    assert place_training(ParallelConfig(device="cpu"), machine(8)) == Placement(hides_gpus=True)
    with pytest.raises(ConfigError, match="parallel.num_ranks = 4, one for each GPU, and there are 2 GPUs"):
        place_training(ParallelConfig(num_ranks=4), machine(2))
    too_old = Machine(Inventory((Gpu("0"),), "570.86", (12, 8)), TORCH, "cuda")
    with pytest.raises(ConfigError, match=r"driver 570.86 runs CUDA up to 12.8.* with --parallel.device cpu"):
        place_training(ParallelConfig(), too_old)
    assert place_training(ParallelConfig(device="cpu"), too_old).trainer == ()


def test_more_processes_or_threads_than_the_cores_can_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.launcher.devices.available_cores", lambda: 2)
    on_cpu, says = machine(0, engine="cpu"), ": at most 32 are allowed on this CPU, 16 for each of the 2 cores"
    for key in ("num_ranks", "threads"):
        with pytest.raises(ConfigError, match=f"parallel.{key} = 33{says}"):
            place_training(ParallelConfig.model_validate({key: 33}), on_cpu)
        assert f"trainer.parallel.{key} = 100000{says}" in refusal({"trainer": {"parallel": {key: 100_000}}}, on_cpu)
    with pytest.raises(ConfigError, match=f"engine.threads = 33{says}"):
        inference_gpus(InferenceConfig.model_validate({"engine": {"threads": 33}}), on_cpu)
    for key, inference in (("engines", {"engines": 33}), ("engine.threads", {"engine": {"threads": 33}})):
        assert f"inference.{key} = 33{says}" in refusal({"inference": inference}, on_cpu)
    assert placed({**ranks(32), "inference": {"engines": 32}}, on_cpu) == Placement()
    assert len(place_training(ParallelConfig(num_ranks=33), machine(64)).trainer) == 33


def test_an_engine_by_itself_gets_the_first_ones() -> None:
    split = InferenceConfig.model_validate({"engine": {"tensor_parallel_size": 2}})
    assert [gpu.name for gpu in inference_gpus(split, machine(8))] == ["0", "1"]
    with pytest.raises(ConfigError, match=r"GPU 0,1,2,.* .*To sample on the CPU all the same: --engine.device cpu"):
        inference_gpus(split, machine(8, engine="cpu"))
    split.engine.device = "cpu"
    assert inference_gpus(split, machine(8, engine="cpu")) == ()
    split.engine.device = "auto"
    with pytest.raises(ConfigError, match=r"split over 2 GPUs \(engine.tensor_parallel_size\), and there is 1 GPU"):
        inference_gpus(split, machine(1))
    with pytest.raises(ConfigError, match="build for GPUs, and there is no NVIDIA GPU here"):
        inference_gpus(split, machine(0))


SFT = ("@", str(ROOT / "configs/reverse_text/sft.toml"))
RL = ("@", str(ROOT / "configs/reverse_text/rl.toml"))
# The GPU build of vLLM, as far as the launcher looks.
GPU_VLLM = """
from holdfast.process import gpus

def version(name):
    if name != "vllm":
        raise gpus.PackageNotFoundError(name)
    return "0.32.0"

gpus.version = version
"""


def started(program: str, output: Path, *flags: str, gpus: int, gb: float = 0, fault: str = "") -> Run:
    """Run a command to its end on a machine with so many GPUs; `gb`: the memory of each, unknown if 0."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    argv = ["--output-dir", str(output), *flags]
    environment |= nvml_machine(gpus) | {"MADE_UP_GB": str(gb)}
    return shared_commands().start(program, output, argv, environment=environment, fault=loading() + fault).wait()


def resolved(output: Path, name: str) -> dict[str, Any]:
    return tomli.loads((output / "configs" / "dry_run" / f"{name}.toml").read_text())


@pytest.mark.launch
@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_trainer_takes_every_gpu_and_the_settings_for_them(count: int, tmp_path: Path) -> None:
    run = started("sft", tmp_path / "run", *SFT, "--dry-run", gpus=count)
    assert run.code == 0, run.log
    names = {1: "0", 2: "0,1", 8: "0,1,2,3,4,5,6,7"}[count]
    assert f"trainer on GPU {names} ({count} x NVIDIA H100 80GB HBM3); set by the device: " in run.log
    assert "dtype = bfloat16, activation_checkpointing = true, logits_chunk_tokens = 1024" in run.log
    row = next(line for line in run.log.splitlines() if line.startswith("trainer  "))
    assert row.split()[1:4] == [os.uname().nodename, "GPU", names]
    assert row.split()[4] == str(count) and row.split()[-1] == "bfloat16"
    config = resolved(tmp_path / "run", "sft")
    assert config["parallel"]["num_ranks"] == count and config["parallel"]["device"] == "cuda"
    assert config["model"]["dtype"] == "bfloat16"


@pytest.mark.launch
def test_what_is_set_stays_as_it_is(tmp_path: Path) -> None:
    flags = ("--model.dtype", "float32", "--parallel.num-ranks", "1", "--no-model.activation-checkpointing")
    run = started("sft", tmp_path / "run", *SFT, "--dry-run", *flags, gpus=2)
    assert "set by the device: device = cuda, logits_chunk_tokens = 1024\n" in run.log
    cpu = started("sft", tmp_path / "cpu", *SFT, "--dry-run", "--parallel.device", "cpu", gpus=2)
    assert "trainer on the CPU; set by the device: num_ranks = 1, dtype = float32" in cpu.log


@pytest.mark.launch
def test_trainer_and_engine_get_gpus_of_their_own(tmp_path: Path) -> None:
    flags = ("--dry-run", "--trainer.parallel.num-ranks", "4", "--inference.engine.tensor-parallel-size", "4")
    run = started("rl", tmp_path / "run", *RL, *flags, gpus=8, fault=GPU_VLLM)
    assert run.code == 0, run.log
    assert "trainer on GPU 0,1,2,3 (4 x NVIDIA H100 80GB HBM3), engine on GPU 4,5,6,7 (4 x NVIDIA" in run.log
    halves = started("rl", tmp_path / "halves", *RL, "--dry-run", gpus=4, fault=GPU_VLLM)
    rows = [line.split()[2:4] for line in halves.log.splitlines() if line.startswith("inference_")]
    assert rows == [["GPU", "2"], ["GPU", "3"]], halves.log
    assert len(resolved(tmp_path / "halves", "orchestrator")["client"]["urls"]) == 2
    rows = [line.split() for line in run.log.splitlines() if line.startswith(("trainer ", "inference "))]
    assert [row[2:4] for row in rows[1:]] == [["GPU", "0,1,2,3"], ["GPU", "4,5,6,7"]] and rows[-1][-1] == "bfloat16"
    engine = resolved(tmp_path / "run", "inference")
    assert engine["engine"]["eager"] is False and engine["engine"]["gpu_memory_utilization"] == 0.9
    assert "threads" not in engine["engine"]  # what vLLM takes
    trainer = resolved(tmp_path / "run", "trainer")
    assert trainer["sampler_dtype"] == trainer["model"]["dtype"] == "bfloat16"


@pytest.mark.launch
def test_a_gpu_that_both_share_is_shared_by_its_memory(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples/reverse_text/model", model := tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | {"hidden_size": 512, "intermediate_size": 8192}
    (model / "config.json").write_text(json.dumps(config))
    flags = (*RL, "--dry-run", "--model.name", str(model), "--trainer.model.init", "random")
    run = started("rl", tmp_path / "run", *flags, gpus=1, gb=4.2, fault=GPU_VLLM)
    assert run.code == 0, run.log
    assert resolved(tmp_path / "run", "inference")["engine"]["gpu_memory_utilization"] == 0.29
    trainer = resolved(tmp_path / "run", "trainer")
    assert trainer["picked"] == ["row_tokens"] and trainer["row_tokens"] == 1024
    planned = started("rl", tmp_path / "plan", *flags, "--trainer.parallel.card-gb", "4.2", gpus=0)
    told = planned.log.splitlines()
    assert planned.code == 0 and len(told) == 8 and set(told) <= set(run.log.splitlines()), planned.log
    refused = started("rl", tmp_path / "refused", *RL, "--dry-run", "--no-share-gpus", gpus=1, fault=GPU_VLLM)
    assert refused.code == 2 and "and there is 1 GPU: leave share_gpus" in refused.log
    assert not (tmp_path / "refused").exists()


@pytest.mark.launch
def test_a_run_keeps_what_was_picked_for_a_gpu(tmp_path: Path) -> None:
    before = TrainerConfig.model_validate({"picked": ["model.lora"], "model": {"lora": {}}})
    write_config(Attempt(RunDir(tmp_path / "run"), 1, None), "trainer", before, dry_run=False)
    flags = ["--model.name", str(ROOT / "examples/reverse_text/model"), "--dry-run"]
    flags += ["--orchestrator.environments", '[{"id": "reverse_text"}]']
    run = started("rl", tmp_path / "run", *flags, gpus=0)  # without a GPU, too
    assert run.code == 0, run.log
    trainer = resolved(tmp_path / "run", "trainer")
    assert trainer["model"]["lora"]["rank"] == 16 and trainer["optim"]["lr"] == 1e-5  # the rate of LoRA


@pytest.mark.launch
def test_a_run_keeps_its_dtype_on_another_device(tiny_model: ModelFactory, sft_data: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    model = ("--model.name", str(tiny_model(weights=False)), "--model.init", "random", "--data.name", str(sft_data))
    first = started("sft", output, *model, "--max-steps", "1", "--ckpt", gpus=0)
    assert first.code == 0, first.log
    again = (*model, "--max-steps", "2", "--dry-run", "--ckpt.resume-step", "latest")
    resumed = started("sft", output, *again, gpus=1)
    assert resumed.code == 0, resumed.log
    assert "model.dtype = float32, kept from the run; a new run on cuda would take bfloat16" in resumed.log
    assert resolved(output, "sft")["model"]["dtype"] == "float32"
    fork = ("--ckpt.resume-dir", str(output / "checkpoints" / "step_1"))
    forked = started("sft", tmp_path / "fork", *model, "--max-steps", "2", "--dry-run", *fork, gpus=1)
    assert forked.code == 0 and resolved(tmp_path / "fork", "sft")["model"]["dtype"] == "float32"
    changed = started("sft", output, *again, "--model.dtype", "bfloat16", gpus=1)
    assert "  model.dtype: 'float32' -> 'bfloat16'\n" in changed.log
    anew = started("sft", output, *model, "--clean", "--dry-run", gpus=1)
    assert resolved(output, "sft")["model"]["dtype"] == "bfloat16" and anew.code == 0


@pytest.mark.launch
def test_copies_of_the_model_must_divide_the_gpus(tmp_path: Path) -> None:
    run = started("sft", tmp_path / "run", *SFT, "--dry-run", "--parallel.replicas", "2", gpus=3)
    assert run.code == 2 and "parallel.replicas = 2 does not divide the number of ranks, 3" in run.log


def test_on_a_cluster_a_run_starts_servers_unless_it_names_others() -> None:
    config = RlConfig.model_validate({"orchestrator": {"environments": [{"id": "reverse_text"}]}})
    config.orchestrator.client.urls = config.inference.urls
    assert _starts_inference(config)
    config.orchestrator.client.urls = ["http://far:1"]
    assert not _starts_inference(config)
