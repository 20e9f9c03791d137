"""A SLURM of two nodes on this machine: one slurmctld, two slurmd, no accounts. Debian's slurm-wlm, installed here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from tests.conftest import ROOT
from tests.runs.ports import free_port
from tests.runs.processes import HANG_S

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
        while not self.is_idle:
            assert all(daemon.poll() is None for daemon in self._daemons), "SLURM did not start"
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.ask("squeue", "--noheader", "--format=%i").split():
            self.ask("scancel", "--signal=KILL", "--full", job)
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()

    @property
    def is_idle(self) -> bool:
        return self.ask("sinfo", "--noheader", "--states=idle", "--format=%D").strip() == "2"

    def submit(self, argv: list[str]) -> Job:
        """Run a command with `--slurm`; return the job that it has submitted."""
        submitted = subprocess.run(argv, cwd=ROOT, env=self.environment, capture_output=True, text=True)
        assert submitted.returncode == 0, submitted.stderr
        found = re.match(r"submitted job (\d+); its output: (.*)", submitted.stdout)
        assert found is not None, submitted.stdout
        return Job(self, found[1], Path(found[2]))

    def ask(self, *argv: str) -> str:
        return subprocess.run(argv, env=self.environment, capture_output=True, text=True).stdout

    def _start(self, *argv: str) -> None:
        with open(self._home / f"{argv[0]}.out", "ab") as output:
            conf = ("-f", str(self._home / "slurm.conf"))
            self._daemons.append(subprocess.Popen([*argv, *conf], stdout=output, stderr=output, env=self.environment))


class Job:
    def __init__(self, slurm: SlurmNodes, number: str, output: Path) -> None:
        self._slurm = slurm
        self._number = number
        self._output = output

    @property
    def said(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    @property
    def state(self) -> str:
        """Its state; empty where it is long over."""
        return self._slurm.ask("squeue", "--noheader", "--states=all", "--format=%T", "--jobs", self._number).strip()

    def wait_for(self, what: str, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + HANG_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come: {self.state}\n{self.said}"
            time.sleep(0.05)

    def preempt(self) -> None:
        """Have it end and wait in the queue again, as one that must make room for another."""
        self._slurm.ask("scontrol", "requeue", self._number)
        self._wait_in_queue()

    def reach_limit(self) -> None:
        """Send it what SLURM sends ahead of its time limit, and wait until it is in the queue again."""
        self._slurm.ask("scancel", "--batch", "--signal", "USR1", self._number)
        self._wait_in_queue()

    def _wait_in_queue(self) -> None:
        # Free nodes: only then SLURM knows how its turn before has ended, and when the next may begin.
        self.wait_for("the queue", lambda: self.state == "PENDING" and self._slurm.is_idle)

    def start_again(self) -> None:
        """Have it begin soon, not minutes later as by itself; within a second nodes take it for the turn before."""
        self._slurm.ask("scontrol", "update", f"JobId={self._number}", "StartTime=now+2")
        self.wait_for("its turn", lambda: self.state == "RUNNING")

    def wait(self) -> None:
        self.wait_for("the end of the job", lambda: self.state in ("COMPLETED", "FAILED", ""))
        assert self.state != "FAILED", self.said
