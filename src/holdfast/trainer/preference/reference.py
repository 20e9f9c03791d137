"""Log-probabilities of pairs, and those under the reference of a preference run.

The reference is the model with the weights that the run starts with, or another one. It is frozen, so its two numbers
for each pair are computed once, before the first step, for the pairs that training reaches. Every checkpoint holds
them, since a resumed run no longer has the weights that it began with: it takes the same bits, also on another machine
or in a fork. If it trains further than before, or if the numbers are damaged, it loads the first weights once more.
The digest of these weights is saved twice, beside the numbers and in its own file: other weights are refused.

Micro-batches of all pairs are planned in their order, and those without a pair that training reaches are left out. The
bits of the numbers depend only on the data, and not on how far a run goes. A killed run keeps what is computed.

Shape legend: P pairs, 2 their sides: chosen, rejected; or P answers, 2: with their prompt, with another one's answer;
S sequences.
"""

import gc
import io
import json
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Generic, Self

import numpy as np
import torch
import xxhash
from torch import Tensor

from holdfast.config import DpoConfig
from holdfast.config.preference import PreferenceDataConfig
from holdfast.config.training import TrainedModelConfig
from holdfast.errors import CheckpointError, Stopped
from holdfast.process.events import Counted, report
from holdfast.run import atomic
from holdfast.run.checkpoints import REFERENCE_MODEL_NAME, REFERENCE_NAME, TRAINER_DIR
from holdfast.run.manifest import check_file, read_manifest
from holdfast.run.run_dir import RunDir
from holdfast.run.timeline import record
from holdfast.trainer.data.packing import Sample, build_micro_batch, to_device
from holdfast.trainer.data.samples import SampleOrder, refuse_other_tokens
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model.build import trained_tensors
from holdfast.trainer.model.decoder import reshard
from holdfast.trainer.model.logprobs import PLAIN, Predicted, Reading
from holdfast.trainer.model.lora import digest_of
from holdfast.trainer.model.parity_check import check_model, was_checked
from holdfast.trainer.model.policy import Policy, build_policy, predict
from holdfast.trainer.model.structure import base_tensors
from holdfast.trainer.preference.losses import sequence_sums
from holdfast.trainer.preference.pairs import P, Pair, Preference, fingerprint_preferences, plan_preferences
from holdfast.trainer.session import TrainSession, build_model
from holdfast.trainer.stop import STOP_REQUEST

_SAVE_EVERY_S = 10.0


@dataclass(frozen=True)
class Reference:
    """The reference's log-probabilities of the pairs of the data.

    Attributes:
        logprobs_P2: sums over the tokens of each answer in nats, float64, by `Pair.number`; NaN for pairs that
            training does not reach, zeros without a reference.
        attachments: what makes the files that belong into every checkpoint, by path in it.
    """

    logprobs_P2: np.ndarray
    attachments: dict[str, Callable[[], bytes]]

    def of(self, pairs: Sequence[Preference], device: torch.device) -> Tensor:
        """Return the rows of these pairs, (P, 2)."""
        numbers = np.asarray([pair.number for pair in pairs], dtype=np.int64)
        return to_device(torch.from_numpy(self.logprobs_P2[numbers]), device)


@dataclass
class ReferenceTable:
    """The known numbers of the reference, as they are saved.

    Attributes:
        logprobs_P2: as in `Reference`; NaN: not known yet.
        pairs: fingerprint of the data.
        other: the model that is the reference; empty: the policy as it began.
        model: digest of the weights of the reference.
        init_from: the weights that the run began with, if they are not the model's.
        made_by: digest of all that the bits of the numbers depend on, except the pairs that are computed together.
    """

    logprobs_P2: np.ndarray
    pairs: str
    other: str = ""
    model: str = ""
    init_from: str = ""
    made_by: str = ""

    @property
    def texts(self) -> dict[str, str]:
        """All but the numbers."""
        return {one.name: getattr(self, one.name) for one in fields(self)[1:]}

    def encode(self) -> bytes:
        """Return the bytes of the file, an archive of numpy with a checksum of its own."""
        buffer, texts = io.BytesIO(), json.dumps(self.texts)
        checksum = _checksum(self.logprobs_P2, texts)
        arrays = {"logprobs": self.logprobs_P2, "texts": np.asarray(texts), "checksum": np.asarray(checksum)}
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what a file holds. Raise CheckpointError if it is damaged; OSError if it cannot be read."""
        data = path.read_bytes()
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                logprobs_P2, texts, checksum = arrays["logprobs"], str(arrays["texts"]), str(arrays["checksum"])
            if checksum != _checksum(logprobs_P2, texts):
                raise ValueError("its own checksum is wrong")
            return cls(logprobs_P2, **json.loads(texts))
        except Exception as error:  # reading an archive and arrays of damaged bytes fails in every way there is
            raise CheckpointError(f"{path} is damaged: {error}") from error


def _checksum(logprobs_P2: np.ndarray, texts: str) -> str:
    digest = xxhash.xxh3_128(np.ascontiguousarray(logprobs_P2).tobytes())
    digest.update(json.dumps([logprobs_P2.shape, str(logprobs_P2.dtype), texts]).encode())
    return digest.hexdigest()


@dataclass
class ReferenceWork(Generic[P]):
    """The reference of one attempt: what is known, what is missing, and the model that says it. All collective.

    Args:
        preferences: all pairs of the data.
        training, held_out: the trained ones, and the ones for validation.

    Raise CheckpointError if the checkpoint resumed from has none, or a reference of other pairs.
    """

    config: DpoConfig
    mesh: Mesh
    preferences: Sequence[P]
    training: Sequence[P]
    held_out: Sequence[P]
    _spans: list[tuple[float, float]] = field(default_factory=list)
    _is_damaged: bool = False

    def __post_init__(self) -> None:
        self._run_dir = RunDir(self.config.output_dir)
        self._path = self._run_dir.path / REFERENCE_NAME
        ckpt = self.config.ckpt
        self._step = ckpt.resume_step if ckpt is not None and isinstance(ckpt.resume_step, int) else 0
        fingerprint = fingerprint_preferences(self.preferences)
        if self._step:
            self.table = self._resumed(fingerprint)
            if bool(self.table.other) != bool(self.config.reference_model):
                raise self._other_weights("")
        else:
            unknown_P2 = np.full((len(self.preferences), 2), np.nan)
            init_from = str(ckpt.init_from.absolute()) if ckpt is not None and ckpt.init_from else ""
            other = self.config.reference_model or ""
            self.table = ReferenceTable(unknown_P2, fingerprint, other=other, init_from=init_from)

    def _resumed(self, fingerprint: str) -> ReferenceTable:
        """Return the checkpoint's table. If it is damaged: the run's table if both are equal, else an empty table.
        Raise CheckpointError if it is about other pairs, or not whole and from who knows which weights."""
        table, damage = None, None
        try:
            table = read_saved(self._saved)
        except CheckpointError as error:
            damage = error
        # A single rank may read damage, from the memory of its machine; all ranks do what follows.
        told = next(filter(None, self.mesh.gather("" if damage is None else str(damage))), "")
        if told or table is None:
            place = self._saved.with_name(REFERENCE_MODEL_NAME)
            if not place.exists():
                raise damage or CheckpointError(told)
            unknown_P2 = np.full((len(self.preferences), 2), np.nan)
            try:
                table = ReferenceTable(unknown_P2, **json.loads(place.read_bytes()))
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"{place} is damaged, or of another version: {error}") from None
            kept, self._is_damaged = self._kept, True
            if kept is not None and kept.made_by == table.made_by:
                table, source = kept, f"that of {self._path} is the same"
            else:
                source = "its numbers are computed again"
            if self.mesh.is_main:
                report(f"WARNING: {told}: {source}")
        if table.pairs != fingerprint:
            raise CheckpointError(
                f"{self._saved} is about other pairs than these: its log-probabilities cannot be used for them. Resume "
                "with the same data.name, data.split, data.seq_len, data.too_long and tokenizer, and with the same "
                f"margins or labels. {_advice(self._saved)}"
            )
        return table

    @cached_property
    def _kept(self) -> ReferenceTable | None:
        """The table of the attempt before in the run's directory, as rank 0 finds it; None if nothing can be read."""
        kept = None
        if self.mesh.is_main and self._path.exists():
            try:
                kept = ReferenceTable.read(self._path)
            except (OSError, CheckpointError) as error:
                report(f"WARNING: {error}: its numbers are computed again")
        return self.mesh.gather(kept)[0]

    @property
    def _saved(self) -> Path:
        """The file in the checkpoint that is resumed from."""
        return self._run_dir.checkpoint(self._step) / TRAINER_DIR / REFERENCE_NAME

    def compute_beside(self) -> None:
        """Compute what needs a model that is not the policy; it is in memory meanwhile, and no longer. Raise DataError
        if it cannot be loaded, or knows the policy's tokens by other ids; CheckpointError if the checkpoint was made
        with other weights of the reference."""
        name = self.config.reference_model
        if name is None and not (self._step and self._missing()):
            return
        begin = time.time()
        model = self._first_policy() if name is None else self._other_model(name)
        self._compute(model)
        self._spans.append((begin, time.time()))
        del model
        gc.collect()  # its modules refer to one another; the policy is to have the memory

    def finish(self, session: TrainSession[Policy]) -> Reference:
        """Compute what is missing with the policy as it starts, and return all that training needs."""
        if self._missing():
            begin = time.time()
            self._compute(session.policy)
            self._spans.append((begin, time.time()))
        for begin, end in self._spans:
            record("reference", begin, end)
        self._write()
        texts = json.dumps(self.table.texts, indent=1).encode()
        files = {REFERENCE_NAME: self.table.encode, REFERENCE_MODEL_NAME: lambda: texts}
        return Reference(self.table.logprobs_P2, {f"{TRAINER_DIR}/{name}": make for name, make in files.items()})

    def _other_model(self, name: str) -> Policy:
        report("loading the reference", model=name)
        refuse_other_tokens(name, self.config.model.tokenizer_name, key="loss.reference_model")
        own = self.config.model.model_copy(update={"name": name, "init": "pretrained", "lora": None})
        model = build_policy(own, self.mesh, seed=0)
        model.requires_grad_(False)
        self._check(model, name, own)
        return model

    def _first_policy(self) -> Policy:
        """Return the policy with the weights that the run began with."""
        assert self.config.ckpt is not None
        first = self.config.model_copy(deep=True)
        assert first.ckpt is not None
        first.ckpt.resume_step = None
        first.ckpt.init_from = Path(self.table.init_from) if self.table.init_from else None
        report("loading the weights that the run began with, for pairs that it did not reach before")
        model, _ = build_model(first, self.mesh, build_policy)
        own = first.model
        self._check(model, own.name, own)
        return model

    def _check(self, model: Policy, name: str, own: TrainedModelConfig) -> None:
        if not was_checked(self.config):
            pack = self.config.data.pack
            share = pack and self.config.loss.type != "kto"
            check_model(model, self.mesh, name=name, pack=pack, share=share, dtype=own.compute_dtype)

    def _missing(self) -> set[int]:
        """Return the numbers of the pairs that training will reach, or that are held out, and are not known yet."""
        config, size, position = self.config, self.config.data.batch_size, 0
        if self._step:
            position = int(json.loads(self._saved.with_name("progress.json").read_bytes())["samples"])
        order = SampleOrder(len(self.training), seed=config.seed, shuffle=config.data.shuffle)
        # A new table must equal the damaged table, so it holds the pairs that were trained already, too.
        reached = set(order.batch(0, min(position, len(self.training)))) if self._is_damaged else set()
        for _ in range(self._step, config.max_steps):
            if len(reached) == len(self.training):
                break
            reached.update(order.batch(position, size))
            position += size
        wanted = {self.training[index].number for index in reached} | {pair.number for pair in self.held_out}
        return wanted & set(np.flatnonzero(np.isnan(self.table.logprobs_P2).any(axis=1)).tolist())

    def _compute(self, model: Policy) -> None:
        """Fill in what is missing under the weights of `model` as they are now, without dropout. Raise CheckpointError
        if the known numbers were computed with other weights; Stopped if a signal came; what is computed is kept."""
        table, mesh, config = self.table, self.mesh, self.config.data
        digest = digest_of(base_tensors(model.hf_model) | trained_tensors(model.hf_model))
        if self._step and digest != table.model:
            raise self._other_weights(digest)
        table.model, table.made_by = digest, _made_by(self.config, mesh, digest, table, model)
        kept = self._kept
        if kept is not None and kept.made_by == table.made_by:  # of an attempt that ended before its first step
            table.logprobs_P2 = np.where(np.isnan(table.logprobs_P2), kept.logprobs_P2, table.logprobs_P2)
        missing = self._missing()
        if not missing:
            return
        report("computing reference log-probabilities", pairs=f"{len(missing):,} of {len(self.preferences):,}")
        counted = Counted("computing reference log-probabilities", len(missing), unit="pairs", is_told=mesh.is_main)
        saved = time.monotonic()
        for block in _blocks(self.preferences, config):
            wanted = {index for index, pair in enumerate(block) if pair.number in missing}
            if not wanted:
                continue
            self._end_if_asked()
            indices, found_P2 = _block_logprobs(model, block, wanted, config, mesh)
            table.logprobs_P2[[block[index].number for index in indices]] = found_P2
            counted.add(len(wanted))
            if time.monotonic() - saved >= _SAVE_EVERY_S:
                self._write()
                saved = time.monotonic()

    def _end_if_asked(self) -> None:
        if self.config.ckpt is None:
            return
        asked = int(self.mesh.max({"signal": STOP_REQUEST.signal_number()})["signal"])
        if not asked:
            return
        self._write()
        told = f"stopped by {signal.Signals(asked).name} before step {self._step + 1}; what the reference said is kept"
        raise Stopped(told, exit_code=128 + asked)

    def _other_weights(self, digest: str) -> CheckpointError:
        """Return the error of a reference with the weights `digest`; empty: another kind of model."""
        table, name = self.table, self.config.reference_model
        key = "loss.reference_model" if table.other else "model.name"
        began_with = f"the reference model '{table.other}'" if table.other else "the weights that the run began with"
        found = f"loss.reference_model = '{name}' has {digest}"
        if not digest:
            found = "loss.reference_model is " + (f"'{name}' now" if name else "unset now")
        elif name is None:
            found = f"model.name = '{self.config.model.name}', which is needed once more, has {digest}"
        return CheckpointError(
            f"{self._saved} holds log-probabilities under {began_with}, digest {table.model}, and {found}: going on "
            f"would change what the policy is compared with. Give {key} as the run began with it. "
            f"{_advice(self._saved)}"
        )

    def _write(self) -> None:
        if self.mesh.is_main:
            atomic.write_file(self._path, self.table.encode())


def _made_by(config: DpoConfig, mesh: Mesh, digest: str, table: ReferenceTable, model: Policy) -> str:
    """Return a digest of all that the numbers depend on: model, weights, data, settings, machine, libraries, code."""
    code = xxhash.xxh3_128()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    is_cuda = mesh.device.type == "cuda"
    depends = {
        "weights": digest,
        "model": model.hf_model.config.to_dict(),  # as its config.json says: another rope_theta, other numbers
        "pairs": table.pairs,
        "settings": config.model_dump(mode="json", include={"model", "data", "parallel", "seed", "deterministic"}),
        "ranks": mesh.world_size,
        "device": torch.cuda.get_device_name(mesh.device) if is_cuda else f"cpu, {torch.get_num_threads()} threads",
        "libraries": [torch.__version__, version("transformers"), version("holdfast")],
        "code": code.hexdigest(),
    }
    return xxhash.xxh3_128(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()


def reference_logprobs(
    policy: Policy, pairs: Sequence[Preference], config: PreferenceDataConfig, mesh: Mesh
) -> np.ndarray:
    """Return (P, 2) under the policy's weights as they are now, without dropout, the same on every rank. Collective."""
    blocks = _blocks(pairs, config)
    return np.concatenate([_block_logprobs(policy, block, range(len(block)), config, mesh)[1] for block in blocks])


def _blocks(pairs: Sequence[P], config: PreferenceDataConfig) -> list[Sequence[P]]:
    """Return the pairs in their order, in parts whose micro-batches are planned together."""
    return [pairs[start : start + config.batch_size] for start in range(0, len(pairs), config.batch_size)]


@torch.no_grad()
def _block_logprobs(
    policy: Policy, block: Sequence[Preference], wanted: Collection[int], config: PreferenceDataConfig, mesh: Mesh
) -> tuple[list[int], np.ndarray]:
    """Return the indices of the pairs in the micro-batches of a block that have any of `wanted`, and their rows."""
    policy.eval()
    share = isinstance(block[0], Pair)  # as the loss computes them
    plans = plan_preferences(block, policy.layout, config, mesh.data_size, share=share)
    # Every rank takes part in the passes of the others.
    together = [[index for own in places for index in own] for places in zip(*plans, strict=True)]
    chosen = [place for place, indices in enumerate(together) if not set(wanted).isdisjoint(indices)]
    mine = [plans[mesh.data_rank][place] for place in chosen]
    found = [
        read_pairs(policy, block, indices, pack=config.pack, share=share, device=mesh.device).logprobs_N
        for indices in mine
    ]
    own = np.zeros((len(block), 2))
    # To the CPU in one copy, after all passes: each waits for the device.
    own[[index for indices in mine for index in indices]] = torch.cat(found).cpu().numpy()
    reshard(policy)
    policy.train()
    # Every pair is one rank's; the others add zero, which changes no bit.
    rows_P2 = mesh.sum_tensor(torch.from_numpy(own)).numpy()
    indices = sorted(index for place in chosen for index in together[place])
    return indices, rows_P2[indices]


def read_pairs(
    policy: Policy,
    pairs: Sequence[Preference],
    indices: list[int],
    reading: Reading = PLAIN,
    *,
    pack: bool,
    device: torch.device,
    share: bool = False,
) -> Predicted:
    """Return the sums (P, 2) over the answers of `pairs[indices]` of the numbers that `reading` asks for.

    It is one forward pass. With no indices it takes part in the collectives of the pass, and the empty result has a
    gradient. `share`: whether the two sides of a pair share the tokens of their prompt, if the model allows it."""
    sides = [side for pair in pairs for side in pair.sides]
    places = [2 * index + side for index in indices for side in (0, 1)]
    found = read_sides(policy, sides, places, reading, pack=pack, share=share, device=device)
    return Predicted(**{name: column.reshape(-1, 2) for name, column in found.columns().items()})


def read_sides(
    policy: Policy,
    samples: Sequence[Sample],
    indices: list[int],
    reading: Reading = PLAIN,
    *,
    pack: bool,
    device: torch.device,
    share: bool = False,
) -> Predicted:
    """Return the sums (S,) over the trained tokens of `samples[indices]`, as `read_pairs` does."""
    pack, layout = pack and policy.layout.packs, policy.layout
    micro = build_micro_batch(samples, indices, pack=pack, share=share and pack and layout.shares, device=device)
    lengths = [samples[index].num_targets for index in indices]
    columns = predict(policy, micro, reading).columns()
    return Predicted(**{name: sequence_sums(column, lengths) for name, column in columns.items()})


def _advice(path: Path) -> str:
    # In the same directory the run resumes from its own checkpoint, whatever weights are given.
    return f"To start a new run from these weights: another --output-dir and --ckpt.init-from {path.parent.parent}"


def read_saved(path: Path) -> ReferenceTable:
    """Return what a run wrote to `path` of a checkpoint. Raise CheckpointError if it is not there, or damaged; OSError
    if it cannot be read."""
    entry = read_manifest(path.parent.parent).files.get(f"{TRAINER_DIR}/{path.name}")
    if entry is None:
        raise CheckpointError(
            f"{path} is missing: the run was trained with loss.reference = none, and what its first weights said "
            f"about the pairs is not known any more. Resume it with --loss.reference none. {_advice(path)}"
        )
    check_file(path, entry)
    return ReferenceTable.read(path)
