"""Commands on machines whose GPUs are made up: what they say, write, refuse and give to their processes."""

import os
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.builders.nvml import loading, machine
from tests.conftest import ROOT, ModelFactory
from tests.forking.commands import Run, shared_commands

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


def started(program: str, output: Path, *flags: str, gpus: int, fault: str = "", **settings: Any) -> Run:
    """Run a command to its end on a machine with so many GPUs."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    visible = settings.pop("visible", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    return (
        shared_commands()
        .start(
            program,
            output,
            ["--output-dir", str(output), *flags],
            environment={**environment, **machine(gpus, **settings)},
            fault=loading() + fault,
        )
        .wait()
    )


def resolved(output: Path, name: str) -> dict[str, Any]:
    """Return the configuration that a dry run wrote for one process."""
    return tomli.loads((output / "configs" / "dry_run" / f"{name}.toml").read_text())


@pytest.mark.launch
@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_trainer_takes_every_gpu_and_the_settings_for_them(count: int, tmp_path: Path) -> None:
    run = started("sft", tmp_path / "run", *SFT, "--dry-run", gpus=count)
    assert run.code == 0, run.log
    names = {1: "0", 2: "0,1", 8: "0-7"}[count]
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
    assert "trainer on GPU 0-3 (4 x NVIDIA H100 80GB HBM3), engine on GPU 4-7 (4 x NVIDIA" in run.log
    halves = started("rl", tmp_path / "halves", *RL, "--dry-run", gpus=4, fault=GPU_VLLM)
    rows = [line.split()[2:4] for line in halves.log.splitlines() if line.startswith("inference_")]
    assert rows == [["GPU", "2"], ["GPU", "3"]], halves.log
    assert len(resolved(tmp_path / "halves", "orchestrator")["client"]["urls"]) == 2
    rows = [line.split() for line in run.log.splitlines() if line.startswith(("trainer ", "inference "))]
    assert [row[2:4] for row in rows[1:]] == [["GPU", "0-3"], ["GPU", "4-7"]] and rows[-1][-1] == "bfloat16"
    engine = resolved(tmp_path / "run", "inference")
    assert engine["engine"]["eager"] is False and engine["engine"]["gpu_memory_utilization"] == 0.9
    assert "threads" not in engine["engine"]  # what vLLM takes
    trainer = resolved(tmp_path / "run", "trainer")
    assert trainer["sampler_dtype"] == trainer["model"]["dtype"] == "bfloat16"


@pytest.mark.launch
def test_a_gpu_that_both_share_is_shared_by_its_memory(tmp_path: Path) -> None:
    flags = ("--dry-run", "--share-gpus")
    run = started("rl", tmp_path / "run", *RL, *flags, gpus=1, fault=GPU_VLLM)
    assert run.code == 0 and resolved(tmp_path / "run", "inference")["engine"]["gpu_memory_utilization"] == 0.4
    refused = started("rl", tmp_path / "refused", *RL, "--dry-run", gpus=1, fault=GPU_VLLM)
    assert refused.code == 2 and "and there is 1 GPU: let them share it" in refused.log
    assert not (tmp_path / "refused").exists()


@pytest.mark.launch
def test_gpus_that_torch_does_not_see_end_the_run(tiny_model: ModelFactory, sft_data: Path, tmp_path: Path) -> None:
    model = ("--model.name", str(tiny_model(weights=False)), "--model.init", "random", "--data.name", str(sft_data))
    run = started("sft", tmp_path / "run", *model, "--max-steps", "1", gpus=2)
    assert run.code == 2, run.log
    assert "parallel.device = cuda, but torch finds no GPU here" in run.log


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
