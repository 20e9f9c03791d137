"""Small files with a checksum: of a damaged byte they say nothing that was not written."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tomli

from holdfast.errors import CheckpointError
from holdfast.run import checked
from holdfast.run.settings import read_settings

VALUES = {"run_id": "0a1b", "created_unix_s": 1795640000, "rewinds": [2, 4], "lr": 1e-05, "nested": {"none": None}}
TEXT = 'seed = 3\n\n[optim]\nlr = 1e-05\nschedule = "cosine"\n'


def _toml(data: bytes) -> object:
    checked.check_toml(data)
    return tomli.loads(data.decode())


@pytest.mark.parametrize(
    ("data", "read"), [(checked.encode(VALUES), checked.decode), (checked.with_first_line(TEXT), _toml)]
)
def test_a_file_of_which_a_byte_is_damaged_says_nothing_else(data: bytes, read: Callable[[bytes], object]) -> None:
    """What says that there is a checksum may be damaged as well: then the file has none, and says the same."""
    written, unnoticed = read(data), 0
    for place in range(len(data)):
        for bit in range(8):
            damaged = data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]
            try:
                found = read(damaged)
            except ValueError:
                continue
            unnoticed += 1
            assert isinstance(found, dict) and isinstance(written, dict) and written.items() <= found.items()
    assert unnoticed < 160


def test_files_of_older_versions_and_of_people_are_taken_as_they_are() -> None:
    assert checked.decode(b'{"run_id": "mine"}') == {"run_id": "mine"}
    assert _toml(TEXT.encode()) == _toml(checked.with_first_line(TEXT))
    behind = TEXT.encode() + b"# check fb7515c8f1bea856\n"
    assert _toml(behind) == _toml(TEXT.encode())
    with pytest.raises(ValueError, match="its checksum is wrong"):
        _toml(behind.replace(b"3", b"4", 1))
    with pytest.raises(ValueError, match="no object"):
        checked.decode(b"[]")


def test_settings_that_are_cut_anywhere_are_damaged(tmp_path: Path) -> None:
    """At the end of a line, too, where what is left is TOML."""
    path, data = tmp_path / "sft.toml", checked.with_first_line(TEXT)
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"sft.toml is damaged: "):
            read_settings(path)
    path.write_bytes(data)
    assert read_settings(path) == tomli.loads(TEXT)
