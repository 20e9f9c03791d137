"""`rl --slurm`: one sbatch script that starts the run, saves it ahead of the time limit, and queues it again."""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from pathlib import Path

import tomli_w

from holdfast.shared.config.load import without_none
from holdfast.shared.config.rl import RlConfig
from holdfast.shared.errors import ConfigError
from holdfast.shared.files import durable

_SUBMIT_TIMEOUT_S = 60.0
# What the launcher takes beside the trainer's grace to tell everybody and to end.
_ENDING_S = 60
_STOPPED_BY_USR1 = 138
_SCRIPT = """\
#!/bin/bash
{options}
cd {directory} || exit 2
{setup}
# Servers listen for other nodes. In the environment alone: nobody else can read it there.
: "${{{token}:=$(head -c 24 /dev/urandom | base64 | tr -d '/+=')}}"
export {token}
{command} &
launcher=$!
trap 'kill -USR1 $launcher' USR1
trap 'kill -TERM $launcher' TERM
while true; do
    wait $launcher
    code=$?
    # A signal ends the wait as well.
    kill -0 $launcher 2>/dev/null || break
done
# Stopped ahead of the time limit: what is saved goes on in the next job.
if [ $code = {stopped} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def submit(config: RlConfig, given: RlConfig) -> int:
    """Write the script of a run and submit it; a dry run prints it instead.

    Args:
        config: with what its processes share handed down.
        given: as the user wrote it.

    Raises:
        ConfigError: the settings cannot be those of a job that may be queued again; or sbatch refuses it.
    """
    script = render(config, given)
    if config.dry_run:
        print(script, end="")
        return 0
    folder = config.output_dir / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    durable.write_file(folder / "rl.toml", _settings_of_job(given).encode())
    durable.write_file(folder / "rl.sbatch", script.encode())
    try:
        argv = ["sbatch", "--parsable", str(folder / "rl.sbatch")]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_SUBMIT_TIMEOUT_S)
    except FileNotFoundError:
        raise ConfigError(
            f"--slurm needs SLURM's sbatch, which is not on this machine. The script is {folder / 'rl.sbatch'}"
        ) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"sbatch has not answered within {_SUBMIT_TIMEOUT_S:.0f} s: see by squeue whether the job is there before "
            f"you submit {folder / 'rl.sbatch'} again"
        ) from None
    if done.returncode != 0:
        raise ConfigError(f"sbatch refuses {folder / 'rl.sbatch'}: {done.stderr.strip()}")
    job = done.stdout.strip().partition(";")[0]
    print(f"submitted job {job}; its output: {_output_of(config, job)}")
    print(f"save and stop it: scancel --batch --signal TERM {job}")
    return 0


def render(config: RlConfig, given: RlConfig) -> str:
    """Return the script of a run.

    Raises:
        ConfigError: the settings cannot be those of a job that may be queued again.
    """
    assert config.slurm is not None
    _check(config, given)
    assert config.trainer.ckpt is not None
    slurm = config.slurm
    ahead_s = math.ceil(config.trainer.ckpt.grace_s) + _ENDING_S
    if slurm.time_s is not None and slurm.time_s <= ahead_s:
        raise ConfigError(
            f"slurm.time = {slurm.time} is over before anything can be trained: it is stopped {ahead_s} s ahead of "
            f"it (ckpt.grace_s and {_ENDING_S} s). Raise slurm.time, or lower ckpt.grace_s"
        )
    options = {
        "job-name": slurm.job_name,
        "nodes": slurm.nodes,
        "ntasks-per-node": 1,
        "exclusive": None,  # trainer and engines take the cores that there are
        "gpus-per-node": slurm.gpus_per_node or False,
        "time": slurm.time or False,
        "partition": slurm.partition or False,
        "account": slurm.account or False,
        "output": _output_of(config, "%j"),
        "open-mode": "append",
        "requeue": None,
        "signal": f"B:USR1@{ahead_s}",
    }
    lines = [
        f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items() if value is not False
    ]
    settings = (config.output_dir / "slurm" / "rl.toml").absolute()
    command = [str(Path(sys.executable).with_name("rl")), "@", str(settings), "--cluster", "slurm"]
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {line}" for line in [*map(shlex.quote, lines), *slurm.extra]),
        directory=shlex.quote(str(Path.cwd())),
        setup="\n".join(slurm.setup),
        token=config.inference.server.admin_token_env,
        command=shlex.join([*command, "--ckpt.resume-step", "auto"]),
        stopped=_STOPPED_BY_USR1,
    )


def _check(config: RlConfig, given: RlConfig) -> None:
    ckpt = config.trainer.ckpt
    if ckpt is None:
        raise ConfigError(
            "--slurm needs checkpoints: a job that is queued again would start afresh. Set --ckpt.interval"
        )
    if ckpt.resume_step not in (None, "auto"):
        raise ConfigError(
            f"ckpt.resume_step = {ckpt.resume_step}: with --slurm it is 'auto', as the job may be queued again. To go "
            "on from another step, name it by --ckpt.resume-dir in a new --output-dir"
        )
    if config.clean:
        raise ConfigError("--clean with --slurm would remove the run whenever the job is queued again: leave it out")
    if given.cluster is not None:
        raise ConfigError(f"cluster = '{given.cluster}' and --slurm are two places to run at: leave one of them out")


def _output_of(config: RlConfig, job: str) -> Path:
    return (config.output_dir / "slurm" / f"job_{job}.out").absolute()


def _settings_of_job(given: RlConfig) -> str:
    """Return what the user has set, without what only chose the job."""
    plain = without_none(given.model_dump(mode="json", exclude_unset=True))
    for name in ("slurm", "dry_run"):
        plain.pop(name, None)
    return tomli_w.dumps(plain)
