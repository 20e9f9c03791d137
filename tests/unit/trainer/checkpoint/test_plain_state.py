"""State of plain PyTorch objects: every optimizer resumes bit for bit, and what cannot be saved is named."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.errors import CheckpointError
from holdfast.run.checkpoints import TRAINER_DIR
from holdfast.trainer.checkpoint.checkpointer import load_state_with_optimizer, save_state
from holdfast.trainer.checkpoint.state import ObjectsState, decode, encode
from tests.builders.train_states import copied, same
from tests.conftest import ModelFactory

MakeOptimizer = Callable[[nn.Module], Optimizer]


class Net(nn.Module):
    """Dropout, batch statistics, a tied weight, a frozen one, one that gets no gradient, a transient buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.scalar = nn.Parameter(torch.randn(()))
        self.register_buffer("transient", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(x)))) * self.frozen * self.scalar


def make_net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def step(model: nn.Module, optimizer: Optimizer) -> float:
    """In the order of most loops: gradients are still there afterwards."""
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def everything(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, bytes]]:
    """All tensors and settings as bytes, read by PyTorch's own means."""
    found = [(name, tensor.detach().numpy().tobytes()) for name, tensor in model.state_dict().items()]
    saved = optimizer.state_dict()
    for number, state in saved["state"].items():
        for key, value in sorted(state.items()):
            data = value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode()
            found.append((f"{number}.{key}", data))
    return [*found, ("groups", repr(saved["param_groups"]).encode())]


def tuned(kind: Callable[..., Optimizer], **options: Any) -> MakeOptimizer:
    return lambda model: kind(model.parameters(), **options)


def in_two_groups(model: nn.Module) -> Optimizer:
    thin = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    wide = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    return torch.optim.AdamW([{"params": thin, "weight_decay": 0.0}, {"params": wide}], lr=0.01, betas=(0.8, 0.9))


class Counting(torch.optim.SGD):
    """State that is no tensor, and that decides what a step does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["calls"] = state.get("calls", 0) + 1
                    state["history"] = (*state.get("history", ()), state["calls"])
                    parameter.grad.div_(state["calls"])
        return super().step(closure)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD momentum": tuned(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW fused": tuned(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW tensor lr": tuned(torch.optim.AdamW, lr=torch.tensor(0.01)),
    "AdamW groups": in_two_groups,
    "Adagrad": tuned(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3),
    "Adafactor": tuned(torch.optim.Adafactor, lr=0.01),
    "state without tensors": tuned(Counting, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("done", [0, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_resumes_bit_for_bit(kind: str, done: int, tmp_path: Path) -> None:
    """Also one saved before its first step: saving must neither make its state nor guess it."""

    def start(seed: int) -> tuple[nn.Module, Optimizer]:
        model = make_net(seed)
        return model, OPTIMIZERS[kind](model)

    model, optimizer = start(0)
    straight = [step(model, optimizer) for _ in range(done + 3)]
    expected = everything(model, optimizer)

    model, optimizer = start(0)
    losses = [step(model, optimizer) for _ in range(done)]
    save_state(tmp_path / "saved", {"model": model, "optimizer": optimizer}, step=done)
    untouched = [step(model, optimizer) for _ in range(3)]
    assert losses + untouched == straight and everything(model, optimizer) == expected, "saving changes nothing"

    for steps_before_loading in (0, 2):  # a fresh optimizer, and one with state to be replaced
        model, optimizer = start(1)
        for _ in range(steps_before_loading):
            step(model, optimizer)
        assert load_state_with_optimizer(tmp_path / "saved", {"model": model, "optimizer": optimizer}) == done
        assert losses + [step(model, optimizer) for _ in range(3)] == straight
        assert everything(model, optimizer) == expected


def test_tensors_have_the_names_of_their_parameters() -> None:
    model = make_net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    names = ObjectsState({"model": model, "optimizer": optimizer}).tensors().keys()
    assert {"model.first.weight", "model.norm.running_mean", "optimizer.model.first.weight.exp_avg"} <= names
    assert not names & {"model.last.weight", "model.transient", "optimizer.model.unused.exp_avg"}


def test_two_modules_with_the_same_parameter_names_share_an_optimizer(tmp_path: Path) -> None:
    def start(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        actor, critic = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizer = torch.optim.AdamW([*actor.parameters(), *critic.parameters()])
        (actor(torch.randn(3, 2)).sum() * 3 + critic(torch.randn(3, 2)).square().sum()).backward()
        optimizer.step()
        return {"actor": actor, "critic": critic, "optimizer": optimizer}

    saved, loaded = start(0), start(1)
    save_state(tmp_path / "saved", saved)
    load_state_with_optimizer(tmp_path / "saved", loaded)
    for name in ("actor", "critic"):
        assert everything(loaded[name], loaded["optimizer"]) == everything(saved[name], saved["optimizer"])


def test_a_scheduler_goes_on(tmp_path: Path) -> None:

    def start(seed: int) -> tuple[dict[str, Any], Callable[[], float]]:
        model = make_net(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)  # from an infinite best

        def advance() -> float:
            scheduler.step(step(model, optimizer))
            return optimizer.param_groups[0]["lr"]

        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, advance

    state, advance = start(0)
    save_state(tmp_path / "first", state)
    rates = [advance() for _ in range(3)]
    save_state(tmp_path / "third", state)
    rates += [advance() for _ in range(3)]
    for name, done in (("first", 0), ("third", 3)):
        state, advance = start(1)
        load_state_with_optimizer(tmp_path / name, state)
        assert rates[:done] + [advance() for _ in range(6 - done)] == rates


VALUES: dict[str, Any] = {
    "counters": {"step": 3, "loss": 0.1, "done": True, "none": None, "text": "é\n", "large": 2**80, "tiny": 5e-324},
    "tuples": {"state": (3, (1, 2), None), "list": [1, [2]], "empty": ()},
    "no numbers": {"best": float("inf"), "worst": float("-inf"), "none": float("nan")},
    "keys": {1: "a", (2, 3): {"b": 4}, None: 5, False: 6},
    "bytes": {"data": b"\x00\xff", "$tuple": [1], "$x": {"$float": "inf"}},
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_come_back_as_they_were(kind: str, tmp_path: Path) -> None:
    save_state(tmp_path / "saved", {"values": VALUES[kind]}, step=7)
    found: dict[Any, Any] = {"old": 1}
    assert load_state_with_optimizer(tmp_path / "saved", {"values": found}) == 7
    assert repr(found) == repr(VALUES[kind])


def test_counters_survive() -> None:
    assert decode(encode(Counter("aab"), "x")) == {"a": 2, "b": 1}


WITH_STATE = SimpleNamespace(state_dict=lambda: {"inner": [object()]}, load_state_dict=None)


class ExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 1}


def lbfgs_after_a_step() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return {"model": model, "optimizer": optimizer}


def with_global_state() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["shared"]["count"] = 1  # type: ignore[index]
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"thing": 3}, "'thing' is a int: a checkpoint takes modules, optimizers, dicts"),
        (lambda: {"a.b": {}}, "'a.b' has a dot"),
        (lambda: {"values": {"x": {"y": [torch.zeros(1)]}}}, r"values.x.y\[0\] is a Tensor.*\.tolist\(\)"),
        (lambda: {"values": {"when": {1, 2}}}, "values.when is a set"),
        (lambda: {"thing": WITH_STATE}, r"thing.inner\[0\] is a object"),
        (lambda: {"model": nn.Sequential(ExtraState(1, 1))}, "the module '0' .ExtraState. has extra state"),
        (lambda: {"model": nn.ParameterList([torch.eye(2).to_sparse()])}, "'model.0' is a sparse tensor"),
        (lbfgs_after_a_step, r"optimizer.state.model.weight.(al|old_dirs)\[0\] is a Tensor"),
        (with_global_state, "'optimizer' .SGD. keeps state under 'shared'"),
    ],
    ids=["number", "dot", "tensor", "set", "object", "extra state", "sparse", "LBFGS", "global state"],
)
def test_what_cannot_be_saved_is_refused(make: Callable[[], dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_state(tmp_path / "saved", make())
    assert not list(tmp_path.iterdir())


def whole_state(**other: Any) -> dict[str, Any]:
    model = make_net(0)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return {"model": model, "optimizer": optimizer, "progress": {"step": 1}} | other


def renamed(old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: part for name, part in whole_state().items()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: renamed("model", "net"), r"lacks .*net\.first\.bias"),
        (lambda: renamed("optimizer", "opt"), r"besides optimizer\."),
        (lambda: renamed("progress", "count"), r"\['count', 'optimizer'\]"),
        (lambda: whole_state(model=nn.Linear(2, 2)), "does not fit this model"),
        (lambda: whole_state(extra={}), "the names that it was saved with"),
    ],
    ids=["model", "optimizer", "dict", "another model", "one more"],
)
def test_other_names_are_refused(make: Callable[[], dict[str, Any]], message: str, tmp_path: Path) -> None:
    save_state(tmp_path / "saved", whole_state())
    state = make()
    before = copied(ObjectsState(state).tensors())
    with pytest.raises(CheckpointError, match=message):
        load_state_with_optimizer(tmp_path / "saved", state)
    assert same(before, copied(ObjectsState(state).tensors()))


def test_another_number_of_groups_is_refused(tmp_path: Path) -> None:
    model = make_net(0)
    save_state(tmp_path / "saved", {"model": model, "optimizer": in_two_groups(model)})
    one = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(CheckpointError, match="'optimizer' of the checkpoint has 2 parameter groups, this one 1"):
        load_state_with_optimizer(tmp_path / "saved", one)


def test_what_holds_weights_alone_is_no_full_state(tiny_model: ModelFactory, tmp_path: Path) -> None:
    save_state(tmp_path / "saved", {"model": nn.Linear(1, 1)})
    (tmp_path / "saved" / TRAINER_DIR).rename(tmp_path / "dcp")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "weights.pt")
    for path, found in (
        (tiny_model(), "Hugging Face"),
        (tmp_path / "dcp", "torch.distributed.checkpoint"),
        (tmp_path / "weights.pt", "pickle of torch.save"),
        (tmp_path / "none", "no such file or directory"),
    ):
        with pytest.raises(CheckpointError, match=f"holds .*{found}.*optimizer and counters.*load_weights_only"):
            load_state_with_optimizer(path, {"model": nn.Linear(1, 1)})


def test_a_state_has_a_directory_of_any_name_and_is_not_written_over(tmp_path: Path) -> None:
    state, best = whole_state(), tmp_path / "deep" / "best"
    save_state(str(best), state, step=4)
    with pytest.raises(Exception, match="best exists already"):
        save_state(best, state)
    assert [*best.parent.iterdir()] == [best]
    assert load_state_with_optimizer(best, state) == 4


_PROGRAM = """
import sys
import holdfast.trainer.checkpoint.checkpointer
import holdfast.trainer.checkpoint.init_from
print(*sorted({"transformers", "datasets", "peft", "vllm"} & sys.modules.keys()))
"""


@pytest.mark.launch
def test_checkpoints_of_any_loop_import_no_library_of_models() -> None:
    run = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
