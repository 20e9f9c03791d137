"""Drives one training step on tensors that have shapes and no numbers, as one of any number of ranks.

Policy, losses, forward and backward pass, clipping and optimizer are the trainer's own. Nothing of the model is read
except its config.json. Code that waits for numbers (losses, norms) gets zeros. The layout of samples in rows, which a
model is asked for with numbers, is found with a small real model of the same kind. The CPU stands for a GPU, with an
attention that keeps the tensors that FlashAttention keeps.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from holdfast.config import SftConfig, TrainerConfig, program_config
from holdfast.config.preference import DpoConfig
from holdfast.config.resolved import set_values
from holdfast.config.training import LoraConfig, ParallelConfig, SupervisedCommand, TrainedModelConfig, TrainingCommand
from holdfast.errors import HoldfastError
from holdfast.process.child import die_with_launcher, run_reporting_errors
from holdfast.process.gpus import VISIBLE_DEVICES_ENV
from holdfast.protocol.rollouts import Sampling
from holdfast.run.forecast import Collectives, Forecast, Load, NoForecast, Room, Step, crosses, depths, extended
from holdfast.trainer.data.packing import MicroBatch, Sample
from holdfast.trainer.forecast.tracker import StepTracker
from holdfast.trainer.mesh import Mesh, join_mesh
from holdfast.trainer.model import attention, expert_parallel
from holdfast.trainer.model.build import build_hf_model, trained_parameters, trained_tensors
from holdfast.trainer.model.decoder import freeze, reshard
from holdfast.trainer.model.logprobs import Reading
from holdfast.trainer.model.lora import adapter_parameters, whole_tensors
from holdfast.trainer.model.model_config import load_model_config, one_line
from holdfast.trainer.model.policy import Policy, build_policy, plan_samples, predict, supervised_step
from holdfast.trainer.model.structure import decoder_layers, pair_cost
from holdfast.trainer.model.tensor_names import DTYPES
from holdfast.trainer.optimizer import build_optimizer, clip_gradients, initial_moments, update_parameters
from holdfast.trainer.preference.pairs import Pair, plan_preferences
from holdfast.trainer.preference.reference import Reference
from holdfast.trainer.programs.dpo import dpo_objective
from holdfast.trainer.rl import batch
from holdfast.trainer.rl.auxiliary_models import Ema
from holdfast.trainer.rl.losses import build_policy_loss
from holdfast.trainer.rl.metrics import PolicyStatistics
from holdfast.trainer.rl.train_step import forward_backward

_SMALL_CHUNK = 256
_ROWS = 2  # the first, and the last: with its own collectives, and beside the gradients of the first
_TOY = {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "vocab_size": 512,
}
"""Sizes that the layout does not depend on."""


class _NotDriven(HoldfastError):
    """No step of this kind, or with these settings, can be driven; the message says which."""


class _Unread(TorchDispatchMode):
    """Gives zeros where a program reads a number, and equal shares of rows where ranks look for theirs.

    The place of this rank in a mesh of experts is the first."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._share = mesh.sequence.size if mesh.sequence is not None else 1
        self._experts = tuple(mesh.expert_mesh.shape) if mesh.expert_mesh is not None else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return np.zeros((), dtype=str(args[0].dtype).removeprefix("torch.").replace("bfloat", "float")).item()
        if func is torch.ops.aten.nonzero.default and self._share > 1 and args[0].ndim == 1:
            return args[0].new_empty((args[0].shape[0] // self._share, 1), dtype=torch.long)
        if func is torch.ops.aten.nonzero.default and tuple(args[0].shape) == self._experts:
            return args[0].new_zeros((1, args[0].ndim), dtype=torch.long)
        return func(*args, **(kwargs or {}))


class _Lists(TorchFunctionMode):
    """Gives lists of zeros: `tolist` reads memory without an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            return np.zeros(tuple(args[0].shape), dtype=float if args[0].is_floating_point() else int).tolist()
        return func(*args, **(kwargs or {}))


class _Numbers(TorchDispatchMode):
    """Gives one number after the other where a program reads a number."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        self._numbers = iter(numbers)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return next(self._numbers)
        return func(*args, **(kwargs or {}))


class _EvenDispatch(expert_parallel.StableDispatch):
    """Sends equal shares of the pairs of token and expert to all ranks, and gets as many."""

    def _dispatch_tokens(
        self, hidden_states: Tensor, top_k_index: Tensor, num_local_experts: int, ep_group: Any, ep_size: int
    ) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
        pairs = top_k_index.numel()
        share = [(pairs + rank) // ep_size for rank in range(ep_size)]
        with _Numbers([*share, *share]):
            return super()._dispatch_tokens(hidden_states, top_k_index, num_local_experts, ep_group, ep_size)


class _Flash(torch.autograd.Function):
    """Allocates and keeps the tensors that `torch.nn.attention.varlen` does."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended, sums = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, attended, sums)
        return attended

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(given) for given in ctx.saved_tensors[:3])


def _attend(query: Tensor, key: Tensor, value: Tensor, *_: object, **_settings: object) -> Tensor:
    return _Flash.apply(query, key, value)  # type: ignore[return-value]


@contextmanager
def _dispatching_evenly() -> Iterator[None]:
    """Have the experts of models that are built in the block get equal shares."""
    dispatch = expert_parallel.StableDispatch
    expert_parallel.StableDispatch = _EvenDispatch  # type: ignore[misc]
    try:
        yield
    finally:
        expert_parallel.StableDispatch = dispatch  # type: ignore[misc]


@contextmanager
def _as_gpu() -> Iterator[None]:
    """Have the CPU stand for a GPU in the block."""
    kernel = replace(attention.KERNELS["cuda"], attend=_attend, is_usable=lambda _: True)
    attention.KERNELS["cpu"] = kernel
    try:
        yield
    finally:
        del attention.KERNELS["cpu"]


@contextmanager
def _ranks(parallel: ParallelConfig) -> Iterator[Mesh]:
    """Be the first of all ranks; nothing is sent."""
    world_size = parallel.world_size
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield join_mesh(parallel, rank=0, world_size=world_size, device=torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@contextmanager
def _config_of(config: PreTrainedConfig) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        yield directory


def with_layers(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """Return the config of a model with only the first `count` layers."""
    config = deepcopy(config)
    text = config.get_text_config()
    layers = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list | tuple) and len(value) == layers:
            setattr(text, name, value[:count])
    text.num_hidden_layers = count
    return config


def _whole(config: TrainedModelConfig, model_config: PreTrainedConfig) -> PreTrainedModel:
    """Return the whole model without memory."""
    with torch.device("meta"):
        return build_hf_model(AutoModelForCausalLM, config, model_config)


def _kinds(hf_model: PreTrainedModel) -> list[object]:
    """Return what tells the layers apart, in their order."""
    layers, model_config = decoder_layers(hf_model), hf_model.config
    named = getattr(model_config.get_text_config(), "layer_types", None) or [""] * len(layers)
    shapes = [tuple((name, tuple(one.shape)) for name, one in layer.named_parameters()) for layer in layers]
    return list(zip(shapes, named, strict=True))


def _sample_kind(config: TrainedModelConfig, model_config: PreTrainedConfig, count: int) -> Policy:
    """Return a small real policy of the same kind, which knows its layout."""
    toy = with_layers(model_config, count)
    text = toy.get_text_config()
    for name, value in _TOY.items():
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, min(value, getattr(text, name)))
    for one in {id(toy): toy, id(text): text}.values():
        one.pad_token_id = None
    parallel = ParallelConfig(num_ranks=1)
    with _config_of(toy) as name, _ranks(parallel) as mesh:
        small = config.model_copy(update={"name": name, "dtype": "float32", "lora": None, "init": "random"})
        try:
            return build_policy(small, mesh, seed=0, weights=False)
        except HoldfastError as error:
            raise type(error)(str(error).replace(name, config.name)) from error


class _Work(NamedTuple):
    """The work of a step.

    Attributes:
        rows, row_tokens: micro-batches of a rank in one update, and tokens of each.
        updates: of the step.
        run: drives one update, with some of the rows.
        measured_rows: that are read once more in a step, before the updates.
    """

    rows: int
    row_tokens: int
    updates: int
    run: Callable[[], object]
    measured_rows: int = 0


def _sample(length: int, prompt: int = 1, *, first: int = 0, names: Sequence[str] = ()) -> Sample:
    tokens, mask = np.ones(length, dtype=np.int32), np.arange(length) >= min(prompt, length - 1)
    tokens[0] = first
    return Sample(tokens, mask, {name: np.zeros(length, dtype=np.float32) for name in names})


def _sft(config: SftConfig, policy: Policy, mesh: Mesh) -> _Work:
    data, one = config.data, _sample(config.data.seq_len)
    rows = len(plan_samples([one] * data.batch_size, policy.layout, data, mesh))
    few = min(data.batch_size, min(rows, _ROWS) * data.micro_batch_size * mesh.data_size)
    tokens = min(data.micro_batch_size, data.batch_size) * data.seq_len
    return _Work(rows, tokens, 1, lambda: supervised_step(policy, [one] * few, data, mesh))


def _dpo(config: DpoConfig, policy: Policy, mesh: Mesh) -> _Work:
    data, side = config.data, _sample(config.data.seq_len)
    if config.loss.type == "kto":
        raise _NotDriven("loss.type = 'kto'")
    pairs = [Pair(side, side, number) for number in range(data.batch_size)]
    own = plan_preferences(pairs, policy.layout, data, mesh.data_size, share=False)[mesh.data_rank]
    few = min(len(pairs), min(len(own), _ROWS) * data.micro_batch_size * mesh.data_size)
    objective = dpo_objective(config, Reference(np.zeros((len(pairs), 2)), {}), mesh)
    objective = replace(objective, plan=plan_preferences)  # without a common prompt, which takes most
    tokens = 2 * min(data.micro_batch_size, data.batch_size) * data.seq_len
    return _Work(len(own), tokens, 1, lambda: objective.accumulate_gradients(policy, pairs[:few]))


def _tokens(minibatch: batch.Minibatch, indices: list[int]) -> int:
    return sum(len(minibatch.samples[index].token_ids) for index in indices)


def _rl(config: TrainerConfig, policy: Policy, mesh: Mesh, load: Load, measured: Sequence[Policy]) -> _Work:
    for key in ("critic", "reward_model", "distillation", "pretraining"):
        if getattr(config, key) is not None:
            raise _NotDriven(f"trainer.{key}")
    keys = [batch.SAMPLER_LOGPROB, batch.ADVANTAGE, batch.AGE]
    keys += [batch.REFERENCE_LOGPROB] if config.kl is not None else []
    updates, length = config.updates, load.seq_len or config.row_tokens
    keys += [batch.OLD_LOGPROB] if updates.epochs * updates.minibatches > 1 else []
    prompt = max(1, length - load.max_tokens) if load.max_tokens else 1
    count = load.rollouts or _ROWS * mesh.data_size * max(1, config.row_tokens // length)
    groups = [_sample(length, prompt, first=number, names=keys) for number in range(-(-count // load.group_size))]
    samples = [groups[number // load.group_size] for number in range(count)]
    layout = replace(policy.layout, shares=policy.layout.shares and config.share_prompts)
    epochs = batch.plan_epochs(samples, updates, row_tokens=config.row_tokens, layout=layout, mesh=mesh, seed=0, step=1)
    minibatch = max((one for epoch in epochs for one in epoch), key=lambda one: len(one.micro_batches))
    largest = max(minibatch.micro_batches, key=lambda one: _tokens(minibatch, one))
    few = replace(minibatch, micro_batches=[largest] * min(_ROWS, len(minibatch.micro_batches)))
    has_bonus = config.loss.entropy.coef > 0 or ":" in config.loss.type
    reading = Reading(Sampling(**load.distribution), entropy_gradient=has_bonus)  # type: ignore[arg-type]

    def build() -> MicroBatch:
        return few.build(largest, pack=layout.packs, device=mesh.device)

    @torch.no_grad()
    def measure(model: Policy) -> None:
        for _ in few.micro_batches:
            predict(model, build(), reading)
        reshard(model)

    def run() -> None:
        for model in measured:
            measure(model)
        statistics = PolicyStatistics([0], has_reference=config.kl is not None)
        forward_backward(policy, few, build_policy_loss(config.loss), mesh, statistics, reading=reading)

    rows = len(minibatch.micro_batches)
    return _Work(rows, build().input_ids_BL.numel(), sum(map(len, epochs)), run, rows * len(epochs[0]))


def _follow(policy: Policy, tracker: StepTracker) -> None:
    """Have the tracker know which micro-batch is computed, and in which direction."""
    layers = decoder_layers(policy.hf_model)

    def begin(*_: object) -> None:
        if torch.is_grad_enabled():
            tracker.retag([parameter.grad for parameter in policy.parameters()], "gradients")
            tracker.begin("forward", tracker.row + 1)

    def end(*_: object) -> None:
        if torch.is_grad_enabled():
            tracker.begin("backward", tracker.row)

    def middle(_module: nn.Module, _args: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if tracker.phase == "forward" and hidden.requires_grad:
            hidden.register_hook(lambda _: tracker.begin("backward of the lower layers", tracker.row))

    policy.register_forward_pre_hook(begin, prepend=True)
    policy.register_forward_hook(end)
    # The most is needed at the begin of the backward pass, or at its end: each is on a line of its own.
    layers[len(layers) // 2 - 1].register_forward_hook(middle)


def drive(
    config: TrainingCommand,
    policy: Policy,
    mesh: Mesh,
    tracker: StepTracker,
    load: Load,
    measured: Sequence[Policy] = (),
) -> tuple[Step, _Work]:
    """Take one step; return what it needed.

    Args:
        policy: under the tracker since it was built.
        load: of a step of `rl`.
        measured: models that read every micro-batch before the update.
    """
    text = policy.hf_model.config.get_text_config()
    tracker.know(policy, vocabulary=text.vocab_size, chunk=config.model.head_chunk_tokens)
    _follow(policy, tracker)
    tracker.begin("moments")
    optimizer = build_optimizer(policy.hf_model, config.optim)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = initial_moments(optimizer, parameter)
    tracker.begin("experience")
    if isinstance(config, SftConfig):
        work = _sft(config, policy, mesh)
    elif isinstance(config, DpoConfig):
        work = _dpo(config, policy, mesh)
    elif isinstance(config, TrainerConfig):
        work = _rl(config, policy, mesh, load, measured)
    else:
        raise _NotDriven(f"the program {config.program}")
    work.run()
    tracker.retag([parameter.grad for parameter in policy.parameters()], "gradients")
    rows = tracker.row
    tracker.begin("clipping")
    clip_gradients(policy, config.optim.max_grad_norm)
    tracker.begin("optimizer")
    update_parameters(optimizer, lr=config.optim.lr)
    published = 0
    if isinstance(config, TrainerConfig):
        tracker.begin("publishing")
        if config.model.lora is not None:
            published = sum(factor.numel() * 4 for factor in adapter_parameters(policy.hf_model).values())
        else:
            for _, tensor in whole_tensors(policy.hf_model, keep=True, dtype=DTYPES[config.model.compute_dtype]):
                published += tensor.nbytes
    return _step_of(tracker, policy, rows, work, published), work


def _step_of(tracker: StepTracker, policy: Policy, rows: int, work: _Work, published: int) -> Step:
    by_row, once = dict[int, Collectives](), Collectives()
    for (phase, row), sent in tracker.collectives.items():
        if phase == "experience":  # of the driven rows
            kinds = {kind: (calls // rows, size // rows) for kind, (calls, size) in sent.kinds.items()}
            once = once.plus(Collectives(kinds), times=work.measured_rows)
        elif phase == "publishing":
            once = once.plus(sent)
        elif phase not in ("parameters", "moments"):
            by_row[row] = by_row.get(row, Collectives()).plus(sent)
    peaks = {f"{phase} {row}" if row else phase: peak for (phase, row), peak in tracker.peaks.items()}
    return Step(
        peaks=peaks,
        first_row=by_row.get(1, Collectives()),
        last_row=by_row.get(rows, Collectives()),
        rest=by_row.get(0, Collectives()),
        once=once,
        parameters=sum(tensor.numel() for tensor in policy.hf_model.parameters()),
        trained=sum(tensor.numel() for tensor in trained_parameters(policy.hf_model).values()),
        published_bytes=published,
        kv_bytes=_kv_bytes(policy),
        heads=next(iter(policy.layout.heads)) if len(policy.layout.heads) == 1 else None,
    )


def _kv_bytes(policy: Policy) -> int | None:
    """Return the bytes of the engine's cache for a token, of attention with keys and values of every layer."""
    text = policy.hf_model.config.get_text_config().to_dict()  # whose attributes may refuse if layers differ
    if not policy.layout.packs or len(policy.layout.heads) != 1 or text.get("kv_lora_rank"):
        return None
    ((heads, key_heads),) = policy.layout.heads
    head_dim = text.get("head_dim") or policy.hf_model.config.get_text_config().hidden_size // heads
    return 2 * 2 * len(decoder_layers(policy.hf_model)) * key_heads * head_dim


class Planner:
    """Drives steps of one model with any settings."""

    def __init__(self, model: TrainedModelConfig, *, is_gpu: bool) -> None:
        """Find out the layout, and the experts to divide. Raise DataError if the model cannot be trained."""
        self._config = load_model_config(model.name)
        hf_model = _whole(model, self._config)
        self._kinds, self._is_gpu = _kinds(hf_model), is_gpu
        self._depths = depths(self._kinds)
        self.experts = expert_parallel.number_of_experts(hf_model)
        like = _sample_kind(model, self._config, self._depths[0] if self._depths else len(self._kinds))
        like.layout = replace(like.layout, pair_cost=pair_cost(hf_model))  # which fills rows
        self._like = like

    @property
    def model(self) -> str:
        """Class of the model."""
        return type(self._like.hf_model).__name__

    def forecast(self, config: TrainingCommand, load: Load) -> Forecast:
        """Return what a step of `config` needs on each rank. Raise _NotDriven if no such step can be driven."""
        layers = len(self._kinds)
        begin, end = self._depths or (layers, layers)
        step, work = self.driven(config, load, begin)
        fewer = step
        if end > begin:
            step, work = self.driven(config, load, end)
        while crosses(fewer, step) and 2 * end - begin < layers:
            begin, end, fewer = end, 2 * end - begin, step
            step, work = self.driven(config, load, end)
        if end < layers:
            step = extended(fewer, step, (begin, end), layers)
        return Forecast(
            model=self.model,
            ranks=config.parallel.world_size,
            rows=work.rows,
            row_tokens=work.row_tokens,
            updates=work.updates,
            step=step,
        )

    def driven(self, config: TrainingCommand, load: Load, count: int) -> tuple[Step, _Work]:
        """Return the step of the model with only its first `count` layers. Raise _NotDriven if it cannot be driven."""
        config = config.model_copy(deep=True)
        config.model.compile = False  # which changes only the memory of activations
        if config.parallel.cpu_offload:
            raise _NotDriven("parallel.cpu_offload")
        tracker, mkldnn, like = StepTracker(), torch.backends.mkldnn.enabled, self._like
        with ExitStack() as stack:
            name = stack.enter_context(_config_of(with_layers(self._config, count)))
            model = config.model.model_copy(update={"name": name})
            mesh = stack.enter_context(_ranks(config.parallel))
            if self._is_gpu:
                stack.enter_context(_as_gpu())
            torch.backends.mkldnn.enabled = False  # it has layouts of its own
            stack.callback(setattr, torch.backends.mkldnn, "enabled", mkldnn)
            for mode in (FakeTensorMode(allow_non_fake_inputs=True), _Unread(mesh), _Lists()):
                stack.enter_context(mode)
            stack.enter_context(tracker.watching())
            stack.enter_context(_dispatching_evenly())
            policy = build_policy(model, mesh, seed=0, weights=False, like=like)
            measured, averages = list[Policy](), None
            if isinstance(config, TrainerConfig):
                if config.kl is not None:
                    own = model.model_copy(update={"lora": None})
                    measured.append(build_policy(own, mesh, seed=0, weights=False, like=like))
                    freeze(measured[0])
                if config.updates.epochs * config.updates.minibatches > 1:
                    measured.append(policy)
                if config.ema is not None:
                    averages = Ema(trained_tensors(policy.hf_model), decay=config.ema.decay)
            found = drive(config, policy, mesh, tracker, load, measured)
            del averages  # until here it takes memory
        return found


_WAYS = 3


def ways_out(planner: Planner, config: TrainingCommand, load: Load, room: Room, prefix: str) -> dict[str, int]:
    """Return the cheapest changes of settings with which a rank has room, and what it needs then."""
    fitting = _fitting(planner, config, load, room, changes(config, load, experts=planner.experts))
    return {_flags(one.picked, prefix): one.peak[1].total for one in islice(fitting, _WAYS)}


def with_picks(planner: Planner, config: TrainingCommand, load: Load, room: Room, found: Forecast) -> Forecast:
    """Return the forecast with the cheapest change of open settings with which a rank has room; without it `found`."""
    picks = changes(config, load, only=room.open)
    fitting = next(_fitting(planner, config, load, room, picks), found)
    fitting.unpicked_bytes = found.peak[1].total
    return fitting


def _fitting(
    planner: Planner, config: TrainingCommand, load: Load, room: Room, of: Iterable[dict[str, Any]]
) -> Iterator[Forecast]:
    """Yield the forecasts with the changes of settings with which a rank has room."""
    for values in of:
        with suppress(HoldfastError, ValueError):
            changed = config.model_copy(deep=True)
            set_values(changed, values)
            found = planner.forecast(type(config).model_validate(changed.model_dump()), load)
            if room.fits(found):
                found.picked = values
                yield found


def changes(
    config: TrainingCommand, load: Load, *, only: Collection[str] | None = None, experts: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield changes of settings by dotted key, the cheapest first.

    Args:
        only: settings that may change; None: all.
        experts: which ranks can divide; 0: none.
    """
    less: dict[str, Any] = {}
    if not config.model.activation_checkpointing:
        less["model.activation_checkpointing"] = True
    if config.model.head_chunk_tokens > _SMALL_CHUNK:
        less["model.logits_chunk_tokens"] = _SMALL_CHUNK
    if isinstance(config, TrainerConfig):
        fewer = max(load.seq_len or 0, config.row_tokens // 4)
        less |= {"row_tokens": fewer} if fewer < config.row_tokens else {}
    elif isinstance(config, SupervisedCommand) and config.data.micro_batch_size > 1:
        less["data.micro_batch_size"] = 1
    less = {key: value for key, value in less.items() if only is None or key in only}
    yield from ({key: value} for key, value in less.items())
    if len(less) > 1:
        yield less
    ranks = gcd(experts, config.parallel.world_size // config.parallel.replicas) if experts else 1
    if ranks > 1 == config.parallel.expert_parallel and config.optim.type != "muon" and not config.model.compile:
        divided = {"parallel.expert_parallel": ranks}
        yield divided
        if less:
            yield less | divided
    is_wide = config.optim.moments_dtype == "float32" and config.optim.fits_bfloat16
    if only is None and config.model.lora is None and is_wide:
        narrow = {"optim.moments_dtype": "bfloat16"}
        yield narrow
        if less:
            yield less | narrow
    if config.model.lora is None and config.optim.type != "muon" and (only is None or "model.lora" in only):
        yield {"model.lora": LoraConfig().model_dump()}
    for times in (2, 4, 8) if only is None else ():
        yield {"parallel.num_ranks": times * config.parallel.ranks}


def _flags(values: dict[str, Any], prefix: str) -> str:
    flags = {f"--{prefix}{key}".replace("_", "-"): value for key, value in values.items()}
    return " ".join(
        flag if value is True or isinstance(value, dict) else f"{flag} {value}" for flag, value in flags.items()
    )


def main(program: str, load: str, room: str, prefix: str, path: str) -> None:
    """Write the forecast of the configuration on stdin to a file; if it has no `room`, with picks or ways out."""
    config = program_config(program).model_validate_json(sys.stdin.buffer.read())
    given, of = msgspec.json.decode(load, type=Load), msgspec.json.decode(room, type=Room)
    found: Forecast | NoForecast
    planner = Planner(config.model, is_gpu=config.parallel.device != "cpu")
    try:
        found = planner.forecast(config, given)
    except _NotDriven as error:
        found = NoForecast(str(error))
    except Exception as error:
        if isinstance(error, HoldfastError):
            raise
        found = NoForecast(f"{planner.model} ({type(error).__name__}: {one_line(error)})")
    if isinstance(found, Forecast) and not of.fits(found):
        found = with_picks(planner, config, given, of, found)
        if not found.picked:
            found.ways = ways_out(planner, config, given, of, prefix)
    Path(path).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    die_with_launcher()
    os.environ[VISIBLE_DEVICES_ENV] = ""  # FSDP would ask a GPU that is here
    run_reporting_errors(lambda: main(*sys.argv[1:]))
