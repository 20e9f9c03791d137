"""Two real ranks that load a model, and note how much they read: `… tests.ranks.initial_weights MODEL DIRECTORY`."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from holdfast.config.training import TrainedModelConfig
from holdfast.trainer.checkpoint import init_from
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.lora import whole_tensors
from holdfast.trainer.model.policy import build_policy
from tests.ranks.two import run_on_ranks

READ = Counter[str]()
open_file = init_from.safe_open


class CountedSlice:
    def __init__(self, name: str, inner: Any) -> None:
        self._name, self._inner = name, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __getitem__(self, region: Any) -> Tensor:
        part = self._inner[region]
        READ[self._name] += part.numel()
        return part


@contextmanager
def counted_file(*args: Any, **kwargs: Any) -> Iterator[SimpleNamespace]:
    """Open a safetensors file that is read as ever, and note how much of each tensor is."""
    with open_file(*args, **kwargs) as file:
        yield SimpleNamespace(keys=file.keys, get_slice=lambda name: CountedSlice(name, file.get_slice(name)))


def _work(mesh: Mesh, model_dir: Path, _: Path) -> dict[str, Any]:
    init_from.safe_open = counted_file  # type: ignore[assignment,misc]
    policy = build_policy(TrainedModelConfig(name=str(model_dir)), mesh, seed=0)
    return {"read": dict(READ), "weights": dict(whole_tensors(policy.hf_model, keep=True))}


if __name__ == "__main__":
    run_on_ranks(_work)
