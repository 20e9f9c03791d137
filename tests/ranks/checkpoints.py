"""Two real ranks that save and load: `python -m tests.ranks.checkpoints DIRECTORY`, with a checkpoint in its `one`."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.config import CkptConfig
from holdfast.errors import CheckpointError, HoldfastError, Stopped
from holdfast.remote.uploader import CLOSE_S
from holdfast.trainer.checkpoint import dcp
from holdfast.trainer.checkpoint.checkpointer import Checkpointer, load_state_with_optimizer, save_state
from holdfast.trainer.checkpoint.commit import Storage
from holdfast.trainer.checkpoint.state import ObjectsState
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.saving import Saver
from holdfast.trainer.stop import StopRequest
from tests.builders.train_states import copied, held_writes, same
from tests.ranks.two import run_on_ranks

Objects = dict[str, Any]
WIDTH = 256


def make_objects(seed: int, mesh: DeviceMesh | None = None) -> Objects:
    """A module, sharded over the mesh if there is one, its optimizer and a counter."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 3))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01), "progress": {"step": 0}}


def train(objects: Objects, steps: int = 1) -> None:
    """Real steps: forward, backward, update; over ranks these are collectives of the default group."""
    for _ in range(steps):
        objects["optimizer"].zero_grad()
        objects["model"](torch.randn(4, WIDTH)).square().mean().backward()
        objects["optimizer"].step()
        objects["progress"]["step"] += 1


def whole(objects: Objects) -> dict[str, Tensor]:
    """Every tensor in full. Collective."""
    tensors = {name: tensor.detach() for name, tensor in ObjectsState(objects).tensors().items()}
    return {name: (one.full_tensor() if isinstance(one, DTensor) else one).clone() for name, one in tensors.items()}


def names_in(directory: Path) -> list[str]:
    dist.barrier()
    names = sorted(path.name for path in directory.iterdir()) if directory.exists() else []
    dist.barrier()
    return names


def message_of(action: Callable[[], object]) -> str:
    try:
        action()
    except HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _Upload(Storage):
    """A storage whose last upload lands or not."""

    def __init__(self, mark: Path, *, has_landed: bool) -> None:
        super().__init__(close_s=CLOSE_S)
        self._mark = mark
        self._has_landed = has_landed

    def close(self, timeout_s: float) -> None:
        if not self._has_landed:
            raise CheckpointError(f"given up after {timeout_s > 0}")
        self._mark.touch()


class Scenarios:
    """What the ranks do; every method returns what its rank saw."""

    def __init__(self, directory: Path, mesh: Mesh) -> None:
        self.directory = directory
        self.mesh = mesh
        self.rank = mesh.rank

    def _begin(self, name: str, *, steps: int = 1) -> tuple[Objects, Path]:
        """Return objects that were trained for some steps, and a directory."""
        objects = make_objects(0, self.mesh.device_mesh)
        train(objects, steps)
        return objects, self.directory / name

    def saves_behind_training(self) -> dict[str, Any]:
        """Collectives of training on the default group while a save goes on in its own."""
        objects, place = self._begin("behind", steps=2)
        with pytest.MonkeyPatch.context() as patch, held_writes(patch) as held, Checkpointer(place, objects) as saving:
            saving.save(2)
            saved = copied(ObjectsState(objects).tensors())
            numbers = torch.random.get_rng_state()
            train(objects)
            held.release()
            train(objects, 5)
            saving.save(3)
            staged = sum(buffer.nbytes for buffer in saving._stager._buffers.values())
        other = make_objects(1, self.mesh.device_mesh)
        with Checkpointer(place, other) as loading:
            step = loading.load(2)
        total = sum(tensor.numel() * tensor.element_size() for tensor in whole(objects).values())
        return {
            "step": step, "is_equal": same(copied(ObjectsState(other).tensors()), saved),
            "is_random_equal": torch.equal(torch.random.get_rng_state(), numbers), "progress": other["progress"],
            "moved_on": not same(copied(ObjectsState(objects).tensors()), saved), "staged_share": staged / total,
            "largest_file_share": max(p.stat().st_size for p in (place / "step_2/trainer").glob("*.distcp")) / total,
        }  # fmt: skip

    def one_rank_fails(self) -> dict[str, Any]:
        """EIO while rank 1 writes its shard."""
        objects, place = self._begin("fails")
        checkpointer = Checkpointer(place, objects)

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        with pytest.MonkeyPatch.context() as patch:
            if self.rank == 1:
                patch.setattr(dcp.os, "write", broken)
            checkpointer.save(1)
            train(objects)
            checkpointer.wait()
        told = message_of(checkpointer.poll)
        left = names_in(place)
        checkpointer.save(2)
        checkpointer.close()
        return {"told": told, "left": left, "then": names_in(place)}

    def one_rank_cannot_copy(self) -> dict[str, Any]:
        """Rank 1 has no memory for the copy that is written behind the training."""
        objects, place = self._begin("copies")
        optimizers = [thing for thing in objects.values() if isinstance(thing, torch.optim.Optimizer)]
        checkpointer = Checkpointer(place, objects, updated_by=optimizers, on_failure="warn")

        def fails(*_: object) -> None:
            raise MemoryError("no room for a copy")

        with pytest.MonkeyPatch.context() as patch:
            if self.rank == 1:
                patch.setattr(checkpointer._stager, "stage", fails)
            checkpointer.save(1)
            checkpointer.wait()
        train(objects)
        checkpointer.save(2)
        checkpointer.close()
        return {"left": names_in(place)}

    def ranks_lose_step(self) -> dict[str, Any]:
        """Each saves what it takes for the step; that cannot come right again, whatever `on_failure` says."""
        objects, place = self._begin("steps", steps=0)
        checkpointer = Checkpointer(place, objects, save_async=False, on_failure="warn")
        return {"told": message_of(lambda: checkpointer.save(5 + self.rank)), "left": names_in(place)}

    def changes_its_number(self) -> dict[str, Any]:
        """Load what one process saved, save it again, and save a trained state for one process to load."""
        objects = make_objects(5, self.mesh.device_mesh)
        step = load_state_with_optimizer(self.directory / "one", objects)
        kinds = sorted({type(tensor).__name__ for tensor in ObjectsState(objects).tensors().values()})
        save_state(self.directory / "two", objects, step=step)
        train(objects, 2)
        save_state(self.directory / "trained", objects, step=step + 2)
        full = whole(objects)
        if self.rank == 0:
            torch.save(full, self.directory / "trained.pt")
        return {"step": step, "kinds": kinds, "progress": objects["progress"]}

    def damage_is_told_to_all(self) -> dict[str, Any]:
        """Only rank 0 verifies."""
        objects, place = self._begin("damaged", steps=0)
        with Checkpointer(place, objects) as checkpointer:
            checkpointer.save(1)
        dist.barrier()
        if self.rank == 0:
            path = place / "step_1" / "trainer" / "__1_0.distcp"
            path.write_bytes(path.read_bytes()[:-1])
        dist.barrier()
        with Checkpointer(place, objects) as checkpointer:
            return {"told": message_of(lambda: checkpointer.load(1)), "auto": message_of(checkpointer.load)}

    def one_rank_is_asked_to_stop(self) -> dict[str, Any]:
        """A signal that reaches rank 1 alone stops both after one save."""
        (objects, place), stop = self._begin("asked", steps=0), StopRequest()
        saver = Saver(Checkpointer(place, objects), CkptConfig(), self.mesh, max_steps=10, committed=None, stop=stop)
        asked = [saver.is_asked_to_stop()]
        train(objects)
        saver.after_step(1, {})
        if self.rank == 1:
            stop.ask(10)
        asked.append(saver.is_asked_to_stop())
        try:
            saver.stop(1, {"loss": 1.0})
        except Stopped as stopped:
            return {"asked": asked, "code": stopped.exit_code, "message": str(stopped), "left": names_in(place)}
        return {}

    def all_wait_for_the_upload(self) -> dict[str, Any]:
        """Rank 0 alone uploads, and both stop with what became of that."""
        ends = []
        for name, has_landed in (("landed", True), ("lost", False)):
            (objects, place), stop = self._begin(name), StopRequest()
            upload = _Upload(place / "uploaded", has_landed=has_landed)
            storage = upload if self.rank == 0 else Storage(close_s=CLOSE_S)
            config = CkptConfig(dir="memory://store")
            checkpointer = Checkpointer(place, objects)
            saver = Saver(checkpointer, config, self.mesh, max_steps=10, committed=0, stop=stop, storage=storage)
            stop.ask(15)
            saver.is_asked_to_stop()
            ends.append(message_of(lambda: saver.stop(1, {})))  # noqa: B023 - called at once
            ends.append((place / "uploaded").exists())
        return {"ends": ends}

    def clocks_differ(self) -> dict[str, Any]:
        """By the clock of rank 1 no time passes; rank 0's decides."""
        objects, place = self._begin("clock", steps=0)
        with Checkpointer(place, objects) as checkpointer:
            config = CkptConfig(every_minutes=1e-9 if self.rank == 0 else 1e9)
            saver = Saver(checkpointer, config, self.mesh, max_steps=10, committed=None, stop=StopRequest())
            saver.is_asked_to_stop()
            saver.after_step(1, {})
        return {"left": names_in(place)}


def _work(mesh: Mesh, directory: Path) -> dict[str, Any]:
    scenarios = Scenarios(directory, mesh)
    names = [name for name, thing in vars(Scenarios).items() if callable(thing) and not name.startswith("_")]
    return {name: getattr(scenarios, name)() for name in names}


if __name__ == "__main__":
    run_on_ranks(_work)
