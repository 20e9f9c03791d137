"""Programs of a few lines that stand in for the processes of a run, watched by the real launcher."""

import errno
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from holdfast.config import TrainerConfig
from holdfast.errors import ProcessDied
from holdfast.launcher.liveness import Health
from holdfast.launcher.plan import Plan
from holdfast.launcher.restart_policy import RestartLimit, RestartPolicy, StorageBackoff
from holdfast.launcher.restarts import watch
from holdfast.launcher.resume.attempt import Attempt
from holdfast.run.run_dir import RunDir


class Stands:
    def __init__(self, path: Path) -> None:
        self.run_dir = RunDir(path)
        self.run_dir.path.mkdir()
        self.run_dir.create()
        self.run_dir.rollouts.mkdir()
        self.attempts = 1  # how many attempts have begun
        self.full_disks = 0  # how often the launcher finds no room for what a new attempt begins with
        self.lost_hosts = 0  # how often a host is lost before a new attempt

    def starts(self, name: str) -> int:
        return (self.run_dir.path / f"{name}_starts").stat().st_size

    def watch(
        self, *, health_url: str | None = None, restarts: int = 3, heals: bool = True, ckpt: Any = None, **programs: str
    ) -> int:
        """Run `programs`, texts of Python with `made(name)`, in the run; `start` is the number of the start of each.
        `heals`: watch as `rl` is, not as `sft`."""
        prelude = (
            f"import os, sys, time; os.chdir({str(self.run_dir.path)!r}); from pathlib import Path\n"
            "from holdfast.process.heartbeat import does, moved, start_heartbeat; start_heartbeat()\n"
            "made = lambda name: Path(name).mkdir(parents=True)\n"
            "with open('NAME_starts', 'a') as starts: starts.write('x')\n"
            "start = Path('NAME_starts').stat().st_size\n"
        )
        config = TrainerConfig.model_validate({"output_dir": str(self.run_dir.path), "max_steps": 1, "ckpt": ckpt})
        commands = {
            name: [sys.executable, "-c", prelude.replace("NAME", name) + code] for name, code in programs.items()
        }
        health = {"inference": Health(health_url)} if health_url else {}

        def plan() -> Plan:
            return Plan(Attempt(self.run_dir, self.attempts, None), commands, config, [], health)

        def again() -> Plan:
            if self.full_disks:
                self.full_disks -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.run_dir.path))
            if self.lost_hosts:
                self.lost_hosts -= 1
                raise ProcessDied("host_1 is lost")
            self.attempts += 1
            return plan()

        healing = RestartPolicy(
            again=again,
            restarts=RestartLimit(restarts, 600),
            storage_backoff=StorageBackoff(600),
            heartbeat_timeout_s=60,
            cluster=Mock() if self.lost_hosts else None,
        )
        return watch(plan(), healing if heals else None)
