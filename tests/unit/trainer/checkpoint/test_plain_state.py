"""State of plain PyTorch objects: every optimizer resumes bit for bit, and what cannot be saved is named."""

import enum
import subprocess
import sys
import tempfile
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.errors import CheckpointError
from holdfast.run.checkpoints import TRAINER_DIR
from holdfast.trainer.checkpoint.checkpointer import Checkpointer, load_state_with_optimizer, save_state
from holdfast.trainer.checkpoint.plain_values import decode, encode
from holdfast.trainer.checkpoint.state import ObjectsState
from tests.builders.train_states import copied, same
from tests.conftest import ModelFactory
from tests.runs.processes import HANG_S

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
    saved["param_groups"] = [sorted(group.items()) for group in saved["param_groups"]]
    return [*found, ("rest", repr({**saved, "state": None}).encode())]


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


class OwnState(torch.optim.SGD):
    """State that only its own `state_dict` tells: a number, and tensors large and small."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.calls, self.small, self.large = 0, torch.zeros(2), torch.zeros(600, 600)

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        self.small += self.calls
        self.large += self.small[0]
        for group in self.param_groups:
            group["lr"] = 0.1 / float(self.large[0, 0])
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls, "small": self.small, "large": self.large}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls, self.small, self.large = (state_dict.pop(name) for name in ("calls", "small", "large"))
        super().load_state_dict(state_dict)


class OfGroups(torch.optim.SGD):
    """Makes tensors in its groups, and lists of tensors among its state, at its first step, as Prodigy and SOAP do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["distance"] = group.get("distance", torch.zeros(())) + 0.5
            group["kind"] = torch.float32
            for parameter in group["params"]:
                if parameter.grad is not None:
                    factors = self.state[parameter].setdefault("factors", [torch.zeros_like(parameter)])
                    factors[0] += parameter.grad
                    parameter.grad.add_(factors[0] * group["distance"])
        return super().step(closure)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "own state_dict": tuned(OwnState, lr=0.1), "tensors of groups": tuned(OfGroups, lr=0.1, momentum=0.9),
    "SGD momentum": tuned(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "AdamW fused": tuned(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW tensor lr": tuned(torch.optim.AdamW, lr=torch.tensor(0.01)), "AdamW groups": in_two_groups,
    "Adagrad": tuned(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3),
    "Adafactor": tuned(torch.optim.Adafactor, lr=0.01), "state without tensors": tuned(Counting, lr=0.1, momentum=0.9),
}  # fmt: skip


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


_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.binary(max_size=9),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=9), st.sampled_from([torch.half, torch.Size([2, 3])]),
    st.lists(st.floats(width=16), max_size=5).map(lambda numbers: torch.tensor(numbers, dtype=torch.bfloat16)),
    st.lists(st.integers(0, 255), max_size=6).map(lambda numbers: torch.tensor([numbers], dtype=torch.uint8)),
)  # fmt: skip
_KEYS = st.one_of(st.text(max_size=4).filter(str.isprintable), st.integers(), st.sampled_from(["$tuple", "a.b", None]))
_NESTED = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5)),
        *(st.dictionaries(_KEYS | st.tuples(_KEYS), inner, max_size=3).map(kind) for kind in (dict, OrderedDict)),
        st.dictionaries(_KEYS, inner, max_size=3).map(lambda items: defaultdict(list, items)),
    ),
    max_leaves=12,
)


def alike(one: Any, other: Any) -> bool:
    """Whether two values have the same classes, orders and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if isinstance(one, dict):
        return alike(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other or repr(one) == repr(other)  # NaN


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(_KEYS, _NESTED, max_size=4))
def test_values_come_back_as_they_were(values: dict[Any, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        save_state(Path(directory) / "saved", {"values": values}, step=7)
        found: dict[Any, Any] = {"old": 1}
        assert load_state_with_optimizer(Path(directory) / "saved", {"values": found}) == 7
    assert alike(found, values)


class Place(NamedTuple):
    name: str
    tokens: Tensor


class Phase(enum.Enum):
    WARM = "warm"


class Parts(enum.Flag):
    FIRST = 1
    SECOND = 2


def test_values_keep_their_class(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "counter": Counter("aab"), "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(list, {3: [torch.arange(3)]}), "queue": deque([1, 2], maxlen=3),
        "place": Place("é", torch.tensor([1.0, float("nan")], dtype=torch.bfloat16)),
        "phase": [Phase.WARM, torch.float16, torch.Size([2, 3]), Parts.FIRST | Parts.SECOND, Parts(0)],
        "numbers": [np.float32(0.1), np.longdouble(1) / 3, np.int64(7), np.bool_(True), np.complex64(1j)],
        "views": [torch.arange(6.0).reshape(2, 3).t(), torch.tensor([1j]).conj(), torch.randn(700, 600).t()],
        "views[2]": torch.zeros(700, 600), "turned": torch.randn(2, 3, 4).transpose(0, 2),
        "numpy": np.random.default_rng(5).bit_generator.state, "torch": torch.Generator().manual_seed(3).get_state(),
        "empty": torch.zeros(0, 3, dtype=torch.int64), "large": {"a.b": torch.randn(600, 600)},
    }  # fmt: skip
    save_state(tmp_path / "saved", {"values": values})
    found: dict[str, Any] = {}
    load_state_with_optimizer(tmp_path / "saved", {"values": found})
    assert repr(found) == repr(values) and [*map(type, found.values())] == [*map(type, values.values())]
    for here, there in [
        *zip(found["views"], values["views"], strict=True),
        (found["large"]["a.b"], values["large"]["a.b"]),
    ]:
        assert torch.equal(here, there) and here.stride() == there.stride()
    assert decode(encode(Counter("aab"), "x")) == {"a": 2, "b": 1}
    document = {"$namedtuple": ["no_such_module:Thing", []]}
    with pytest.raises(CheckpointError, match="holds a no_such_module:Thing, which is not there"):
        decode(document)


class WithOwnState(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


@pytest.mark.parametrize("kind", [torch.optim.SGD, WithOwnState])
def test_parameters_of_no_module_and_orders_in_memory_come_back(kind: Any, tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        model, scale = make_net(1), torch.zeros((), requires_grad=True)
        best = {
            "best": model.state_dict(),
            "twice": [torch.zeros(2)] * 2,
        }  # in the memory of the model, or of each other
        return {"model": model, "optimizer": kind([*model.parameters(), scale], lr=0.1), "extra": best}

    saved, turned = make(), torch.arange(16.0).reshape(4, 4).t()
    saved["optimizer"].param_groups[0]["params"][-1].data.fill_(3)
    saved["extra"] |= {"best": {"first.weight": torch.full((4, 4), 7.0)}, "twice": [torch.ones(2), torch.zeros(2)]}
    saved["optimizer"].state[saved["model"].first.weight]["basis"] = turned
    with Checkpointer(tmp_path / "checkpoints", saved, check=make) as checkpointer:
        checkpointer.save(1)
    for present in ({}, {"basis": torch.zeros(4, 4)}):  # of an optimizer that has taken no step, and a step
        found = make()
        weight = found["model"].first.weight
        found["optimizer"].state[weight] = dict(present)
        with Checkpointer(tmp_path / "checkpoints", found) as checkpointer:
            assert checkpointer.load() == 1
        assert torch.equal(weight, saved["model"].first.weight) and found["extra"]["best"]["first.weight"][0, 0] == 7
        assert [one[0].item() for one in found["extra"]["twice"]] == [1, 0]
        scale = found["optimizer"].param_groups[0]["params"][-1]
        assert scale.item() == 3 and scale.requires_grad
        basis = found["optimizer"].state[weight]["basis"]
        assert torch.equal(basis, turned) and (kind is WithOwnState or basis.stride() == (1, 4))
    found["extra"]["scale"] = [scale]
    with pytest.raises(CheckpointError, match="'extra' holds a parameter that 'optimizer' trains and saves"):
        save_state(tmp_path / "refused", found)


@pytest.mark.parametrize("step_number", [7.0, True, -1, "7", None])
def test_a_step_is_an_integer_from_0(step_number: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "checkpoints", {"values": {"a": 1}}) as checkpointer:
        with pytest.raises(CheckpointError, match="a step must be an integer from 0, got "):
            checkpointer.save(step_number)
        checkpointer.save(np.int64(7))
        checkpointer.wait()
        assert checkpointer.load(np.int64(7)) == checkpointer.load() == 7


def test_buffers_are_copied_at_the_call_and_the_first_save_is_checked(tmp_path: Path) -> None:
    """`updated_by` copies the parameters later, when a forward pass may have changed the buffers."""

    def start(seed: int) -> dict[str, Any]:
        model = make_net(seed)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    state, other = start(0), start(1)
    optimizer = state["optimizer"]
    changed = threading.Event()
    with Checkpointer(tmp_path / "checkpoints", state, updated_by=[optimizer], check=lambda: start(2)) as checkpointer:
        step(state["model"], optimizer)
        checkpointer.save(1)
        stage = checkpointer._stage
        checkpointer._stage = lambda tensors: stage(tensors) if changed.wait(HANG_S) else {}
        step(state["model"], optimizer)
        seen = state["model"].norm.running_mean.clone()
        checkpointer.save(2)
        state["model"](torch.randn(8, 4))
        assert not torch.equal(seen, state["model"].norm.running_mean)
        changed.set()
    load_state_with_optimizer(tmp_path / "checkpoints/step_2", other)
    assert torch.equal(other["model"].norm.running_mean, seen)
    lossy = SimpleNamespace(state_dict=lambda: {"seen": next(counts)}, load_state_dict=lambda _: None)
    counts = iter(range(9))
    with pytest.raises(CheckpointError, match="does not bring everything back: .* lossy is not as saved"):
        Checkpointer(tmp_path / "lossy", {"lossy": lossy}, check=lambda: {"lossy": lossy}).save(1)


WITH_STATE = SimpleNamespace(state_dict=lambda: {"inner": [object()]}, load_state_dict=None)


class ExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 1}


class OfAnotherClass(Tensor):
    """A tensor of a class of its own, which does not say what it consists of."""


class TwoParts(Tensor):
    """A tensor that consists of two others, as quantized ones do."""

    @staticmethod
    def __new__(cls, low: Tensor, high: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(cls, low.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.low, self.high = low, high

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["low", "high"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


class Halved(torch.optim.SGD):
    """Keeps its state in a tensor of a class of its own, which only the optimizer can make."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                if "kept" not in self.state[parameter]:
                    self.state[parameter]["kept"] = TwoParts(*torch.zeros(2, *parameter.shape))
                kept = self.state[parameter]["kept"]
                kept.low.add_(parameter.grad)
                kept.high.sub_(kept.low)
                parameter.grad.add_(kept.high)
        return super().step(closure)


def test_tensors_of_classes_of_their_own_are_kept_by_their_parts(tmp_path: Path) -> None:
    def start(seed: int) -> tuple[nn.Module, Optimizer]:
        model = make_net(seed)
        return model, Halved(model.parameters(), lr=0.1)

    model, optimizer = start(0)
    losses = [step(model, optimizer) for _ in range(3)]
    save_state(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    losses += [step(model, optimizer) for _ in range(3)]
    model, optimizer = start(1)
    load_state_with_optimizer(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    assert [step(model, optimizer) for _ in range(3)] == losses[3:]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_state_of_another_optimizer_or_scheduler_is_refused_by_name(kind: Any, tmp_path: Path) -> None:
    def start(kind: Any, schedule: Any) -> dict[str, Any]:
        model = make_net(0)
        optimizer = kind(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "schedule": schedule(optimizer)}

    constant, linear = torch.optim.lr_scheduler.ConstantLR, torch.optim.lr_scheduler.LinearLR
    save_state(tmp_path / "saved", start(kind, constant))
    other = torch.optim.SGD if kind is torch.optim.AdamW else torch.optim.Adam
    with pytest.raises(
        CheckpointError, match=f"'optimizer' of the checkpoint is a {kind.__name__}, this one a {other.__name__}"
    ):
        load_state_with_optimizer(tmp_path / "saved", start(other, constant))
    stepped = {"model": (model := make_net(0)), "optimizer": OfGroups(model.parameters(), lr=0.1)}
    step(model, stepped["optimizer"])
    save_state(tmp_path / "stepped", {**stepped, "more": constant(stepped["optimizer"])})
    fresh = start(OfGroups, constant)
    with pytest.raises(CheckpointError, match=r"values of \['more', 'optimizer'\], this state has"):
        load_state_with_optimizer(tmp_path / "stepped", fresh)
    assert not fresh["optimizer"].state and "distance" not in fresh["optimizer"].param_groups[0], "it made its state"
    with pytest.raises(CheckpointError, match="'schedule' of the checkpoint is a ConstantLR, this one a LinearLR"):
        load_state_with_optimizer(tmp_path / "saved", start(kind, linear))


def with_global_state() -> dict[str, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["shared"]["count"] = 1  # type: ignore[index]
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(("make", "message"), [
    (lambda: {"thing": 3}, "'thing' is a int: a checkpoint takes modules, optimizers, dicts"),
    (lambda: {"a.b": {}}, "'a.b' has a dot"),
    (lambda: {"values": {"x": ["\ud800"]}}, r"values.x\[0\]: character 0 of '.ud800' is half of a surrogate pair"),
    (lambda: {"values": {"x": type("Pair", (tuple,), {"_fields": ()})()}}, "a Pair, which is not a class of the"),
    (lambda: {"values": {"x": defaultdict(lambda: 1)}}, "a defaultdict whose factory has no name"),
    (lambda: {"values": {"x": torch.zeros(1, device="meta")}}, "'values.x' is on the meta device"),
    (lambda: {"model": nn.ParameterList([torch.zeros(1).expand(3)])}, "'model.0' is a view that shows some numbers"),
    (lambda: {"group_1": {}}, "'group_1' stands for a parameter group"),
    (lambda: {"model": nn.ParameterList([torch.tensor([1j]).conj()])}, "'model.0' is a view that only notes"),
    (lambda: {"model": nn.Linear(1, 1, device="meta")}, "'model.weight' is on the meta device"),
    (lambda: {"model": nn.ParameterList([OfAnotherClass(torch.zeros(1))])}, "'model.0' is a OfAnotherClass"),
    (lambda: {"values": {"when": {1, 2}}}, "values.when is a set"),
    (lambda: {"thing": WITH_STATE}, r"thing.inner\[0\] is a object"),
    (lambda: {"model": nn.Sequential(ExtraState(1, 1))}, "the module '0' .ExtraState. has extra state"),
    (lambda: {"model": nn.ParameterList([torch.eye(2).to_sparse()])}, "'model.0' is a sparse tensor"),
    (with_global_state, "'optimizer' .SGD. keeps state under 'shared'"),
], ids=lambda value: value[:40] if isinstance(value, str) else "")  # fmt: skip
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


@pytest.mark.parametrize(("make", "message"), [
    (lambda: renamed("model", "net"), r"lacks .*net\.first\.bias"),
    (lambda: renamed("optimizer", "opt"), r"values of \['optimizer', 'progress'\]"),
    (lambda: renamed("progress", "count"), r"\['count', 'optimizer'\]"),
    (lambda: whole_state(model=nn.Linear(2, 2)), "does not fit this model"),
    (lambda: whole_state(extra={}), "the names that it was saved with"),
], ids=["model", "optimizer", "dict", "another model", "one more"])  # fmt: skip
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
    assert [*best.parent.iterdir()] == [best] and load_state_with_optimizer(best, state) == 4


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
