"""A copy of the repository in which one module at a time is changed, and a process that runs tests in it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.mutants.choosing import ROOT

# Imports what takes long once, and runs the tests of each request in a fork.
_ZYGOTE = """
import json, os, signal, sys, time
import hypothesis, httpx, msgspec, numpy, pydantic, pytest, torch, transformers
torch.set_num_threads(1)
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1), os.dup2(log, 2), os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os._exit(int(pytest.main(request["arguments"])))
    deadline = time.monotonic() + request["timeout_s"]
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            code = None
            break
        time.sleep(0.02)
    print(json.dumps(code), flush=True)
"""


class Copy:
    """One copy, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        listed = subprocess.run(
            ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, directory / name)
        self.log = directory / "mutant.log"
        path = os.pathsep.join([str(directory / "src"), str(directory)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self._zygote = subprocess.Popen(
            [sys.executable, "-c", _ZYGOTE],
            cwd=directory, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, tests: list[str], *, timeout_s: float) -> int | None:
        """Run tests up to the first that fails; return pytest's exit code, None when it took too long."""
        arguments = ["-q", "-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", *tests]
        request = {"arguments": arguments, "timeout_s": timeout_s, "log": str(self.log)}
        assert self._zygote.stdin is not None and self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(request) + "\n")
        self._zygote.stdin.flush()
        return json.loads(self._zygote.stdout.readline())

    def write(self, module: str, source: str) -> None:
        (self.directory / "src" / module).write_text(source)

    def close(self) -> None:
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
