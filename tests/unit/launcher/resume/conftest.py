import pytest

from holdfast.run.run_dir import RunDir


@pytest.fixture(autouse=True)
def release_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a directory lasts as long as the process; here many launches share one."""
    monkeypatch.setattr(RunDir, "lock", lambda _: None)
    monkeypatch.setattr(RunDir, "lock_orchestrator", lambda _, over_exec=False: None)
