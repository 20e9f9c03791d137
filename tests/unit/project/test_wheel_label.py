"""How holdfast is installed is known; the label of a wheel that names the wrong Python is corrected, and only that."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.process.imports import is_checkout
from tests.lanes.wheel_label import correct_wheel_label


def _install(folder: Path, tag: str) -> Path:
    information = folder / "example_wheel-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: example-wheel\nVersion: 1.0\n")
    (information / "WHEEL").write_text(f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n")
    (information / "RECORD").write_text("example_wheel-1.0.dist-info/WHEEL,,\nexample_wheel-1.0.dist-info/METADATA,,\n")
    return information / "WHEEL"


def test_a_checkout_is_told_from_an_installation(tmp_path: Path) -> None:
    assert is_checkout()
    assert not is_checkout(tmp_path / "lib" / "python" / "site-packages" / "holdfast")


def test_a_wrong_label_is_corrected_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    label = _install(tmp_path, "cp26-cp26-linux_x86_64")
    linked = tmp_path / "cache"
    linked.hardlink_to(label)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert correct_wheel_label("example-wheel")
    assert label.read_text() == "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp38-abi3-linux_x86_64\n"
    assert "cp26-cp26" in linked.read_text()
    assert not correct_wheel_label("example-wheel")


def test_what_is_not_installed_is_no_error() -> None:
    assert not correct_wheel_label("no-such-distribution")
