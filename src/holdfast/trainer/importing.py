"""Makes the first checkpoint of a run from a training state of another program, for `ckpt import`.

Parameters are matched by name and shape; settings that the source tells must be the run's. A difference is refused, or
listed if no setting can express it.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import get_parameter_names

from holdfast.config import DpoConfig, SftConfig
from holdfast.config.training import MuonConfig, SupervisedCommand, learning_rate, schedule_end
from holdfast.errors import CheckpointError, ConfigError
from holdfast.run.checkpoints import REFERENCE_MODEL_NAME, REFERENCE_NAME, TRAINER_DIR
from holdfast.run.run_dir import RunDir
from holdfast.run.weights import ADAPTER_CONFIG_NAME, PEFT_PREFIX, read_scaling
from holdfast.trainer.checkpoint.checkpointer import Checkpointer
from holdfast.trainer.checkpoint.commit import Attachment
from holdfast.trainer.checkpoint.dcp import some
from holdfast.trainer.checkpoint.init_from import fill_weights, load_weights_only, local_part
from holdfast.trainer.checkpoint.state import State, seed_everything
from holdfast.trainer.data.samples import fingerprint_samples, load_samples, load_tokenizer
from holdfast.trainer.foreign import MASTER, MOMENTS, ForeignState, TensorSource, read_foreign
from holdfast.trainer.mesh import Mesh, open_mesh
from holdfast.trainer.model.build import trained_parameters, trained_tensors
from holdfast.trainer.model.lora import Adapters, digest_of, is_adapted
from holdfast.trainer.model.policy import Policy, build_policy
from holdfast.trainer.model.publish import WeightPublisher
from holdfast.trainer.model.structure import base_tensors
from holdfast.trainer.optimizer import build_optimizer
from holdfast.trainer.preference.pairs import fingerprint_preferences, split_preferences
from holdfast.trainer.preference.reference import ReferenceTable
from holdfast.trainer.saving import identity_of
from holdfast.trainer.session import build_model
from holdfast.trainer.state import Progress, TrainState
from holdfast.trainer.survey import load_preferences

# transformers 5, Trainer.get_decay_parameter_names: without weight decay, and so in the second group.
_NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
_SAME = 1e-6


@dataclass(frozen=True)
class Imported:
    """The result of an import: the new checkpoint, what was taken, and what was not."""

    checkpoint: str
    step: int
    taken: list[str]
    left: list[str]


def import_state(config: SupervisedCommand, source: Path) -> Imported:
    """Commit the state in `source` as the first checkpoint of the run of `config`. `config`: resolved; its output
    directory is locked and has no run. Raise CheckpointError if the source cannot be read, is not whole, or does not
    fit the model or the settings; ConfigError if the settings cannot express the source; SaveError if the storage
    failed; nothing is left of the checkpoint."""
    if isinstance(config.optim, MuonConfig) or not isinstance(config, SftConfig | DpoConfig):
        raise ConfigError("only states of AdamW for sft and dpo can be taken: --ckpt.init-from takes weights alone")
    foreign = read_foreign(source)
    _refuse_other_adapter(config, source)
    if foreign.step >= config.max_steps:
        raise ConfigError(f"{source} is of step {foreign.step}, and max_steps is {config.max_steps}: raise --max-steps")
    run_dir = RunDir(config.output_dir)
    with _one_rank(config) as mesh:
        tokenizer = load_tokenizer(config.model.tokenizer_name)
        data, number, table = _data_of(config, tokenizer, mesh)
        policy, layout = build_model(config, mesh, build_policy)
        attachments = {} if table is None else _with_reference(config, table, policy, mesh)
        optimizer = build_optimizer(policy.hf_model, config.optim)
        parts: dict[str, State] = {}
        adapters = None
        if is_adapted(policy.hf_model):
            parts["base"] = adapters = Adapters(policy.hf_model, layout, base_name=config.model.name)
        progress = Progress(foreign.step, foreign.step * config.data.batch_size, _tokens_of(foreign))
        state = TrainState(policy, optimizer, progress, parts)
        tensors = trained_tensors(policy.hf_model)
        if isinstance(foreign.weights, TensorSource):
            dtypes = fill_weights(tensors, foreign.weights, str(source), layout=layout)
        else:
            dtypes = load_weights_only(tensors, foreign.weights, layout=layout)
        if table is not None and digest_of(base_tensors(policy.hf_model) | tensors) == table.model:
            raise ConfigError(
                f"the reference would be the weights of step {foreign.step}: give the model that {source} began with "
                "as --model.name, or the reference of that run as --reference-model"
            )
        places = _places_of(policy.hf_model, foreign)
        has_masters = _fill_moments(places, foreign, state.tensors(), tensors)
        left = _compare(config, foreign, places, optimizer, trained_parameters(policy.hf_model))
        left += _list_rest(config, foreign, number)
        if torch.bfloat16 in {there for there, _ in dtypes} and not has_masters:
            left.append("weights in float32: the source has them in bfloat16 only, and they are widened")
        dtype = config.model.compute_dtype
        publisher = WeightPublisher(run_dir, policy, tokenizer, mesh, dtype=dtype, layout=layout, adapters=adapters)
        identity = identity_of(config, run_dir, publisher, layout, data)
        seed_everything(config.seed, step=foreign.step, rank=0)
        with Checkpointer(run_dir.checkpoints, state, save_async=False, identity=identity) as checkpointer:
            checkpointer.save(foreign.step, attachments=attachments)
    taken = [f"step {foreign.step}", f"weights: {len(tensors):,} tensors", f"AdamW's state: {len(places):,} parameters"]
    if foreign.rate is not None:
        taken.append(f"learning rate of step {foreign.step + 1}: {foreign.rate:g}, that of these settings")
    return Imported(str(run_dir.checkpoint(foreign.step)), foreign.step, taken, left)


@contextmanager
def _one_rank(config: SupervisedCommand) -> Iterator[Mesh]:
    """Yield the ranks of a trainer of one process on the CPU: this one. Any number of ranks loads its checkpoint."""
    own = config.parallel.model_copy(
        update={
            "device": "cpu",
            "num_ranks": 1,
            "nodes": 1,
            "replicas": 1,
            "sequence_parallel": 1,
            "expert_parallel": 1,
        }
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with open_mesh(own) as mesh:
            yield mesh
    finally:
        dist.destroy_process_group()


def _data_of(
    config: SftConfig | DpoConfig, tokenizer: PreTrainedTokenizerBase, mesh: Mesh
) -> tuple[str, int, ReferenceTable | None]:
    """Return fingerprint and number of the training samples, and an empty table of the reference, if there is one."""
    if isinstance(config, SftConfig):
        samples, _ = load_samples(config.data, tokenizer, seed=config.seed, mesh=mesh)
        return fingerprint_samples(samples), len(samples), None
    pairs = list(load_preferences(config, tokenizer, mesh=mesh))
    training, _ = split_preferences(pairs, config.data.validation_fraction, seed=config.seed)
    table = ReferenceTable(np.full((len(pairs), 2), np.nan), fingerprint_preferences(pairs))
    return fingerprint_preferences(training), len(training), table if config.has_reference else None


def _with_reference(
    config: SupervisedCommand, table: ReferenceTable, policy: Policy, mesh: Mesh
) -> dict[str, Attachment]:
    """Return the files of the reference, whose numbers the run computes: `policy` as it began, or another model."""
    assert isinstance(config, DpoConfig)
    if name := config.reference_model:
        own = config.model.model_copy(update={"name": name, "init": "pretrained", "lora": None})
        policy, table.other = build_policy(own, mesh, seed=0), name
    table.model = digest_of(base_tensors(policy.hf_model) | trained_tensors(policy.hf_model))
    texts = json.dumps(table.texts, indent=1).encode()
    return {f"{TRAINER_DIR}/{REFERENCE_NAME}": table.encode(), f"{TRAINER_DIR}/{REFERENCE_MODEL_NAME}": texts}


def _tokens_of(foreign: ForeignState) -> int:
    """Return the tokens that TRL has counted until the step; 0 if it has not."""
    last = next(reversed(foreign.trainer.get("log_history") or [{}]))
    return int(last["num_tokens"]) if last.get("step") == foreign.step and "num_tokens" in last else 0


def _places_of(hf_model: nn.Module, foreign: ForeignState) -> dict[str, str]:
    """Return the place of every trained parameter in the optimizer of the source. Raise CheckpointError if it has other
    parameters, or the state of another optimizer."""
    own, what, moments = trained_parameters(hf_model), f"the optimizer of {foreign.directory}", foreign.moments
    by_name = {_plain_name(place): place for place in moments.names}
    prefix = max(("", "model.", "module."), key=lambda prefix: sum(f"{prefix}{name}" in by_name for name in own))
    places = {name: by_name[f"{prefix}{name}"] for name in own if f"{prefix}{name}" in by_name}
    if not places and moments.groups and all(place.isdecimal() for place in moments.names):
        places = _by_number(hf_model, list(own), moments.groups, what)
    missing = [name for name in own if places.get(name) not in moments.names]
    surplus = sorted(moments.names.keys() - places.values())
    if missing or surplus:
        raise CheckpointError(
            f"{what} has no state for {some(missing)} and state for {some(surplus)} besides: it has trained other "
            "parameters. Give the model, and --model.lora as there, or take the weights alone with --ckpt.init-from."
        )
    for name, place in places.items():
        keys = moments.names[place].keys() - {MASTER}
        if keys != {*MOMENTS}:
            raise CheckpointError(
                f"{what} keeps {', '.join(sorted(keys)) or 'nothing'} for each parameter, and AdamW keeps "
                f"{', '.join(MOMENTS)}: it is another optimizer. --ckpt.init-from takes the weights alone."
            )
        for key, full_name in moments.names[place].items():
            found, here = moments.source.found[full_name].shape, () if key == "step" else tuple(own[name].shape)
            if found != here:
                raise CheckpointError(f"{what} does not fit this model: {key} of {name} is {found} there, {here} here")
    return places


def _refuse_other_adapter(config: SupervisedCommand, source: Path) -> None:
    """Raise ConfigError if the adapter in `source` is of another rank, strength or dropout."""
    if (lora := config.model.lora) is None or not (source / ADAPTER_CONFIG_NAME).exists():
        return
    there = read_scaling(source)
    if (there.r, there.alpha) != (lora.rank, lora.plain_alpha):
        raise ConfigError(
            f"the adapter in {source} has rank {there.r} and alpha {there.alpha:g}, and the settings have {lora.rank} "
            f"and {lora.alpha:g}: --model.lora.rank {there.r} --model.lora.alpha {there.alpha:g}"
        )
    dropout = json.loads((source / ADAPTER_CONFIG_NAME).read_bytes()).get("lora_dropout") or 0.0
    if dropout != lora.dropout:
        raise ConfigError(
            f"the adapter in {source} has dropout {dropout:g}, and the settings have {lora.dropout:g}: "
            f"--model.lora.dropout {dropout:g}"
        )


def _plain_name(place: str) -> str:
    """Return the name of a parameter without what wrappers and peft put into it."""
    for part in ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module."):
        place = place.replace(part, "")
    return place.removeprefix(PEFT_PREFIX).replace(".default.", ".")


def split_by_decay(hf_model: nn.Module, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `names` of the trained parameters into the two groups of transformers: with weight decay, and without."""
    in_memory = [name for name, parameter in hf_model.named_parameters() if parameter.requires_grad]
    decayed = {*get_parameter_names(hf_model, [nn.LayerNorm], _NOT_DECAYED)}
    split: tuple[list[str], list[str]] = ([], [])
    for name, raw in zip(names, in_memory, strict=True):
        split[raw not in decayed].append(name)
    return split


def _by_number(
    hf_model: nn.Module, names: Sequence[str], groups: Sequence[Mapping[str, Any]], what: str
) -> dict[str, str]:
    """Return the numbers of parameters: torch counts through the groups, and transformers makes one of decayed and one
    of other parameters, each in the order of the model."""
    split = split_by_decay(hf_model, names)
    numbers = [group["params"] for group in groups if group["params"]]
    sizes = [len(one) for one in numbers]
    ways = [way for way in ([one for one in split if one], [names]) if [len(one) for one in way] == sizes]
    if not ways:
        raise CheckpointError(
            f"{what} has parameter groups of {', '.join(map(str, sizes))}, and this model has "
            f"{len(split[0])} parameters with weight decay and {len(split[1])} without: it is another model, or has "
            "groups of one's own. --ckpt.init-from takes the weights alone."
        )
    return dict(zip(chain.from_iterable(ways[0]), chain.from_iterable(numbers), strict=True))


def _fill_moments(
    places: Mapping[str, str], foreign: ForeignState, state: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> bool:
    """Fill the optimizer, and the weights if it has them in float32; return whether it has."""
    names, source = foreign.moments.names, foreign.moments.source
    source.fill({names[place][key]: state[f"optim.{own}.{key}"] for own, place in places.items() for key in MOMENTS})
    masters = {names[place][MASTER]: weights[own] for own, place in places.items() if MASTER in names[place]}
    source.fill(masters)
    filled = {name: state[f"optim.{own}.{key}"] for own in places for key in MOMENTS for name in [f"{key} of {own}"]}
    taken = filled | {own: weights[own] for own in places}
    broken = [name for name, one in taken.items() if not local_part(one)[0].isfinite().all()]
    if broken:
        raise CheckpointError(
            f"{foreign.directory} has NaN or infinite numbers in {some(broken)}: give an earlier step"
        )
    parts = {name: local_part(one)[0] for name, one in filled.items()}
    torn = [name for name, one in parts.items() if name.startswith("exp_avg_sq ") and bool((one < 0).any())]
    steps = {name: one for name, one in parts.items() if name.startswith("step ") and one.numel()}
    torn += [name for name, one in steps.items() if not 0 <= one.max().item() <= foreign.step]
    if torn:
        raise CheckpointError(
            f"{foreign.directory} is damaged: negative squares, or steps that are not from 0 to {foreign.step}, "
            f"in {some(torn)}. Give another checkpoint; --ckpt.init-from takes the weights alone."
        )
    return len(masters) == len(weights)


def _compare(
    config: SupervisedCommand,
    foreign: ForeignState,
    places: Mapping[str, str],
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
) -> list[str]:
    """Return differences that no setting can express. Raise ConfigError for a difference that a setting can."""
    optim, step, left = config.optim, foreign.step, list[str]()
    wrong: dict[str, str] = {}
    groups = {place: group for group in foreign.moments.groups for place in group["params"]}
    for group in foreign.moments.groups:
        for key, here in (("betas", optim.betas), ("eps", optim.eps)):
            if key in group and not np.allclose(group[key], here, rtol=_SAME, atol=0):
                there = json.dumps(group[key])
                wrong[key] = f"optim.{key} is {there} there, {json.dumps(here)} here: --optim.{key} '{there}'"
        is_other = "betas" in group and "amsgrad" not in group  # torch's RAdam, and AdamW of others
        if is_other or group.get("amsgrad") or group.get("maximize") or group.get("decoupled_weight_decay") is False:
            raise CheckpointError(
                f"the optimizer of {foreign.directory} is not torch's AdamW, or with amsgrad, maximize, or weight "
                "decay in the gradient. --ckpt.init-from takes the weights alone."
            )
    decays = {id(one): group["weight_decay"] for group in optimizer.param_groups for one in group["params"]}
    told = {
        own: groups[place]["weight_decay"] for own, place in places.items() if "weight_decay" in groups.get(place, {})
    }
    other = [own for own in told if not math.isclose(told[own], decays[id(parameters[own])], rel_tol=_SAME)]
    matrices = {told[own] for own in told if parameters[own].ndim >= 2}
    if len(matrices) == 1 and not math.isclose(there := matrices.pop(), optim.weight_decay, rel_tol=_SAME):
        wrong["weight_decay"] = (
            f"optim.weight_decay is {there:g} there, {optim.weight_decay:g} here: --optim.weight-decay {there:g}"
        )
    elif other:
        left.append(
            f"weight decay of {some(other)}: {told[other[0]]:g} there, {decays[id(parameters[other[0]])]:g} here"
        )
    rates = {number: learning_rate(number, optim, config.max_steps) for number in range(max(step, 1), step + 2)}
    if foreign.rate is not None and not math.isclose(foreign.rate, rates[step + 1], rel_tol=_SAME):
        if foreign.rate == 0 and step == schedule_end(optim, config.max_steps):
            left.append(f"the learning rate of step {step + 1}: 0 there, after the schedule, {rates[step + 1]:g} here")
        elif step <= optim.warmup_steps and math.isclose(foreign.rate, rates[step], rel_tol=_SAME):
            left.append(f"warm-up: {foreign.rate:g} at step {step + 1} there, {rates[step + 1]:g} here, a step ahead")
        else:
            wrong["rate"] = f"the learning rate of step {step + 1} is {foreign.rate:g} there, {rates[step + 1]:g} here"
    ends = foreign.trainer.get("max_steps"), schedule_end(optim, config.max_steps)
    if ends[0] and ends[1] and ends[0] != ends[1]:
        wrong["end"] = f"the schedule ends at step {ends[0]} there, {ends[1]} here: --optim.schedule-steps {ends[0]}"
    if "rate" not in wrong and (past := _other_past(config, foreign)):
        wrong["past"] = past
    if wrong:
        peak = next((group["initial_lr"] for group in foreign.moments.groups if "initial_lr" in group), None)
        raise ConfigError(
            f"{foreign.directory} was trained with other settings:\n"
            + "".join(f"         {line}\n" for line in wrong.values())
            + "       Give the settings of the source"
            + (f" (its peak of optim.lr is {peak:g})" if {"rate", "past"} & {*wrong} and peak is not None else "")
            + "; the run that continues may then change them."
        )
    return left


def _other_past(config: SupervisedCommand, foreign: ForeignState) -> str | None:
    """Return how the logged learning rates after the warm-up differ, if they do: two schedules may meet at one step."""
    for line in foreign.trainer.get("log_history") or []:
        number, there = line.get("step"), line.get("learning_rate")
        if not isinstance(there, float) or number <= config.optim.warmup_steps + 1:
            continue
        own = [learning_rate(at, config.optim, config.max_steps) for at in (number, number + 1)]  # before or after it
        if not any(math.isclose(there, one, rel_tol=1e-3) for one in own):
            return f"the learning rate of step {number} was {there:g} there, and would be {own[0]:g} here"
    return None


def _list_rest(config: SftConfig | DpoConfig, foreign: ForeignState, number: int) -> list[str]:
    """Return what is not taken, for the console."""
    samples = foreign.step * config.data.batch_size
    order = f"a new order from seed {config.seed}" if config.data.shuffle else "file order"
    there = f", and epoch {foreign.trainer['epoch']:.3f} there" if foreign.trainer.get("epoch") else ""
    left = [
        f"random generators: seeded by seed {config.seed} and step {foreign.step}",
        f"position in the data: sample {samples} in {order} (step times data.batch_size), epoch {samples / number:.3f}"
        f"{there}",
        "batch size, loss and clipping of gradients: compare data.batch_size, loss.* and optim.max_grad_norm yourself",
    ]
    if isinstance(config, DpoConfig) and config.has_reference:
        name = config.reference_model or config.model.name
        left.append(f"the reference: {name} must have the weights of the reference there")
    if not foreign.moments.groups:
        left.append("betas, eps and weight decay: the source does not tell them")
    if config.model.lora is not None:
        left.append(f"the base of the adapter: {config.model.name} must have the weights that it was trained on")
    if foreign.rate is None:
        left.append("the schedule: the source does not tell its learning rate")
    if foreign.untold:
        left.append(f"files: {', '.join(foreign.untold)}")
    return left
