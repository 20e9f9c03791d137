"""A copy of the repository in which one module at a time is changed, and a process that runs tests in it."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
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
        python = _environment_of(directory)
        # Tests may set another PYTHONPATH, so that only the environment decides which holdfast their processes have.
        environment = {**os.environ, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"}
        environment |= {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
        self._zygote = subprocess.Popen(
            [str(python), "-c", _ZYGOTE],
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
        self._zygote.__exit__(None, None, None)  # closes its pipes, by which it ends, and waits for it
        shutil.rmtree(self.directory, ignore_errors=True)


def _environment_of(directory: Path) -> Path:
    """Make an environment with packages and commands of this one, but holdfast of the copy; return its interpreter."""
    home = directory.with_name(f"{directory.name}_environment")
    venv.create(home, symlinks=True)
    ours, packages = (Path(sysconfig.get_path("purelib", "venv", {"base": str(base)})) for base in (sys.prefix, home))
    for entry in ours.iterdir():
        if entry.suffix == ".pth":
            (packages / entry.name).write_text(entry.read_text().replace(str(ROOT), str(directory)))
        elif not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    for command in Path(sys.prefix, "bin").iterdir():
        script = home / "bin" / command.name
        if not script.exists() and command.read_bytes().startswith(b"#!"):
            script.write_text(command.read_text().replace(f"{sys.prefix}/bin/", f"{home}/bin/"))
            script.chmod(0o755)
        elif not script.exists():
            script.symlink_to(command)
    return home / "bin" / "python"
