"""A SLURM of two nodes on this machine: one slurmctld, two slurmd, no accounts. Debian's slurm-wlm, installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Self

import pytest

from tests.runs.ports import free_port

_PACKAGES = ("slurmctld", "slurmd", "slurm-client")
_CONFIG = """\
ClusterName=holdfast
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=60
JobRequeue=1
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=n1 NodeHostName={host} NodeAddr=127.0.0.1 Port={first} CPUs=2
NodeName=n2 NodeHostName={host} NodeAddr=127.0.0.1 Port={second} CPUs=2
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def install() -> None:
    """Install SLURM where it is not; skip the test where that cannot be."""
    if shutil.which("slurmctld") and shutil.which("slurmd"):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("SLURM is not installed, and only root of a Debian can install it here")
    for words in (("update",), ("install", "-y", "--no-install-recommends", *_PACKAGES)):
        done = subprocess.run(["apt-get", "-qq", *words], env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
        if done.returncode != 0:
            pytest.skip(f"SLURM cannot be installed: apt-get {words[0]} ended with {done.returncode}")


class SlurmNodes:
    """The daemons; `environment` leads SLURM's commands to them. Use as a context manager."""

    def __init__(self, home: Path) -> None:
        self._home = home
        names = {"host": os.uname().nodename, "home": home}
        ports = {"controller": free_port(), "first": free_port(), "second": free_port()}
        for name in ("state", "spool-n1", "spool-n2"):
            (home / name).mkdir()
        (home / "slurm.conf").write_text(_CONFIG.format(**names, **ports))
        self.environment = {**os.environ, "SLURM_CONF": str(home / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._start("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._start("slurmd", "-D", "-N", node)
        while "idle" not in self.ask("sinfo", "--noheader", "--format=%T") or "2" not in self.ask(
            "sinfo", "--noheader", "--states=idle", "--format=%D"
        ):
            assert all(daemon.poll() is None for daemon in self._daemons), "SLURM did not start"
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.ask("squeue", "--noheader", "--format=%i").split():
            self.ask("scancel", "--signal=KILL", "--full", job)
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()

    def ask(self, *argv: str) -> str:
        """Return what a command of SLURM's prints."""
        return subprocess.run(argv, env=self.environment, capture_output=True, text=True).stdout

    def state(self, job: str) -> str:
        """Return the state of a job; empty where it is long over."""
        return self.ask("squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job).strip()

    def _start(self, *argv: str) -> None:
        with open(self._home / f"{argv[0]}.out", "ab") as output:
            conf = ("-f", str(self._home / "slurm.conf"))
            self._daemons.append(subprocess.Popen([*argv, *conf], stdout=output, stderr=output, env=self.environment))
