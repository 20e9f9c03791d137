"""SLURM: a run within an allocation, and `--slurm`, which submits one.

Within an allocation every process gets a step of `srun` with an agent. SLURM ends the job if a node is lost, and
queues it again with other nodes if `--requeue` asks for that.

`--slurm` writes one sbatch script that starts the run, saves it ahead of the time limit, and queues it again. The
script of `rl` starts its launcher on the first node, which places the other processes as steps. The script of `sft`,
`dpo` and `reward-model` starts the same command on every node, as one step of `srun`.
"""

import math
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import tomli_w

from holdfast.config.base import CkptConfig
from holdfast.config.cluster import SlurmConfig
from holdfast.config.load import without_none
from holdfast.config.rl import RlConfig
from holdfast.config.training import SupervisedCommand
from holdfast.errors import ConfigError
from holdfast.launcher.cluster.channels import PipeChannel, close_all
from holdfast.launcher.cluster.cluster import ResourceRequest, assign, wanted_and_there
from holdfast.launcher.cluster.hosts import RemoteHost, agent_command
from holdfast.process.child import killed_by
from holdfast.run import atomic

_ENDING_S = 60  # for the launcher, beside the trainer's grace
_STOPPED_BY_USR1 = 138
# Each command ends by itself once the step is saved. Without CPU binding its ranks take the cores of their settings.
_STEP = ("srun", "--ntasks-per-node", "1", "--kill-on-bad-exit=0", "--wait", "0", "--cpu-bind", "none", "--mpi", "none")

_COMMAND_TIMEOUT_S = 60.0


class SlurmCluster:  # untested: needs SLURM (pytest -m slurm)
    """Places processes on the nodes of the allocation of this process; raises `ConfigError` if there is none."""

    def __init__(self) -> None:
        nodes = os.environ.get("SLURM_JOB_NODELIST")
        if nodes is None:
            raise ConfigError(
                "cluster = 'slurm' needs an allocation (SLURM_JOB_NODELIST is not set): `rl --slurm` submits a job, "
                "or start this in one of sbatch's or salloc's"
            )
        self._names = _run(["scontrol", "show", "hostnames", nodes]).split()
        self._addresses = {name: _address_of(name) for name in self._names}
        cpus = _per_node(os.environ.get("SLURM_JOB_CPUS_PER_NODE", "1"))
        gpus = int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
        self._nodes = [
            {"CPU": float(cpus[min(number, len(cpus) - 1)])} | ({"GPU": float(gpus)} if gpus else {})
            for number in range(len(self._names))
        ]
        self._needs: list[ResourceRequest] = []
        self._assigned: list[int] = []
        self._channels: dict[str, PipeChannel] = {}
        self._hosts: dict[str, RemoteHost] = {}

    @property
    def has_gpus(self) -> bool:
        return "GPU" in self._nodes[0]

    def check(self, needs: list[ResourceRequest]) -> None:
        assigned = assign(needs, self._nodes)
        if assigned is None:
            raise ConfigError(f"the SLURM allocation has too few resources.\n{wanted_and_there(needs, self._nodes)}")
        self._needs, self._assigned = needs, assigned

    def place(self) -> None:
        for need, node in zip(self._needs, self._assigned, strict=True):
            channel = self._channels.get(need.name)
            if channel is not None and not channel.is_lost:
                continue
            name = self._names[node]
            self._channels[need.name] = channel = PipeChannel(step_command(name))
            self._hosts[need.name] = RemoteHost(name, self._addresses[name], channel)

    def is_placed(self) -> bool:
        return True  # the first call to an agent shows if it cannot be started

    def missing(self) -> str:
        return "no place for any process"

    def devices(self, name: str) -> list[int]:
        number = next(number for number, need in enumerate(self._needs) if need.name == name)
        node = self._assigned[number]
        before = sum(need.gpus for need, on in zip(self._needs[:number], self._assigned, strict=False) if on == node)
        return list(range(before, before + self._needs[number].gpus))

    def host(self, name: str) -> RemoteHost:
        return self._hosts[name]

    def close(self) -> None:
        close_all(self._channels.values())


def step_command(node: str) -> list[str]:  # untested: needs SLURM (pytest -m slurm)
    """Return the command line that starts an agent on `node`, beside other steps."""
    step = ["srun", "--overlap", "--nodes", "1", "--ntasks", "1", "--nodelist", node]
    # Without binding: every process takes the cores of its settings.
    return [*step, "--cpu-bind", "none", "--mpi", "none", "--unbuffered", *agent_command()]


def _per_node(text: str) -> list[int]:  # untested: needs SLURM (pytest -m slurm)
    """Return 8, 8, 4 for `8(x2),4`."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _address_of(node: str) -> str:  # untested: needs SLURM (pytest -m slurm)
    """Return the address that SLURM reaches a node at."""
    found = re.search(r"\bNodeAddr=(\S+)", _run(["scontrol", "show", "node", node, "--oneliner"]))
    name = found[1] if found else node
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"the address of node {node}, '{name}', cannot be found: {error}") from None


def _run(argv: list[str]) -> str:
    try:
        return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S).stdout
    except FileNotFoundError:
        raise ConfigError(f"cluster = 'slurm' needs SLURM's commands, and '{argv[0]}' is not there") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"`{' '.join(argv)}` has not answered within {_COMMAND_TIMEOUT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        killed = killed_by(error.returncode)
        reason = error.stderr.strip() if killed is None else f"it was killed by {killed.name}"
        raise ConfigError(f"`{' '.join(argv)}` failed: {reason}") from None


def submit_rl(config: RlConfig, given: RlConfig) -> int:
    """Write the script of an RL run and submit it; a dry run prints it instead.

    Args:
        config: with shared settings handed down to its processes.
        given: as the user wrote it.

    Raise ConfigError if the settings do not suit a job that may be queued again, or sbatch refuses it.
    """
    assert config.slurm is not None
    if given.cluster is not None:
        raise ConfigError(f"cluster = '{given.cluster}' and --slurm are two places to run at: leave one of them out")
    ckpt = _checkpoints(config.trainer.ckpt, config.slurm, clean=config.clean)
    script = _script(
        config.slurm,
        nodes=config.slurm.nodes,
        ahead_s=_ahead_s(ckpt),
        folder=_folder(given),
        command=[*_command("rl", given), "--cluster", "slurm"],
        variables=_variables(given),
        token=config.inference.server.admin_token_env,
        send='kill -{signal} "$launcher"',
    )
    return _submit("rl", given, script)


def submit_training(config: SupervisedCommand) -> int:
    """Write the script of `sft`, `dpo` or `reward-model` and submit it; a dry run prints it instead. Raise ConfigError
    as `submit_rl`, or if the job has other nodes than the trainer."""
    slurm, parallel = config.slurm, config.parallel
    assert slurm is not None
    nodes = slurm.nodes if "nodes" in slurm.model_fields_set else parallel.nodes
    if "nodes" in parallel.model_fields_set and parallel.nodes != nodes:
        raise ConfigError(
            f"parallel.nodes = {parallel.nodes} and slurm.nodes = {nodes}: all nodes of the job train. Set one of them"
        )
    if parallel.rdzv_endpoint is not None:
        raise ConfigError(
            f"parallel.rdzv_endpoint = {parallel.rdzv_endpoint} names one machine, and SLURM chooses them: leave it out"
        )
    ckpt = _checkpoints(config.ckpt, slurm, clean=config.clean)
    script = _script(
        slurm,
        nodes=nodes,
        ahead_s=_ahead_s(ckpt),
        folder=_folder(config),
        command=[*_STEP, *(["--label"] if nodes > 1 else []), *_command(config.program, config)],
        variables=_variables(config),
        meets=nodes > 1,
        # To the step, not to srun, which takes SIGTERM for an order to kill.
        send='scancel --signal {signal} "$SLURM_JOB_ID"',
    )
    return _submit(config.program, config, script)


def _variables(given: RlConfig | SupervisedCommand) -> list[str]:
    from holdfast.config.sources import setting_variables  # loads pydantic-settings, which an agent does not need

    return setting_variables(given)


def _folder(given: RlConfig | SupervisedCommand) -> Path:
    """Return the directory of script, settings and output."""
    return (given.output_dir / "slurm").absolute()


def _command(program: str, given: RlConfig | SupervisedCommand) -> list[str]:
    return [str(Path(sys.executable).with_name(program)), "@", str(_folder(given) / f"{program}.toml")]


def _script(
    slurm: SlurmConfig,
    *,
    nodes: int,
    ahead_s: int,
    folder: Path,
    command: list[str],
    variables: list[str],
    send: str,
    token: str = "",
    meets: bool = False,
) -> str:
    """Return the sbatch script.

    Args:
        variables: the job must not have them: sbatch hands on the environment.
        ahead_s: how long before the time limit the run is stopped.
        send: line of shell that sends `{signal}` to the command.
        token: variable for which the job makes a token, unless it has one.
        meets: the commands of several nodes need the address of the first.
    """
    options = {
        "job-name": slurm.job_name,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "exclusive": None,  # the processes share all cores of the node
        "gpus-per-node": slurm.gpus_per_node or False,
        "time": slurm.time or False,
        "partition": slurm.partition or False,
        "account": slurm.account or False,
        "output": str(folder).replace("%", "%%") + "/job_%j.out",
        "open-mode": "append",
        "requeue": None,
        "signal": f"B:USR1@{ahead_s}",
    }
    lines = [
        f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items() if value is not False
    ]
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # takes 0.05 s, and few launchers submit jobs

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template("job.sh.jinja").render(
        options=[*map(shlex.quote, lines), *slurm.extra],
        directory=shlex.quote(str(Path.cwd())),
        variables=variables,
        setup=slurm.setup,
        token=token,
        meets=meets,
        command=shlex.join([*command, "--ckpt.resume-step", "auto"]),
        send=send,
        stopped=_STOPPED_BY_USR1,
    )


def _submit(program: str, given: RlConfig | SupervisedCommand, script: str) -> int:
    if given.dry_run:
        print(script, end="")
        return 0
    folder = _folder(given)
    folder.mkdir(parents=True, exist_ok=True)
    settings = without_none(given.model_dump(mode="json", exclude_unset=True))
    for chooses_the_job in ("slurm", "dry_run"):
        settings.pop(chooses_the_job, None)
    atomic.write_file(folder / f"{program}.toml", tomli_w.dumps(settings).encode())
    path = folder / f"{program}.sbatch"
    atomic.write_file(path, script.encode())
    try:
        argv = ["sbatch", "--parsable", str(path)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    except FileNotFoundError:
        raise ConfigError(f"--slurm needs SLURM's sbatch, which is not on this machine. The script is {path}") from None
    except subprocess.TimeoutExpired:
        raise _unknown(path, f"has not answered within {_COMMAND_TIMEOUT_S:.0f} s") from None
    if (killed := killed_by(done.returncode)) is not None:
        raise _unknown(path, f"was killed by {killed.name}")
    if done.returncode != 0:
        raise ConfigError(f"sbatch refuses {path}: {done.stderr.strip()}")
    number = done.stdout.strip().partition(";")[0]
    print(f"submitted job {number}; its output: {folder / f'job_{number}.out'}")
    print(f"save and stop it: scancel --batch --signal TERM {number}")
    return 0


def _unknown(script: Path, how: str) -> ConfigError:
    return ConfigError(f"sbatch {how}: see by squeue whether the job is there before you submit {script} again")


def _checkpoints(ckpt: CkptConfig | None, slurm: SlurmConfig, *, clean: bool) -> CkptConfig:
    """Return how the job saves; refuse a job that would start from scratch each time, or end before it trains."""
    if ckpt is None:
        raise ConfigError(
            "--slurm needs checkpoints: a job that is queued again would start from scratch. Set --ckpt.interval"
        )
    if ckpt.resume_step not in (None, "auto"):
        raise ConfigError(
            f"ckpt.resume_step = {ckpt.resume_step}: with --slurm it is 'auto', as the job may be queued again. To go "
            "on from another step, name it by --ckpt.resume-dir in a new --output-dir"
        )
    if clean:
        raise ConfigError("--clean with --slurm would remove the run whenever the job is queued again: leave it out")
    if slurm.time_s is not None and slurm.time_s <= _ahead_s(ckpt):
        raise ConfigError(
            f"slurm.time = {slurm.time} is over before anything can be trained: it is stopped {_ahead_s(ckpt)} s ahead "
            f"of it (ckpt.grace_s and {_ENDING_S} s). Raise slurm.time, or lower ckpt.grace_s"
        )
    return ckpt


def _ahead_s(ckpt: CkptConfig) -> int:
    return math.ceil(ckpt.grace_s) + _ENDING_S
