"""Imports: of large libraries, of the user's modules, and what is left of PYTHONPATH for children without these."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from holdfast.config import TrainerConfig
from holdfast.errors import ConfigError
from holdfast.launcher.preflight import check_functions
from holdfast.process.child import heavy_imports
from holdfast.process.imports import import_users, leave_out_working_directory, load_function


@pytest.mark.parametrize(
    ("given", "left"),
    [(".", None), ("", None), ("{here}:/cluster/packages", "/cluster/packages"), ("/a::else:{here}/", "/a:else")],
)
def test_the_working_directory_leaves_and_what_a_cluster_provides_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, left: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", given.format(here=tmp_path))
    leave_out_working_directory()
    assert os.environ.get("PYTHONPATH") == left


def test_a_module_that_was_made_by_hand_takes_nobodys_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "made_by_hand.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "made_by_hand", made := ModuleType("made_by_hand"))
    assert import_users("made_by_hand") is made


def test_a_module_of_the_users_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("import sys; sys.exit('no licence')")
    (tmp_path / "own_functions.py").write_text("def loss(data, *, clip): ...\ndef advantage(rewards): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"advantage = 'exits:f': importing exits failed: SystemExit: no licence"):
        load_function("exits:f", key="advantage")

    def check(**settings: object) -> None:
        check_functions(TrainerConfig.model_validate(settings))

    check()
    check(advantage="own_functions:advantage", loss={"type": "own_functions:loss", "args": {"clip": 1}})
    with pytest.raises(ConfigError, match="cannot be called as function"):
        check(loss={"type": "own_functions:loss", "args": {"clop": 1}})
    with pytest.raises(ConfigError, match="has no function 'advantages'. Did you mean 'advantage'"):
        check(advantage="own_functions:advantages")
    with pytest.raises(ConfigError, match="has no function 'advantages'. Did you mean 'advantage'"):
        check(environments={"a": {"advantage": "own_functions:advantages"}})


def test_the_collector_rests_during_imports_and_leaves_what_they_made_alone() -> None:
    before = gc.get_freeze_count()
    try:
        with heavy_imports():
            assert not gc.isenabled()
            made = [[number] for number in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)
        with pytest.raises(ModuleNotFoundError), heavy_imports():
            import there_is_no_such_library  # type: ignore[import-not-found]  # noqa: F401
        assert gc.isenabled(), "though an import failed"
    finally:
        gc.unfreeze()


@pytest.mark.launch
def test_a_hidden_package_seems_not_to_be_installed() -> None:
    code = (
        "import importlib.util, sys\n"
        "from holdfast.process.imports import hide_package\n"
        "hide_package('torch')\n"
        "hide_package('os')\n"
        "import datasets, transformers\n"
        "assert 'torch' not in sys.modules and importlib.util.find_spec('torch') is None\n"
        "assert not transformers.is_torch_available()\n"
        "for name in ('torch', 'torch.nn'):\n"
        "    try:\n        importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n        assert error.name == 'torch'\n"
        "    else:\n        raise AssertionError(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
