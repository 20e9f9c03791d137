"""The plan of a dry run: the forecast of a step and of the engines of `rl`, beside the memory of a GPU."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from holdfast.config import resolved
from holdfast.config.base import CkptConfig
from holdfast.config.inference import InferenceConfig
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.config.rl import RlConfig
from holdfast.config.training import TrainingCommand
from holdfast.errors import ConfigError, HoldfastError
from holdfast.launcher.devices import gpus_per_engine, keep_picks, settings_of_run
from holdfast.launcher.preflight import check_in_child
from holdfast.run.forecast import GIB, RUNNING_BYTES, Collectives, EngineSize, Forecast, Load, NoForecast, Peak, Room
from holdfast.run.inputs import check_model_path, count_parameters, in_short
from holdfast.run.run_dir import RunDir
from holdfast.view.tables import size

PARTS = ("parameters", "moments", "gradients", "gathered", "activations", "logits", "temporary")
"""Purposes of the bytes of a rank, in the order in which a run needs them."""
RESERVED_BYTES = 2 * GIB
"""Taken for CUDA, NCCL, the libraries and the gaps between tensors, which no tensor shows. An assumption."""
CARDS_GB = (24, 48, 80)
_PHASES = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "parameters": "the building of the model",
    "publishing": "the publishing of weights",
    "experience": "what is measured before the update",
}
_SMALL = 50_000_000
"""Parameters below which a dry run without a GPU is not made longer: every GPU has room for their state."""
_RESERVED = f"{RESERVED_BYTES / GIB:.0f} GiB for CUDA and the allocator"
_SHARE = "gpu_memory_utilization"


@dataclass(frozen=True)
class PlannedEngine:
    """The engines of a run; `shares`: one is on a GPU of the trainer, whose step may be planned."""

    config: InferenceConfig
    shares: bool
    found: Forecast | NoForecast | None = None

    def room(self, found: Forecast, card: float) -> tuple[float, float, float]:
        """Return the bytes of weights on each GPU of an engine; what is then left beside its longest session, below 0
        if that does not fit; and the bytes of such a session. `card`: bytes of each GPU."""
        weights, session = self.size.needs(found.step)
        return weights, self.share * card - weights - RUNNING_BYTES - session, session

    @property
    def size(self) -> EngineSize:
        """The size of each engine."""
        width = 4 if self.config.model.dtype == "float32" else 2
        return EngineSize(width, self.config.engine.tensor_parallel_size, self.config.model.max_len)

    @property
    def share(self) -> float:
        """The part of each GPU that an engine may take."""
        return self.config.engine.gpu_memory_utilization or 0.0


def load_of(config: OrchestratorConfig) -> Load:
    """Return what a step of `rl` brings at most: every rollout as long as it may be."""
    settings = [config.rollouts_of(section) for section in config.environments]
    longest = max(settings, key=lambda own: own.seq_len)
    sampling = longest.sampling
    return Load(
        rollouts=config.problems_per_step * longest.group_size,
        group_size=longest.group_size,
        seq_len=longest.seq_len,
        max_tokens=min(longest.max_tokens, longest.seq_len - 1),
        distribution={name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")},
    )


def forecast_alone(config: TrainingCommand | RlConfig) -> int:
    """Print the forecast for GPUs that `parallel.card_gb` describes, from config.json only; return the exit code. Raise
    ConfigError if the step does not fit; DataError if config.json is missing, or the model cannot be trained."""
    trainer = config.trainer if isinstance(config, RlConfig) else config
    assert trainer.parallel.card_gb is not None
    check_model_path(trainer.model.name, key="model.name")
    card = trainer.parallel.card_gb * 1e9
    if isinstance(config, RlConfig):
        before, is_one = settings_of_run(trainer, clean=config.clean), _shares_one(config)
        keep_picks(trainer, before)
        found = fit_gpu(config, card, before) if is_one else None
        shares = bool(config.share_gpus or is_one)
        trainer.model.dtype = _on_gpu(trainer, before).model.dtype
        resolved.choose_for_engine(config.inference, "cuda", dtype=trainer.model.dtype, shares_gpu=shares)
        engine = PlannedEngine(config.inference, shares, found)
        tell_forecast(trainer, load_of(config.orchestrator), card, prefix="trainer.", engine=engine)
    else:
        tell_forecast(trainer, Load(), card)
    return 0


def _shares_one(config: RlConfig) -> bool:
    """Whether trainer and engine would share the GPU of a machine with only one."""
    inference, orchestrator = config.inference, config.orchestrator
    count = config.trainer.parallel.world_size * inference.engines * gpus_per_engine(inference)
    is_here = config.cluster is None and config.slurm is None and inference.engine.device != "cpu"
    starts = orchestrator.client.urls == inference.urls and not orchestrator.is_sampled_by_teacher
    return config.share_gpus is not False and is_here and starts and count == 1


def fit_gpu(config: RlConfig, card: float | None, before: Mapping[str, Any]) -> Forecast | NoForecast | None:
    """Set, in place, what trainer and engine get of the GPU that they share; print a line for each setting.

    The engine gets what a step leaves. If a step leaves too little, settings that nobody has set are picked with which
    it takes less, except for a run that has trained.

    Args:
        card: bytes of the GPU; None: not known.
        before: settings of the run that this continues, if any.

    Returns:
        The plan, or why there is none; None: the user sets the engine's share.

    Raise ConfigError if nothing fits.
    """
    trainer, engine = config.trainer, config.inference.engine
    if engine.gpu_memory_utilization is not None or _SHARE in {name.replace("-", "_") for name in engine.args}:
        return None
    planned = _on_gpu(trainer, before)
    config.inference.model.dtype = config.inference.model.dtype or planned.model.dtype
    ckpt, may_pick = trainer.ckpt or CkptConfig(), resolved.open_settings(trainer)
    if ckpt.init_from is not None:  # whole weights or adapters decide it
        may_pick = tuple(key for key in may_pick if key != "model.lora")
    if before and (ckpt.resume_dir is not None or RunDir(trainer.output_dir).has_work()):
        may_pick = ()
    room = Room(int(card or 0), RESERVED_BYTES, PlannedEngine(config.inference, shares=True).size, may_pick)
    found: Forecast | NoForecast
    if card is None:
        found = NoForecast("the GPU does not say how much memory it has")
    elif config.dry_run and trainer.parallel.card_gb is None and not Path(trainer.model.name).is_dir():
        found = NoForecast(f"a dry run does not ask the hub for {trainer.model.name}")
    else:
        print(f"planning a step on the GPU that trainer and engine share ({card / GIB:.1f} GiB)", flush=True)
        found = _driven(planned, load_of(config.orchestrator), room, "trainer.")
    if isinstance(found, NoForecast):
        share = resolved.SHARED_GPU_MEMORY_UTILIZATION
        print(f"inference.engine.{_SHARE} = {share}: no plan could be made: {found.reason}")
        return found
    least, peak = room.least(found.step), found.peak[1].total
    if not room.fits(found):
        print("\n".join(_described(found, planned.model.compute_dtype)))
        shared, offload = least * room.card / 100, "--trainer.parallel.cpu-offload"
        _trainer_line(found, room.card, room.left(found.step), shared, offload=offload)  # raises
    resolved.set_values(trainer, found.picked)
    trainer.picked = [*trainer.picked, *found.picked]
    for key, value in found.picked.items():
        less = f"{peak / GIB:.1f} GiB in place of {found.unpicked_bytes / GIB:.1f}"
        print(f"trainer.{resolved.shown_setting(key, value)}, picked so that a step fits beside the engine: {less} GiB")
    rest = 100 * (room.card - room.taken - peak) // room.card
    engine.gpu_memory_utilization = max(least / 100, min(resolved.GPU_MEMORY_UTILIZATION, rest / 100))
    print(
        f"inference.engine.{_SHARE} = {engine.gpu_memory_utilization:g}, which a step leaves: it takes "
        f"{peak / GIB:.1f} GiB and {_RESERVED}, of {room.card / GIB:.1f} GiB"
    )
    return found


def _on_gpu(config: TrainingCommand, before: Mapping[str, Any] | None = None) -> TrainingCommand:
    """Return the settings of a step on a GPU; `before`: settings of the run that it continues."""
    config = config.model_copy(update={"max_steps": 2**31, "profile": None}, deep=True)  # perhaps not known yet
    dtype = (before or {}).get("model", {}).get("dtype")
    resolved.choose_for_training(config, "cuda", num_devices=config.parallel.ranks, dtype=dtype)
    config.parallel.device, config.parallel.card_gb = "cuda", None
    return config


def forecast_beside(
    asked: TrainingCommand,
    card: float | None,
    load: Load | None = None,
    *,
    prefix: str = "",
    engine: PlannedEngine | None = None,
) -> None:
    """Print the forecast in a dry run with all its checks, unless nothing can be said that `memory:` does not say.

    Args:
        asked: before the settings of a device were chosen.
        card: bytes of each GPU of this machine; None: it has none.

    Raise ConfigError if the step does not fit.
    """
    if not Path(asked.model.name).is_dir() or (card is None and asked.parallel.device == "cpu"):
        return
    if card is None and (count_parameters(asked.model.name) or 0) < _SMALL:
        flag = f"--{prefix}parallel.card-gb".replace("_", "-")
        print(f"plan: no GPU is known here; with {flag} 24 this says what a step needs on GPUs of 24 GB")
        return
    tell_forecast(asked, load or Load(), card, prefix=prefix, engine=engine if card is not None else None)


def forecast_meanwhile(
    config: TrainingCommand,
    card: float | None,
    load: Load | None = None,
    *,
    prefix: str = "",
    engine: PlannedEngine | None = None,
) -> None:
    """Print the forecast of a run on GPUs as soon as it is known, by a thread, while the run starts.

    A step that does not fit is a warning: a run may take less than the most that is calculated."""

    def tell(config: TrainingCommand) -> None:
        lines: list[str] = []
        try:
            lines += _plan_lines(config, load or Load(), card, prefix=prefix, engine=engine)
        except ConfigError as error:
            lines.append(f"warning: {error} The run goes on.")
        except (HoldfastError, OSError) as error:
            lines.append(f"plan: none: {str(error).partition('. ')[0]}")
        print("\n".join(lines), flush=True)

    Thread(target=tell, args=(config.model_copy(deep=True),), name="plan", daemon=True).start()


def tell_forecast(
    config: TrainingCommand, load: Load, card: float | None, *, prefix: str = "", engine: PlannedEngine | None = None
) -> None:
    """Print what a step needs on each rank, beside what its GPU has, or why it cannot be driven. `card`: bytes of each
    GPU; None: not known. Raise ConfigError with ways out if something does not fit."""
    if engine is None or engine.found is None:
        print("planning a step (a minute for a large model)", flush=True)
    for line in _plan_lines(config, load, card, prefix=prefix, engine=engine):
        print(line)


def _plan_lines(
    config: TrainingCommand, load: Load, card: float | None, *, prefix: str, engine: PlannedEngine | None
) -> Iterator[str]:
    is_alone, config = config.parallel.card_gb is not None, _on_gpu(config)
    shared = 0.0
    if card is not None and engine is not None and engine.shares:
        shared = card * engine.share
    room = Room(int(card or 0), int(RESERVED_BYTES + shared))
    found = (engine and engine.found) or _driven(config, load, room, prefix)
    if isinstance(found, NoForecast):
        told = "" if is_alone else "; `memory:` above is all"
        yield f"plan: none, as a step cannot be driven without numbers: {found.reason}{told}"
        return
    yield from _described(found, config.model.compute_dtype)
    if config.parallel.expert_parallel > 1:
        yield "  assumed: all experts get equally many tokens; a rank with busier experts needs and sends more"
    peak = found.peak[1]
    if card is None:
        fits = [str(gb) for gb in CARDS_GB if peak.total + RESERVED_BYTES <= gb * 1e9]
        told = f"it fits GPUs of {', '.join(fits)} GB" if fits else f"it fits no GPU of {CARDS_GB[-1]} GB"
        yield f"  with {_RESERVED} {told}; which GPU it will be is not known"
        return
    yield _trainer_line(found, card, room.left(found.step), shared, offload=f"--{prefix}parallel.cpu-offload")
    if engine is not None:
        yield _engine_line(found, card, engine)


def _trainer_line(found: Forecast, card: float, limit: int, shared: float, *, offload: str) -> str:
    peak, has = found.peak[1], card / GIB
    beside = f" and {shared / GIB:.1f} GiB for the engine" if shared else ""
    sums = f"{_RESERVED}{beside}, of {has:.1f} GiB"
    if (tag := _first_too_large(peak, limit)) is None:
        return f"  fits: {peak.total / GIB:.1f} GiB and {sums}"
    ways = [f"{flags}: {needed / GIB:.1f} GiB" for flags, needed in found.ways.items()]
    tried = "Ways out, the cheapest first:" if ways else "None of the changes that were tried makes it fit."
    out = "\n         ".join([tried, *ways, f"Not calculated: {offload}, with parameters and optimizer on the host."])
    raise ConfigError(
        f"the step does not fit the GPU: it needs {peak.total / GIB:.1f} GiB on each rank beside {sums}. The first "
        f"that does not fit: {tag} ({peak.parts[tag] / GIB:.2f} GiB). {out}"
    )


def _engine_line(found: Forecast, card: float, engine: PlannedEngine) -> str:
    weights, left, session = engine.room(found, card)
    split, key = engine.size.ranks, "--inference.engine.tensor-parallel-size"
    if (heads := found.step.heads) is not None:
        allowed = [n for n in range(1, heads[0] + 1) if heads[0] % n == 0 and 0 in (heads[1] % n, n % heads[1])]
        if split not in allowed:
            raise ConfigError(
                f"{key} {split} cannot divide the {heads[0]} attention heads of {found.model}, with {heads[1]} of "
                f"keys. Allowed: {', '.join(map(str, allowed))}."
            )
    given, longest = f"{engine.share * card / GIB:.1f} GiB", f"{engine.config.model.max_len:,} tokens"
    of = f"{given} ({engine.share:g} of {'the shared' if engine.shares else 'each'} GPU)"
    if left < 0:
        what = "the cache of one session" if left + session >= 0 else "the weights"
        raise ConfigError(
            f"the engine does not fit: {weights / GIB:.1f} GiB of weights, {session / GIB:.1f} GiB for a session of "
            f"{longest}, and {RUNNING_BYTES / GIB:.0f} GiB to run, of {of}. The first that does not fit: {what}. "
            f"Raise {key} or --inference.engine.gpu-memory-utilization, lower "
            "--inference.model.max-len, or take larger GPUs."
        )
    cache = f"{(left + session) / GIB:.1f} GiB of cache"
    sessions = f", for {(left + session) / session:,.0f} sessions of {longest}" if session else ""
    return f"  engine: {weights / GIB:.1f} GiB of weights and {cache}{sessions}, of {of}"


def _driven(config: TrainingCommand, load: Load, room: Room, prefix: str) -> Forecast | NoForecast:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "forecast.json"
        given = (msgspec.json.encode(one).decode() for one in (load, room))
        arguments = (config.program, *given, prefix, str(path))
        check_in_child("holdfast.trainer.forecast.drive", config, *arguments)
        return msgspec.json.decode(path.read_bytes(), type=Forecast | NoForecast)


def _described(found: Forecast, dtype: str) -> list[str]:
    """Return the lines that say what a rank needs, and sends."""
    name, peak = found.peak
    step, word = found.step, name.split(" ")[0]
    parts = ", ".join(f"{tag} {peak.parts[tag] / GIB:.2f}" for tag in PARTS if peak.parts.get(tag, 0) > 0.005 * GIB)
    updates = f", {found.updates} updates a step" if found.updates > 1 else ""
    ranks, rows = (f"{n} {noun}{'s' * (n != 1)}" for n, noun in ((found.ranks, "rank"), (found.rows, "row")))
    sends = f"  a row sends {_sent(step.first_row)}; a step {_sent(found.of_step)}"
    return [
        f"plan: {ranks} of {found.model}, {in_short(step.parameters)} parameters, {dtype}; {rows} of up to "
        f"{found.row_tokens:,} tokens on each{updates} (calculated with tensors without numbers)",
        f"  most memory in {_PHASES.get(word, f'the {word}')}, on each rank: {peak.total / GIB:.2f} GiB"
        f"{f' ({parts})' if parts else ''}",
        *([sends] if found.ranks > 1 else []),
        *([f"  weights to the engines: {size(step.published_bytes)} a step"] if step.published_bytes else []),
    ]


def _first_too_large(peak: Peak, limit: float) -> str | None:
    """Return what does not fit any more, if the parts come in the order of `PARTS`; None: all fit."""
    total = 0
    for tag in PARTS:
        total += peak.parts.get(tag, 0)
        if total > limit:
            return tag
    return None


def _sent(collectives: Collectives) -> str:
    """Return such as `74 all-gathers (30.3 GB)`."""
    kinds = collectives.kinds.items()
    told = [f"{calls:,} {kind}{'s' * (calls != 1)} ({size(sent)})" for kind, (calls, sent) in kinds]
    return ", ".join(told) or "nothing"
