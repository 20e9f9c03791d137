"""What several unit tests share: an empty run directory, states to save, commands run in this process."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from holdfast import cli
from holdfast.run.run_dir import RunDir
from tests.builders.plain_models import write_plain_model
from tests.conftest import ModelFactory
from tests.runs.stand_ins import Stands

if TYPE_CHECKING:
    from holdfast.trainer.mesh import Mesh
    from tests.builders.train_states import MakeState

# A busy machine takes longer for anything; no example of ours is spoilt by what another left in a fixture; and the same
# code has the same examples, so that no change is refused for one that was found by chance.
settings.register_profile(
    "holdfast",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("holdfast")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Have every test draw the same numbers, whatever ran before it in the same process."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


Command = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]
Told = Callable[[], str]
When = Callable[[Callable[[], object], Callable[[], object]], None]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """Return a maker of tiny model directories that does without torch: `plain_model(weights=True, **config)`."""

    @cache
    def make(*, weights: bool = True, seed: int = 0, **fields: Any) -> Path:
        return write_plain_model(tmp_path_factory.mktemp("plain"), weights=weights, seed=seed, **fields)

    return make


@pytest.fixture
def stands(tmp_path: Path) -> Stands:
    """Return what runs stand-ins for processes."""
    return Stands(tmp_path / "run")


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """Return a function that says what the test has printed so far, also while another thread prints. `readouterr`
    empties what it has read: of what is printed in that moment it loses some."""
    return lambda: getattr(sys.stdout, "getvalue", str)()  # once the test is over, it may be another stream


@pytest.fixture
def when() -> Iterator[When]:
    """Return what does something in a thread as soon as something is so, unless the test is over."""
    is_over, threads = threading.Event(), list[threading.Thread]()

    def wait(is_so: Callable[[], object], act: Callable[[], object]) -> None:
        while not is_so():
            if is_over.wait(0.01):
                return
        act()

    def arrange(is_so: Callable[[], object], act: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=wait, args=(is_so, act)))
        threads[-1].start()

    yield arrange
    is_over.set()
    for thread in threads:
        thread.join()


@pytest.fixture
def make_state(tiny_model: ModelFactory, mesh: Mesh) -> MakeState:
    """Return a maker of the states of a trainer."""
    from tests.builders.train_states import state_maker

    return state_maker(tiny_model, mesh)


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return `run_command("ckpt", *argv)`, in this process: exit code, and what was printed to both streams."""

    def run(name: str, *argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, argv)])
        with pytest.raises(SystemExit) as caught:
            getattr(cli, name.replace("-", "_"))()
        printed = capsys.readouterr()
        code = caught.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), printed.out, printed.err

    return run


@pytest.fixture
def refused(run_command: Command) -> Refused:
    """Return `refused("ckpt", *argv)`: the one message by which a command ends that prints nothing else."""

    def run(name: str, *argv: object) -> str:
        code, out, err = run_command(name, *argv)
        assert (code, out) == (2, "") and err.count("error: ") == 1 and err.startswith("error: "), err
        assert "Traceback" not in err
        return err

    return run


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the test in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that lets seconds pass for what bounds waits, which see no others."""
    now = 1000.0
    for module in ("launcher.restart_policy", "launcher.liveness", "process.heartbeat"):
        monkeypatch.setattr(f"holdfast.{module}.awake_s", lambda: now)

    def pass_s(seconds: float) -> None:
        nonlocal now
        now += seconds

    return pass_s
