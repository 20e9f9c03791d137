"""Safetensors files in the Hugging Face layout: `model.safetensors`, or numbered files and an index."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

MAX_FILE_BYTES = 4 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def mode_of_new_files() -> int:
    """Return the mode that `open` gives a new file under the umask of this process."""
    # Asking with `os.umask` would change it for other threads meanwhile.
    umask = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 0o666 & ~int(umask[1], 8) if umask else 0o600


class SafetensorsWriter:
    """Writes tensors that come one by one, a file whenever enough are together.

    Never holds more than one file's tensors; the files get their names when all are written.
    Counts tensors, their elements and their bytes.
    """

    def __init__(self, directory: Path, *, max_file_bytes: int | None = None, name: str = "model") -> None:
        """Args: max_file_bytes: no file is larger, unless one tensor alone is; unset: MAX_FILE_BYTES."""
        self._directory = directory
        self._name = name
        self._max_file_bytes = MAX_FILE_BYTES if max_file_bytes is None else max_file_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._files: list[tuple[Path, list[str]]] = []
        self.num_tensors = 0
        self.num_elements = 0
        self.num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one contiguous CPU tensor."""
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._waiting_bytes + size > self._max_file_bytes:
            self._write_waiting()
        self._waiting[name] = tensor
        self._waiting_bytes += size
        self.num_tensors += 1
        self.num_elements += tensor.numel()
        self.num_bytes += size

    def close(self) -> None:
        """Write what is left and give the files their usual names, with an index where there are several."""
        self._write_waiting()
        if len(self._files) == 1:
            self._files[0][0].rename(self._directory / f"{self._name}.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, start=1):
            final = f"{self._name}-{number:05d}-of-{len(self._files):05d}.safetensors"
            path.rename(self._directory / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        (self._directory / f"{self._name}.safetensors.index.json").write_bytes(msgspec.json.encode(index))

    def _write_waiting(self) -> None:
        path = self._directory / f"part-{len(self._files)}.safetensors"
        save_file(self._waiting, path, metadata={"format": "pt"})
        path.chmod(mode_of_new_files())  # safetensors writes for the owner alone; the server may be another user
        self._files.append((path, list(self._waiting)))
        self._waiting, self._waiting_bytes = {}, 0
