"""What the tests of the orchestrator share: servers that fail are asked again soon."""

import pytest

from holdfast.orchestrator.client import pool


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first pause before another try take 10 ms. Those that follow grow as ever."""
    monkeypatch.setattr(pool, "FIRST_BACKOFF_S", 0.01)
