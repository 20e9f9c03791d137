"""Small files with a checksum: of a damaged byte they say nothing that was not written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tomli

from holdfast.run import checked

VALUES = {"run_id": "0a1b", "created_unix_s": 1795640000, "rewinds": [2, 4], "lr": 1e-05, "nested": {"none": None}}
TEXT = 'seed = 3\n\n[optim]\nlr = 1e-05\nschedule = "cosine"\n'


def _toml(data: bytes) -> object:
    checked.check_last_line(data)
    return tomli.loads(data.decode())


@pytest.mark.parametrize(
    ("data", "read"), [(checked.encode(VALUES), checked.decode), (checked.with_last_line(TEXT), _toml)]
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
    assert _toml(TEXT.encode()) == _toml(checked.with_last_line(TEXT))
    with pytest.raises(ValueError, match="no object"):
        checked.decode(b"[]")
