"""Two real ranks that load a model, and note how much they read: `… tests.ranks.initial_weights MODEL DIRECTORY`."""

from pathlib import Path
from typing import Any, Self

from torch import Tensor

from holdfast.config.training import TrainedModelConfig
from holdfast.trainer.checkpoint import init_from
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.lora import whole_tensors
from holdfast.trainer.model.policy import build_policy
from tests.ranks.two import run_on_ranks


class CountedSlice:
    def __init__(self, name: str, inner: Any) -> None:
        self._name, self._inner = name, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __getitem__(self, region: Any) -> Tensor:
        part = self._inner[region]
        CountedFile.read[self._name] = CountedFile.read.get(self._name, 0) + part.numel()
        return part


class CountedFile:
    """A safetensors file that is read as ever, and notes how much of each tensor was."""

    read: dict[str, int] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._file = open_file(*args, **kwargs)

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *ended: object) -> None:
        self._file.__exit__(*ended)

    def keys(self) -> list[str]:
        return self._file.keys()

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(name, self._file.get_slice(name))


open_file = init_from.safe_open


def _work(mesh: Mesh, model_dir: Path, _: Path) -> dict[str, Any]:
    init_from.safe_open = CountedFile  # type: ignore[assignment,misc]
    policy = build_policy(TrainedModelConfig(name=str(model_dir)), mesh, seed=0)
    return {"read": dict(CountedFile.read), "weights": dict(whole_tensors(policy.hf_model, keep=True))}


if __name__ == "__main__":
    run_on_ranks(_work)
