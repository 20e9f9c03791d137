"""The recipes of docs/clusters.md are what the commands print and take; the manifests are of their kinds."""

import shlex
from typing import Any

import pytest
import yaml

from holdfast.config import RlConfig, SftConfig
from holdfast.config.load import parse_command_line
from holdfast.launcher.launch import launch_rl, launch_training
from tests.conftest import ROOT
from tests.pages.documentation import blocks

PAGE = ROOT / "docs" / "clusters.md"
MANIFESTS = ROOT / "examples" / "kubernetes"
pytestmark = pytest.mark.usefixtures("in_root")


def recipes(program: str = "rl") -> list[list[str]]:
    """Return the words of every command of the page that starts `program`, behind `uv run`."""
    lines = [line for block in blocks(PAGE) for line in block.text.splitlines()]
    return [shlex.split(line, comments=True)[2:] for line in lines if line.startswith(f"uv run {program} ")]


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((MANIFESTS / name).read_text())


def test_every_recipe_can_be_parsed() -> None:
    assert {parse_command_line(RlConfig, words[1:]).cluster for words in recipes()} == {None, "ray"}


def test_the_script_of_the_page_is_the_one_that_is_rendered(capsys: pytest.CaptureFixture[str]) -> None:
    words = next(words for words in recipes() if any(word.startswith("--slurm") for word in words))
    assert launch_rl(parse_command_line(RlConfig, [*words[1:], "--dry-run"])) == 0
    shown = next(block.text for block in blocks(PAGE) if block.text.startswith("#!/bin/bash"))
    assert capsys.readouterr().out.startswith(shown)


def test_the_options_of_the_page_are_those_of_a_trainer_too(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = recipes("sft")
    assert launch_training(parse_command_line(SftConfig, [*words[1:], "--dry-run"])) == 0
    printed = capsys.readouterr().out
    options = next(block.text for block in blocks(PAGE) if block.text.startswith("#!/bin/bash"))
    assert printed.startswith(options.replace("/shared/run/", "/shared/sft/"))


def test_the_ray_job_is_one_and_its_run_fits_its_nodes() -> None:
    job = manifest("rl.yaml")
    words = job["spec"]["entrypoint"].replace("@ /shared/rl.toml", "@ configs/reverse_text/rl.toml").split()
    config = parse_command_line(RlConfig, words[1:])
    assert config.cluster == "ray" and config.ckpt is not None and config.ckpt.resume_step == "auto"
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    engine, parallel = config.inference.engine, config.trainer.parallel
    assert engine.tensor_parallel_size <= gpus >= parallel.num_ranks
    assert engine.tensor_parallel_size + parallel.nodes * parallel.num_ranks <= gpus * workers["replicas"]
    for template in (workers["template"], cluster["headGroupSpec"]["template"]):
        assert template["spec"]["terminationGracePeriodSeconds"] > config.ckpt.grace_s
        (pod,) = template["spec"]["containers"]
        assert pod["env"][0]["name"] == config.inference.server.admin_token_env and "value" not in pod["env"][0]


def test_the_job_set_is_one_and_its_nodes_meet_at_the_first() -> None:
    job_set = manifest("sft.yaml")
    (nodes,) = job_set["spec"]["replicatedJobs"]
    job = nodes["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    words = [
        str(ROOT / "configs/reverse_text/sft.toml") if word == "/shared/sft.toml" else word
        for word in container["args"]
    ]
    config = parse_command_line(SftConfig, words)
    name = job_set["metadata"]["name"]
    assert config.parallel.rendezvous == (f"{name}-{nodes['name']}-0-0.{name}", 29400)
    assert config.parallel.nodes == job["parallelism"] == job["completions"]
    assert config.parallel.num_ranks == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert config.ckpt is not None and config.ckpt.grace_s < job["template"]["spec"]["terminationGracePeriodSeconds"]
