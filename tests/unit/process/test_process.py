"""Imports of large libraries: the collector rests meanwhile, and works afterwards whatever happened."""

from __future__ import annotations

import gc

import pytest

from holdfast.process.child import heavy_imports


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
