"""Parity check: does the trainer compute of a model what transformers computes? With the real weights, once in a run.

Two short samples go through the trainer's forward pass together, as in training. Then each sample goes by itself
through transformers' forward with eager attention, with the same modules. Then the tokens of the first sample are
changed, and the second sample must not change by more than it does if a later sample changes. If answers share the
tokens of their prompt, two such answers are compared with two answers that do not share.

Random generators stay as they are, no gradient is left, and compiled code is not used. Collective; all ranks compute
the same.

Shape legend: L tokens of a sample, N predicted tokens of both, V vocabulary, H hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import tomli
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from holdfast.config.base import DType
from holdfast.config.load import to_toml
from holdfast.config.resolved import fingerprint
from holdfast.config.training import TrainingCommand
from holdfast.errors import DataError
from holdfast.process.events import report
from holdfast.run import manifest
from holdfast.run.checkpoints import TRAINER_DIR
from holdfast.run.run_dir import RunDir
from holdfast.trainer.data.packing import SHORT, MicroBatch, Sample, build_micro_batch
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import naming_failures
from holdfast.trainer.model.decoder import DecoderModel, reshard
from holdfast.trainer.model.policy import Policy
from holdfast.trainer.model.structure import decoder_of, other_attention
from holdfast.trainer.model.value_model import ScalarModel

_SHORT, _LONG = 9, 24
_MAX_TOKENS = 256  # of the sample that should be longer than the model's windows


@dataclass(frozen=True)
class _Bounds:
    """Allowed differences, in nats of a log-probability or in parts of the largest hidden state.

    float32 has a relative step of 6e-8: a thousand roundings of log-probabilities around 10 stay below 1e-4. bfloat16
    has a step of 2^-8. The last rounding moves a logit of 10 by up to 0.02, and another choice of an expert moves a
    token further. Therefore the mean over the tokens counts. A missing soft cap moves a real model by several tenths.

    Attributes:
        alone: between the trainer's pass and transformers' pass.
        leak: between two passes of the trainer, in an unchanged sample, mean over its tokens. Mostly 0: the same sums
            in the same order. But the rounding of an expert's sums can depend on its number of tokens, so ten times
            that noise is allowed too.
    """

    alone: float
    leak: float


_BOUNDS: dict[DType, _Bounds] = {"float32": _Bounds(1e-4, 1e-5), "bfloat16": _Bounds(0.1, 1e-3)}


def was_checked(config: TrainingCommand) -> bool:
    """Whether the models passed at an earlier start with the same settings, ranks and versions of the libraries."""
    step = config.ckpt.resume_step if config.ckpt else None
    if not isinstance(step, int):
        return False
    directory = RunDir(config.output_dir).checkpoint(step)
    saved = manifest.read_manifest(directory)
    if saved.libraries != manifest.library_versions() or saved.fingerprints.config != fingerprint(config):
        return False
    settings = (directory / TRAINER_DIR / "config.toml").read_text(encoding="utf-8"), to_toml(config)
    before, now = (tomli.loads(text).get("parallel") for text in settings)
    return before == now


@torch.no_grad()
def check_model(
    model: Policy | ScalarModel, mesh: Mesh, *, name: str, pack: bool, dtype: DType, share: bool = False
) -> None:
    """Compare the model with transformers' own forward. Collective.

    Args:
        name: of the model, for messages.
        pack: whether the run packs several samples into a row.
        dtype: of the forward pass.
        share: whether samples of a row share the tokens of their prompt.

    Raise DataError if they differ by more than rounding, or one sample changes another.
    """
    share = share and model.layout.shares
    arrangement = model.layout.arrangement(pack=pack)
    how = "several samples per row" if arrangement == "packed" else "one sample per row"
    why = {"because": model.layout.reason} if arrangement == "grouped" else {}
    report("checking the model", model=name, layout=how, **why)
    samples = _samples(model)
    bounds, packed = _BOUNDS[dtype], arrangement == "packed"

    def together(first: Sample, second: Sample) -> Tensor:
        return _own(model, build_micro_batch([first, second], [0, 1], pack=packed, device=mesh.device))

    before = [parameter._version for parameter in model.parameters()]
    with naming_failures(model, name, dtype), _undisturbed(model, mesh.device):
        ours, changed = together(samples[0], samples[2]), together(samples[1], samples[2])
        behind, behind_changed = together(samples[2], samples[0]), together(samples[2], samples[1])
        alone = torch.cat([_plain(model, sample, mesh.device) for sample in (samples[0], samples[2])])
        by_sdpa = alone[: samples[0].num_targets]
        if _has_sdpa_of_its_own(model.hf_model):
            by_sdpa = _plain(model, samples[0], mesh.device, attention="sdpa")
        shared, unshared = (
            [_answers(model, samples[3], mesh.device, share=one) for one in (True, False)] if share else [alone, alone]
        )
    if before != [parameter._version for parameter in model.parameters()]:
        raise DataError(
            f"model.name = '{name}': {type(model.hf_model).__name__} changes its own weights in a forward pass that "
            "only measures, so what is saved and published would not be what is trained"
        )
    if not alone.isfinite().all():
        report("the model was not checked: what it computes is not finite")  # the first step ends the run
        return
    first, second = samples[0].num_targets, samples[2].num_targets
    noise = min(_mean(behind[:second], behind_changed[:second]), bounds.alone)
    largest = float(alone.abs().max())
    # Hidden states may all be 0, if the last norm is.
    scale = max(1.0, largest / 10) if isinstance(model, Policy) else largest or 1.0
    found = mesh.max(
        {
            "alone": _apart(ours, alone, dtype) / scale,
            "sdpa": _apart(by_sdpa, alone[:first], dtype) / scale,
            "leak": _mean(ours[first:], changed[first:]) / scale,
            "noise": noise / scale,
            "shared": _apart(shared, unshared, dtype) / scale,
        }
    )
    _refuse(model, found, bounds, name=name, packed=packed)


@torch.no_grad()
def is_random_in_training(policy: Policy, mesh: Mesh) -> bool:
    """Whether the policy's results in training depend on random numbers (dropout, routers that draw). Collective.

    Two passes with other random numbers show it. Adapters have no effect yet, so their dropout modules count."""
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in policy.modules()):
        return True
    samples = _samples(policy)
    packed = policy.layout.arrangement(pack=True) == "packed"
    micro = build_micro_batch([samples[0], samples[2]], [0, 1], pack=packed, device=mesh.device)

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return _own(policy, micro)

    with _undisturbed(policy, mesh.device):
        policy.train()
        first, again, other = drawn(0), drawn(0), drawn(1)
    # Kernels without a fixed order of sums differ in equal passes, too.
    found = mesh.max({"noise": _mean(first, other), "rounding": _mean(first, again)})
    return found["noise"] > 2 * found["rounding"]


def _refuse(model: Policy | ScalarModel, found: dict[str, float], bounds: _Bounds, *, name: str, packed: bool) -> None:
    unit = "nats" if isinstance(model, Policy) else "of the largest hidden state"
    advice = [] if model.layout.attention == "eager" else ["set model.attention to eager"]
    advice += ["switch data.pack off, where there is that setting"] if packed else []
    advice += ["report it with the model's config.json"]
    remedy = f"Training on such numbers would be wrong. What to do: {', or '.join(advice)}."
    where = f"model.name = '{name}' ({type(model.hf_model).__name__}, attention {model.layout.attention})"
    allowed = bounds.leak + 10 * found["noise"]
    if not found["sdpa"] <= bounds.alone:
        raise DataError(
            f"model.name = '{name}': in transformers {type(model.hf_model).__name__} is two models, by its own eager "
            f"and by its own sdpa attention, {found['sdpa']:.2g} {unit} apart, and which of them the weights were "
            "trained by cannot be told. Take a version of transformers in which they agree, or another model."
        )
    if not found["leak"] <= allowed:
        raise DataError(
            f"{where}: a sample changes what the model says of the sample behind it by {found['leak']:.2g} {unit}; "
            f"rounding explains {allowed:.2g}. {remedy}"
        )
    if not found["shared"] <= bounds.alone:
        raise DataError(
            f"{where}: answers that share the tokens of their prompt are {found['shared']:.2g} {unit} away from "
            f"answers with a prompt each; rounding explains {bounds.alone:g}. Set trainer.share_prompts = false "
            "in `rl`, or switch data.pack off in `dpo`, and report it with the model's config.json."
        )
    if not found["alone"] <= bounds.alone:
        raise DataError(
            f"{where}: samples trained together are {found['alone']:.2g} {unit} away from what transformers' eager "
            f"attention says of each alone; rounding explains {bounds.alone:g}. {remedy}"
        )


def _apart(one: Tensor, other: Tensor, dtype: DType) -> float:
    difference = (one - other).abs()
    return float(difference.max() if dtype == "float32" else difference.mean())


def _mean(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().mean())


def _own(model: Policy | ScalarModel, micro: MicroBatch) -> Tensor:
    """Return log-probabilities (N,) or hidden states (N, H) by the trainer's forward pass."""
    if isinstance(model, Policy):
        predicted = model(
            micro.input_ids_BL,
            micro.position_ids_BL,
            micro.predict_index_N,
            micro.target_ids_N,
            packed_index=micro.packed_index,
        )
        return predicted.logprobs_N.float().cpu()

    def hidden_states() -> Tensor:
        index_N, row = micro.predict_index_N, model.row_slice(micro.input_ids_BL)
        hidden_NH = model.hidden_states(
            micro.input_ids_BL, micro.position_ids_BL, index_N, packed_index=micro.packed_index
        )
        return hidden_NH if row is None else row.whole(hidden_NH, index_N)

    return model.run(hidden_states).float().cpu()


def _answers(model: Policy | ScalarModel, sample: Sample, device: torch.device, *, share: bool) -> Tensor:
    """Return the trainer's results for two answers to one prompt: the end of the sample, and its reverse."""
    start = max(len(sample.token_ids) // 2, len(sample.token_ids) - _SHORT)
    prompt, answer = sample.token_ids[:start], sample.token_ids[start:]
    mask = np.arange(len(sample.token_ids)) >= start
    pair = [Sample(np.concatenate([prompt, one]), mask) for one in (answer, answer[::-1])]
    return _own(model, build_micro_batch(pair, [0, 1], pack=True, share=share, device=device))


def _has_sdpa_of_its_own(hf_model: PreTrainedModel) -> bool:
    """Whether the model's code has its own sdpa attention, instead of transformers' attention interface."""
    return bool(hf_model._supports_sdpa) and not hf_model._can_set_attn_implementation()


def _plain(model: DecoderModel, sample: Sample, device: torch.device, *, attention: str = "eager") -> Tensor:
    """Return log-probabilities or hidden states of one sample by transformers' forward."""
    ids_L = torch.from_numpy(sample.token_ids.astype(np.int64)).to(device)

    def logprobs() -> Tensor:
        logits_LV = model.hf_model(input_ids=ids_L[None], use_cache=False).logits[0, :-1].float()
        return logits_LV.log_softmax(-1).gather(1, ids_L[1:, None])[:, 0]

    def hidden_states() -> Tensor:
        return decoder_of(model.hf_model)(input_ids=ids_L[None], use_cache=False).last_hidden_state[0, :-1]

    with other_attention(model.hf_model, attention):
        return model.run(logprobs if isinstance(model, Policy) else hidden_states).float().cpu()


@contextmanager
def _undisturbed(model: DecoderModel, device: torch.device) -> Iterator[None]:
    """Leave mode, random numbers and shards as they were."""
    was_training = model.training
    model.eval()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        reshard(model)
        model.train(was_training)


def _samples(model: DecoderModel) -> list[Sample]:
    """Return two samples of one length, a sample longer than the model's windows, and a sample whose prompt is longer.

    That prompt is also longer than prompts that are computed again for each answer. The model's positions limit all."""
    config = model.hf_model.config
    text = config.get_text_config()
    numbers = {name: value for name, value in text.to_dict().items() if isinstance(value, int)}
    windows = [value for name, value in numbers.items() if "window" in name or "chunk" in name]
    limit = model.longest_sample or numbers.get("max_position_embeddings") or _MAX_TOKENS
    longest = max([_LONG, *(window + 8 for window in windows if window + 8 <= _MAX_TOKENS)])
    special = {value for name, value in numbers.items() if name.endswith(("token_id", "token_index"))}
    special |= {value for name, value in config.to_dict().items() if name.endswith(("token_id", "token_index"))
                and isinstance(value, int)}  # fmt: skip
    ids = np.setdiff1d(np.arange(text.vocab_size), sorted(special))
    ids = ids if len(ids) > 1 else np.arange(text.vocab_size)
    generator = np.random.default_rng(0)
    shared = max(longest, SHORT) + _SHORT + 1
    lengths = [max(2, min(length, limit)) for length in (_SHORT, _SHORT, longest, shared)]
    drawn = [generator.choice(ids, length).astype(np.int32) for length in lengths]
    return [Sample(tokens, np.ones(len(tokens), dtype=bool)) for tokens in drawn]
