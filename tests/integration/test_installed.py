"""The wheel in an environment of its own, in a directory with files of unlucky names."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.toy import TOY
from tests.conftest import ROOT
from tests.runs.training import DEADLINE_S

pytestmark = pytest.mark.skipif(shutil.which("uv") is None, reason="wheels are built and installed with uv")
_SCRIPT = """
set -eu
touch junk
rm junk
test ! -e junk
sft --model.name "$MODEL" --data.name "$DATA" --data.batch-size 4 --data.seq-len 32 --max-steps 1 --parallel.threads 1
"""


def uv(*words: str, **options: str) -> None:
    done = subprocess.run(["uv", *words], capture_output=True, text=True, timeout=600, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    uv("build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bin_dir(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Return `bin` of an environment with the wheel, and links to everything else that is installed here, less vLLM."""
    home = tmp_path_factory.mktemp("installed")
    environment = home / "venv"
    uv("venv", "--quiet", "--python", sys.executable, str(environment))
    uv("pip", "install", "--quiet", "--no-deps", "--python", str(environment / "bin" / "python"), str(wheel))
    links = home / "packages"
    links.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("vllm", "holdfast", "_editable_impl")) and entry.suffix != ".pth":
            (links / entry.name).symlink_to(entry)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(f"{links}\n")
    return environment / "bin"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory of a user with names of ours."""
    project = tmp_path / "project"
    (project / "inference").mkdir(parents=True)
    for name in ("trainer.py", "inference/__init__.py", "config.py"):
        (project / name).write_text("raise SystemExit(f'{__file__} was imported')\n")
    (project / "train.sh").write_text(_SCRIPT)
    return project


def run(bin_dir: Path, project: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{bin_dir}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": path, **variables}
    return subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True, timeout=3 * DEADLINE_S)


@pytest.mark.launch
@pytest.mark.everyday
def test_without_vllm_rl_says_what_to_install(bin_dir: Path, project: Path) -> None:
    for program in ("rl", "inference"):
        refused = run(bin_dir, project, program, *TOY[program], "--output-dir", "refused")
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert refused.stderr.startswith(
            "error: the inference server needs vLLM, which is not installed: `uv sync --group cpu`"
        )
        assert "holdfast[rl-cpu]" in refused.stderr and refused.stderr.count("\n") == 1 and not refused.stdout
        assert not (project / "refused").exists()


@pytest.mark.launch
@pytest.mark.everyday
def test_without_vllm_sft_trains(bin_dir: Path, project: Path, tiny_model: Callable[..., Path], sft_data: Path) -> None:
    """And the other commands of the wheel show what it did."""
    trained = run(bin_dir, project, "sh", "train.sh", MODEL=str(tiny_model()), DATA=str(sft_data))
    assert trained.returncode == 0 and "finished step 1 of 1" in trained.stdout, trained.stdout + trained.stderr
    (directory,) = {path.parent for path in project.glob("**/metrics.jsonl")}
    for words in (["report", directory], ["monitor", directory, "--once"], ["track", directory, "--to", "tensorboard"]):
        looked = run(bin_dir, project, *map(str, words))
        assert looked.returncode == 0 and looked.stdout, looked.stderr
    assert (directory / "report.html").stat().st_size > 1e6, "with the files of the package that make it"
    again = run(bin_dir, project, "sh", "train.sh", MODEL=str(tiny_model()), DATA=str(sft_data))
    assert again.returncode == 2 and "holds a run that is finished, at step 1" in again.stderr, again.stderr
    begun = run(bin_dir, project, "environments", "init", "sums")
    assert begun.returncode == 0 and "\n  environments check sums:Sums\n" in begun.stdout, begun.stderr
    assert "uv run" not in begun.stdout + (project / "sums.toml").read_text(), "there is no checkout to run it in"
