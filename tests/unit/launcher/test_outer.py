"""What is read of `torchrun`, `srun` and others that start a command on every node."""

from pathlib import Path

import pytest

from holdfast.config import SftConfig
from holdfast.config.training import ParallelConfig
from holdfast.errors import ConfigError
from holdfast.launcher.nodes import outer_nodes, with_outer_nodes

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "head", "MASTER_PORT": "29500",
}  # fmt: skip
SRUN = {
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[003-004,7],head", "SLURM_JOB_ID": "12345",
}  # fmt: skip
PLAIN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0.job", "MASTER_PORT": "23456"}


def config(**parallel: object) -> SftConfig:
    return SftConfig(parallel=ParallelConfig.model_validate(parallel), output_dir=Path("run"))


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        (TORCHRUN, "head:29501"),
        (SRUN, "gpu003:29745"),
        (SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}, "head:29500"),
        (SRUN | {"SLURM_STEP_NODELIST": "a1,a2"}, "a1:29745"),
        (SRUN | {"SLURM_STEP_NODELIST": "rack[1-2]-gpu"}, "rack1-gpu:29745"),
        (PLAIN, "job-0.job:23456"),
    ],
)
def test_the_nodes_of_an_outer_launcher_are_those_of_the_run(environment: dict[str, str], endpoint: str) -> None:
    found, rank = with_outer_nodes(config(num_ranks=4), environment)
    assert (found.parallel.nodes, found.parallel.rdzv_endpoint, rank) == (2, endpoint, 1)
    assert found.parallel.num_ranks == 4
    same, _ = with_outer_nodes(config(nodes=2), environment)
    assert same.parallel.nodes == 2


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN, PLAIN])
def test_an_address_that_was_given_decides_who_leads(environment: dict[str, str]) -> None:
    found, rank = with_outer_nodes(config(rdzv_endpoint="other:1"), environment)
    assert (found.parallel.rdzv_endpoint, rank) == ("other:1", None)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"MASTER_ADDR": "head", "MASTER_PORT": "1"},  # left in a shell
        TORCHRUN | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"},
        PLAIN | {"WORLD_SIZE": "1", "RANK": "0"},
        {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2"},  # a batch script, which srun has not started
        SRUN | {"SLURM_STEP_NUM_NODES": "1"},
    ],
)
def test_one_node_is_as_without(environment: dict[str, str]) -> None:
    found, rank = with_outer_nodes(config(), environment)
    assert (found.parallel.nodes, found.parallel.rdzv_endpoint, rank) == (1, None, None)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, r"torchrun starts 8 processes .* --parallel.num-ranks 8"),
        ({key: TORCHRUN[key] for key in TORCHRUN if key != "GROUP_RANK"}, "torchrun .* GROUP_RANK is not set"),
        (TORCHRUN | {"GROUP_RANK": "one"}, "GROUP_RANK of torchrun should be a number, got 'one'"),
        (TORCHRUN | {"MASTER_PORT": "x"}, "MASTER_PORT should be the number of a port, got 'x'"),
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set"),
        (PLAIN | {"LOCAL_RANK": "3"}, "several processes on a node"),
        (PLAIN | {"LOCAL_WORLD_SIZE": "4"}, "several processes on a node"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "16"}, "srun starts 16 tasks on 2 nodes"),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        (SRUN | {"SLURM_STEP_NODELIST": "["}, "should be a list of hosts"),
    ],
)  # fmt: skip
def test_what_is_half_said_is_refused(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        outer_nodes(environment)


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.nodes = 3, and torchrun starts this command on 2 nodes"):
        with_outer_nodes(config(nodes=3), TORCHRUN)
    with pytest.raises(ConfigError, match=r"parallel\.nodes = 2 needs the place where they meet"):
        with_outer_nodes(config(nodes=2), {})
    with pytest.raises(ConfigError, match=r"parallel\.rdzv_endpoint = head is where several nodes meet"):
        with_outer_nodes(config(rdzv_endpoint="head"), {})
