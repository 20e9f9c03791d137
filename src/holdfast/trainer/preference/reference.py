"""Log-probabilities of pairs, and those under the reference of a preference run.

The reference is the model with the weights that the run starts with, or another one. It is frozen, and so
is what it says about each pair: two numbers, computed once before the first step. They go into every
checkpoint, since a resumed run no longer has the weights that it began with: it takes the same numbers, bit
for bit, also on another machine or in a fork, and spends no time on them. The digest of another model lies
beside them, so that none takes its place.

Shape legend: P pairs, 2 their sides: chosen, rejected; or P answers, 2: with their prompt, with another one's answer;
S sequences.
"""

from __future__ import annotations

import gc
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from holdfast.config import DpoConfig
from holdfast.config.preference import PreferenceDataConfig
from holdfast.errors import CheckpointError
from holdfast.process.events import report
from holdfast.run import atomic
from holdfast.run.checkpoints import TRAINER_DIR
from holdfast.run.run_dir import REFERENCE_NAME
from holdfast.trainer.data.packing import Sample, build_micro_batch, to_device
from holdfast.trainer.data.samples import refuse_other_tokens
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.fsdp import reshard
from holdfast.trainer.model.lora import digest_of
from holdfast.trainer.model.parity_check import PassedChecks, check_model
from holdfast.trainer.model.policy import Policy, build_policy, predict
from holdfast.trainer.model.structure import base_tensors
from holdfast.trainer.preference.losses import sequence_sums
from holdfast.trainer.preference.pairs import Preference, fingerprint_preferences, plan_preferences
from holdfast.trainer.session import Session


@dataclass(frozen=True)
class Reference:
    """What the reference says about all pairs of the data.

    Attributes:
        logprobs_P2: sums over the tokens of each answer in nats, float64, by `Pair.number`; zeros
            where there is no reference.
        attachments: files for every checkpoint, by path in it.
    """

    logprobs_P2: np.ndarray
    attachments: dict[str, Path]

    def of(self, pairs: Sequence[Preference], device: torch.device) -> Tensor:
        """Return the rows of these pairs, (P, 2)."""
        numbers = np.asarray([pair.number for pair in pairs], dtype=np.int64)
        return to_device(torch.from_numpy(self.logprobs_P2[numbers]), device)


@dataclass(frozen=True)
class OtherReference:
    """A model other than the policy's first one, and what it says.

    Attributes:
        name: directory or hub name.
        digest: of its weights.
        logprobs_P2: of all pairs; None where a checkpoint holds them already.
    """

    name: str
    digest: str
    logprobs_P2: np.ndarray | None


def other_reference(config: DpoConfig, pairs: Sequence[Preference], mesh: Mesh) -> OtherReference | None:
    """Return what `loss.reference_model` says about the pairs; None without that setting. Collective.

    The model is in memory while this runs and no longer.

    Raises:
        DataError: it cannot be loaded, or knows the policy's tokens by other ids.
    """
    name = config.loss.reference_model
    if name is None:
        return None
    report("loading the reference", model=name)
    refuse_other_tokens(name, config.model.tokenizer_name, key="loss.reference_model")
    own = config.model.model_copy(update={"name": name, "init": "pretrained", "lora": None})
    model = build_policy(own, mesh, seed=0)
    model.requires_grad_(False)
    passed = PassedChecks(config)
    check_model(model, mesh, name=name, pack=config.data.pack, dtype=own.compute_dtype, passed=passed)
    digest = digest_of(base_tensors(model.hf_model))
    logprobs_P2 = None
    if config.ckpt is None or config.ckpt.resume_step is None:
        report("computing reference log-probabilities", pairs=len(pairs))
        logprobs_P2 = reference_logprobs(model, pairs, config.data, mesh)
    del model
    gc.collect()  # its modules refer to one another; the policy is to have the memory
    return OtherReference(name, digest, logprobs_P2)


def start_reference(
    config: DpoConfig, session: Session[Policy], pairs: Sequence[Preference], other: OtherReference | None = None
) -> Reference:
    """Compute the reference log-probabilities of all pairs, or take those of the checkpoint resumed from. Collective.

    Args:
        other: the reference, where it is another model than the policy as it starts.

    Raises:
        CheckpointError: the checkpoint has none, or those of other pairs or of another reference.
    """
    if config.loss.reference == "none":
        return Reference(np.zeros((len(pairs), 2)), {})
    fingerprint = fingerprint_preferences(pairs)
    if session.progress.step > 0:
        directory = session.run_dir.checkpoint(session.progress.step)
        logprobs_P2 = _read(directory / TRAINER_DIR / REFERENCE_NAME, fingerprint, other)
    elif other is not None and other.logprobs_P2 is not None:
        logprobs_P2 = other.logprobs_P2
    else:
        report("computing reference log-probabilities", pairs=len(pairs))
        logprobs_P2 = reference_logprobs(session.policy, pairs, config.data, session.mesh)
    path = session.run_dir.path / REFERENCE_NAME
    if session.mesh.is_main:
        buffer = io.BytesIO()
        model = np.asarray(other.digest if other is not None else "")
        np.savez(buffer, logprobs=logprobs_P2, pairs=np.asarray(fingerprint), model=model)
        atomic.write_file(path, buffer.getvalue())
    return Reference(logprobs_P2, {f"{TRAINER_DIR}/{REFERENCE_NAME}": path})


@torch.no_grad()
def reference_logprobs(
    policy: Policy, pairs: Sequence[Preference], config: PreferenceDataConfig, mesh: Mesh
) -> np.ndarray:
    """Return (P, 2) under the policy's weights as they are now, without dropout, the same on every rank. Collective."""
    policy.eval()
    blocks = []
    for start in range(0, len(pairs), config.batch_size):
        block = pairs[start : start + config.batch_size]
        plan = plan_preferences(block, policy.layout, config, rank=mesh.data_rank, world_size=mesh.data_size)
        found = [predict_pairs(policy, block, indices, pack=config.pack, device=mesh.device) for indices in plan]
        own = np.zeros((len(block), 2))
        # To the CPU in one copy, behind all passes: each waits for the device.
        own[[index for indices in plan for index in indices]] = torch.cat(found).cpu().numpy()
        # Every pair is one rank's; the others add zero, which changes no bit.
        blocks.append(mesh.sum_tensor(torch.from_numpy(own)).numpy())
    reshard(policy)
    policy.train()
    return np.concatenate(blocks)


def predict_pairs(
    policy: Policy, pairs: Sequence[Preference], indices: list[int], *, pack: bool, device: torch.device
) -> Tensor:
    """Return the summed log-probabilities (P, 2) of the answers of `pairs[indices]`, in one forward pass.

    With no indices it takes part in the collectives of the pass, and the empty result has a gradient.
    """
    sides = [side for pair in pairs for side in pair.sides]
    places = [2 * index + side for index in indices for side in (0, 1)]
    return predict_sides(policy, sides, places, pack=pack, device=device).reshape(-1, 2)


def predict_sides(
    policy: Policy, samples: Sequence[Sample], indices: list[int], *, pack: bool, device: torch.device
) -> Tensor:
    """Return the summed log-probabilities (S,) of what is trained of `samples[indices]`, as `predict_pairs` does."""
    micro = build_micro_batch(samples, indices, pack=pack and policy.layout.packs, device=device)
    logprobs_N = predict(policy, micro).logprobs_N
    return sequence_sums(logprobs_N, [samples[index].num_targets for index in indices])


def _read(path: Path, fingerprint: str, other: OtherReference | None) -> np.ndarray:
    """Return what a run wrote to `path`, provided that it is about the same pairs and by the same reference."""
    advice = f"To start a new run from these weights: --ckpt.weights-only {path.parent.parent}"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            saved, logprobs_P2 = str(arrays["pairs"]), np.asarray(arrays["logprobs"], dtype=np.float64)
            digest = str(arrays["model"])
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: the run was trained with loss.reference = none, and what its first weights said "
            f"about the pairs is not known any more. Resume it with --loss.reference none. {advice}"
        ) from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Resume from another step. {advice}") from error
    if saved != fingerprint:
        raise CheckpointError(
            f"{path} is about other pairs than these: its log-probabilities cannot be used for them. Resume with the "
            f"same data.name, data.split, data.seq_len, data.too_long and tokenizer, and with the same margins or "
            f"labels. {advice}"
        )
    if digest != (other.digest if other is not None else ""):
        was = f"a reference model with digest {digest}" if digest else "the weights that the run began with"
        now = f"loss.reference_model = '{other.name}' has {other.digest}" if other is not None else "it is unset now"
        raise CheckpointError(
            f"{path} holds the log-probabilities under {was}, and {now}: going on would change what the policy is "
            f"compared with. Give loss.reference_model as the run began with it. {advice}"
        )
    return logprobs_P2
