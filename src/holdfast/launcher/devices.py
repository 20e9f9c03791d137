"""Decides which GPUs of this machine each process gets, and which device settings follow, before anything starts.

The trainer has one rank on each of its GPUs, which are the first ones that CUDA_VISIBLE_DEVICES leaves. An engine gets
neighbours from the end. Processes share a GPU if it is the only one, or if that is asked for. A resumed run keeps its
dtype on any device, because it is the only device setting that changes the result, and what was picked to fit a GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

from holdfast.config import resolved
from holdfast.config.base import BY_DEVICE, DeviceType
from holdfast.config.inference import InferenceConfig
from holdfast.config.rl import RlConfig
from holdfast.config.rl_trainer import CollectiveWeights, TrainerConfig
from holdfast.config.training import EvaluatedCommand, ParallelConfig, TrainingCommand
from holdfast.errors import CheckpointError, ConfigError
from holdfast.launcher.resume.attempt import CONFIG_NAME, process_name
from holdfast.process import gpus as hardware
from holdfast.process.child import available_cores
from holdfast.run.checkpoints import TRAINER_DIR
from holdfast.run.manifest import check_file, read_manifest
from holdfast.run.run_dir import RunDir
from holdfast.run.settings import read_settings

_NO_GPU = f"the installed vLLM is its build for GPUs, and there is no NVIDIA GPU here: {hardware.INSTALL_CPU}"
_MOST_PER_CORE = 16  # processes or threads of one kind on the CPU: more only fill the memory


@dataclass(frozen=True)
class Machine:
    """GPUs and installed builds; `engine_device` is what the installed vLLM computes on."""

    inventory: hardware.Inventory
    torch: hardware.TorchBuild
    engine_device: DeviceType


@dataclass(frozen=True)
class Placement:
    """The GPUs of each process; none: the CPU. `hides_gpus`: a process without GPUs must not see those there are."""

    trainer: tuple[hardware.Gpu, ...] = ()
    engines: tuple[tuple[hardware.Gpu, ...], ...] = ()
    hides_gpus: bool = False

    @property
    def trainer_device(self) -> DeviceType:
        """Device of the trainer."""
        return "cuda" if self.trainer else "cpu"

    @property
    def shares(self) -> bool:
        """Whether an engine is on a GPU of the trainer."""
        return any(gpu in self.trainer for engine in self.engines for gpu in engine)

    @property
    def is_one_gpu(self) -> bool:
        """Whether trainer and engine have one GPU, the same."""
        return len(self.trainer) == 1 and self.engines == (self.trainer,)

    def environment(self, gpus: Sequence[hardware.Gpu]) -> dict[str, str]:
        """Return the variables of a process that gets `gpus`."""
        return (
            {hardware.VISIBLE_DEVICES_ENV: names_of(gpus), **hardware.NUMBERED_BY_DRIVER}
            if gpus or self.hides_gpus
            else {}
        )


def this_machine(inventory: hardware.Inventory) -> Machine:
    """Return this machine, whose GPUs are `inventory`."""
    return Machine(inventory, hardware.torch_build(), hardware.vllm_device() or "cpu")


def trainer_gpus(parallel: ParallelConfig, machine: Machine, *, key: str = "parallel") -> tuple[hardware.Gpu, ...]:
    """Return the GPUs that a trainer may use; none: the CPU. `key`: of `parallel`, for messages. Raise ConfigError if
    the installed PyTorch cannot use the GPUs, or there are none for `device = 'cuda'`."""
    if parallel.device == "cpu":
        return ()
    inventory = machine.inventory
    if not inventory.gpus:
        if parallel.device == "cuda":
            raise ConfigError(
                f"{key}.device = 'cuda', and there is no NVIDIA GPU here, or {hardware.VISIBLE_DEVICES_ENV} hides it: "
                "leave it out, or set 'cpu'"
            )
        return ()
    if reason := hardware.why_unusable(inventory, machine.torch):
        raise ConfigError(f"{reason}; or train on the CPU, with --{key}.device cpu")
    return inventory.gpus


def place_training(parallel: ParallelConfig, machine: Machine) -> Placement:
    """Return the GPUs of a trainer without engines; raise `ConfigError` if there are fewer than ranks."""
    gpus = trainer_gpus(parallel, machine)
    _check_cores(parallel.threads, key="parallel.threads")
    if not gpus:
        _check_cores(parallel.ranks, key="parallel.num_ranks")
        return Placement(hides_gpus=bool(machine.inventory.gpus))
    wanted = parallel.num_ranks or len(gpus)
    if wanted > len(gpus):
        raise ConfigError(
            f"parallel.num_ranks = {wanted}, one for each GPU, and there {_are(len(gpus))}: lower it, or leave it out"
        )
    return Placement(gpus[:wanted])


def place_rl(config: RlConfig, machine: Machine, *, starts_inference: bool) -> Placement:
    """Return the GPUs of the trainer, and of the engines if the run starts any; raise `ConfigError` if too few."""
    gpus = machine.inventory.gpus
    trains = bool(trainer_gpus(config.trainer.parallel, machine, key="trainer.parallel"))
    if starts_inference and config.cluster is None:
        check_build(config.inference, machine, key="inference.engine.device")
    samples = starts_inference and machine.engine_device == "cuda"
    if config.cluster is None:  # which checks its own nodes
        _check_cores(None if trains else config.trainer.parallel.ranks, key="trainer.parallel.num_ranks")
        _check_cores(config.trainer.parallel.threads, key="trainer.parallel.threads")
        _check_cores(config.inference.engine.threads, key="inference.engine.threads")
    if samples and not gpus:
        raise ConfigError(_NO_GPU)
    size = gpus_per_engine(config.inference)
    of_engines = size * config.inference.engines if samples else 0
    shares = trains and samples and len(gpus) == 1 if config.share_gpus is None else config.share_gpus
    left, wanted = len(gpus) if shares else len(gpus) - of_engines, config.trainer.parallel.num_ranks
    of_trainer = (left if wanted is None else wanted) if trains else 0
    if of_engines > len(gpus) or (trains and not 1 <= of_trainer <= left):
        _refuse_too_few(config, len(gpus), engines=of_engines, ranks=wanted if trains else 0)
    # From the end: engines over 2 or 4 GPUs then begin at even numbers.
    begins = range(len(gpus) - of_engines, len(gpus), size)
    engines = tuple(gpus[begin : begin + size] for begin in begins)
    weights = config.weights or config.trainer.weights
    if of_trainer and isinstance(weights, CollectiveWeights) and any(gpus[0] in engine for engine in engines):
        raise ConfigError(
            "weights.transport = 'collective' sends from the trainer's first GPU by NCCL, which takes a GPU only once, "
            "and an engine is on that GPU, too: leave weights.transport out"
        )
    return Placement(gpus[:of_trainer], engines, hides_gpus=bool(gpus))


def _check_cores(count: int | None, *, key: str) -> None:
    """Refuse more processes on the CPU, or threads of a process, than the cores here can take."""
    cores = available_cores()
    if count is not None and count > (most := _MOST_PER_CORE * cores):
        raise ConfigError(
            f"{key} = {count}: at most {most} are allowed on this CPU, {_MOST_PER_CORE} for each of the {cores} cores "
            "that this process may use. Lower it."
        )


def inference_gpus(config: InferenceConfig, machine: Machine) -> tuple[hardware.Gpu, ...]:
    """Return the GPUs of an inference server by itself: the first ones; raise `ConfigError` if too few."""
    gpus, size = machine.inventory.gpus, gpus_per_engine(config)
    check_build(config, machine, key="engine.device")
    _check_cores(config.engine.threads, key="engine.threads")
    if machine.engine_device == "cpu":
        return ()
    if not gpus:
        raise ConfigError(_NO_GPU)
    if size > len(gpus):
        raise ConfigError(
            f"the engine is split over {size} GPUs (engine.tensor_parallel_size), and there {_are(len(gpus))}: lower it"
        )
    return gpus[:size]


def evaluation_gpus(config: TrainingCommand, placement: Placement, machine: Machine) -> tuple[hardware.Gpu, ...]:
    """Return the GPUs of the evaluations beside a training program, if it has any: GPUs that the trainer leaves."""
    if not isinstance(config, EvaluatedCommand) or config.eval is None:
        return ()
    check_build(config.eval.inference, machine, key="eval.inference.engine.device")
    if machine.engine_device == "cpu":
        return ()
    size = gpus_per_engine(config.eval.inference)
    left = [gpu for gpu in machine.inventory.gpus if gpu not in placement.trainer]
    if len(left) < size:
        raise ConfigError(
            f"the server of the evaluations needs {size} of the {len(machine.inventory.gpus)} GPUs, and the trainer "
            f"leaves {len(left)}: lower parallel.num_ranks, or leave eval out and start `evaluate --run "
            f"{config.output_dir} --follow` where there is room for it"
        )
    return tuple(left[:size])


def check_build(config: InferenceConfig, machine: Machine, *, key: str) -> None:
    """Refuse a vLLM that is built for another device than `engine.device`, which messages call `key`."""
    flag = f"--{key.replace('_', '-')} cpu"
    if config.engine.device == "cpu" and machine.engine_device == "cuda":
        raise ConfigError(f"{key} = 'cpu', and the installed vLLM is its build for GPUs: {hardware.INSTALL_CPU}")
    if config.engine.device == "auto" and machine.engine_device == "cpu" and machine.inventory.gpus:
        raise ConfigError(
            f"this machine has GPUs ({_gpus(machine.inventory.gpus)}), and the installed vLLM is its build for CPUs: "
            f"{hardware.INSTALL_GPU}. To sample on the CPU all the same: {flag}"
        )


def with_engines(config: RlConfig, machine: Machine) -> RlConfig:
    """Return `config` with engines for the GPUs that the trainer leaves, or for half of all.

    Engines or servers that the user names stay, and engines on the CPU, which may be more than its cores can take: then
    raise `ConfigError`."""
    inference, parallel = config.inference, config.trainer.parallel
    if machine.engine_device == "cpu":
        _check_cores(inference.engines, key="inference.engines")
    is_said = "engines" in inference.model_fields_set or "urls" in config.orchestrator.client.model_fields_set
    if is_said or machine.engine_device == "cpu" or config.orchestrator.is_sampled_by_teacher:
        return config
    left = count = len(machine.inventory.gpus)
    if parallel.device != "cpu" and not config.share_gpus:
        left = count // 2 if parallel.num_ranks is None else count - parallel.num_ranks
    config = config.model_copy(deep=True)
    config.inference.engines = max(1, left // gpus_per_engine(inference))
    return config


def gpus_per_engine(config: InferenceConfig) -> int:
    """Return how many GPUs one engine is split over."""
    count = config.engine.tensor_parallel_size
    for name, value in config.engine.args.items():
        if name.replace("_", "-") == "pipeline-parallel-size" and isinstance(value, int):
            count *= value
    return count


def _refuse_too_few(config: RlConfig, count: int, *, engines: int, ranks: int | None) -> None:
    wanted = f"{engines} for the engines and {'at least 1' if ranks is None else ranks} for the trainer"
    advice = "lower --inference.engines, --inference.engine.tensor-parallel-size or --trainer.parallel.num-ranks"
    if count == 1 and config.share_gpus is False:
        advice = (
            "leave share_gpus = false out, and they share it; name servers elsewhere, with --orchestrator.client.urls; "
            "or train on the CPU, with --trainer.parallel.device cpu"
        )
    raise ConfigError(f"the run needs {wanted}, and there {_are(count)}: {advice}")


def _are(count: int) -> str:
    return "is 1 GPU" if count == 1 else f"are {count} GPUs"


def choose_training(config: TrainingCommand, placement: Placement, *, clean: bool) -> dict[str, Any]:
    """Fill in, in place, what a training program's settings leave to its device; return it by dotted key. `clean`: the
    run in the directory is removed, and nothing of it kept. Raise ConfigError if the number of ranks does not fit the
    other settings."""
    device = placement.trainer_device
    before = settings_of_run(config, clean=clean)
    dtype = before.get("model", {}).get("dtype") if config.model.dtype is None else None
    chosen = resolved.choose_for_training(config, device, num_devices=len(placement.trainer), dtype=dtype)
    try:
        config.parallel.check_ranks(config.parallel.world_size)
    except ValueError as error:
        raise ConfigError(f"parallel.{error}") from None
    if dtype not in (None, BY_DEVICE[device].dtype):
        print(
            f"model.dtype = {dtype}, kept from the run; a new run on {device} would take {BY_DEVICE[device].dtype} "
            f"(--model.dtype {BY_DEVICE[device].dtype} changes it)"
        )
    return chosen


def choose_rl(config: RlConfig, placement: Placement, machine: Machine, *, starts_inference: bool) -> dict[str, Any]:
    """Fill in, in place, what the settings of trainer and engines leave to their devices; return it by dotted key."""
    of_trainer = choose_training(config.trainer, placement, clean=config.clean)
    of_engine = resolved.choose_for_engine(
        config.inference, machine.engine_device, dtype=config.trainer.model.compute_dtype, shares_gpu=placement.shares
    )
    if config.trainer.sampler_dtype is None:
        config.trainer.sampler_dtype = config.inference.model.dtype
    chosen = {f"trainer.{key}": value for key, value in of_trainer.items()}
    return chosen | {f"inference.{key}": value for key, value in of_engine.items() if starts_inference}


def choose_inference(config: InferenceConfig, machine: Machine) -> dict[str, Any]:
    """Fill in, in place, what the settings of an engine by itself leave to its device; return it by dotted key."""
    return resolved.choose_for_engine(config, machine.engine_device)


def settings_of_run(config: TrainingCommand, *, clean: bool) -> dict[str, Any]:
    """Return the settings of the run that `config` continues or forks, if any; `clean`: that run is removed."""
    run_dir, ckpt = RunDir(config.output_dir), config.ckpt
    numbers = () if clean or run_dir.is_being_removed() else range(run_dir.next_attempt() - 1, 0, -1)
    candidates = [run_dir.configs(number) / f"{process_name(config)}.toml" for number in numbers]
    if ckpt is not None and ckpt.resume_dir is not None:
        candidates.append(ckpt.resume_dir / TRAINER_DIR / CONFIG_NAME)
    for path in candidates:
        if path.is_file():
            return read_settings(path)
    return {}


def keep_picks(config: TrainingCommand, before: Mapping[str, Any]) -> None:
    """Set, in place, what the run picked to fit its GPU, unless the user sets it; print a line for each setting.
    `before`: the result of `settings_of_run`."""
    if not isinstance(config, TrainerConfig):
        return
    config.picked = [key for key in before.get("picked", ()) if key in resolved.PICKABLE]
    for key in [key for key in config.picked if key in resolved.open_settings(config)]:
        value = reduce(lambda table, name: table[name], key.split("."), before)
        resolved.set_values(config, {key: value})
        print(f"{resolved.shown_setting(key, value)}, kept from the run, which picked it to fit a GPU")


def rates_of_run(config: TrainingCommand, before: Mapping[str, Any], *, clean: bool) -> dict[str, Any]:
    """Return the optimizer's settings of the checkpoint that `config` continues from, else of the last attempt.
    `before`, `clean`: the result and the argument of `settings_of_run`."""
    run_dir, wanted = RunDir(config.output_dir), config.ckpt.resume_step if config.ckpt else None
    steps = [] if clean or run_dir.is_being_removed() else run_dir.steps_there()
    for step in [wanted] if isinstance(wanted, int) and wanted in steps else reversed(steps):
        directory, name = run_dir.checkpoint(step), f"{TRAINER_DIR}/{CONFIG_NAME}"
        try:
            entry = read_manifest(directory).files.get(name)
            if entry is None:
                break
            check_file(directory / name, entry)
            return read_settings(directory / name).get("optim", {})
        except CheckpointError:
            continue
    return before.get("optim", {})


def describe(placement: Placement, chosen: Mapping[str, Any], *, engines: Sequence[Sequence[hardware.Gpu]] = ()) -> str:
    """Return the line that says what a run computes on, and which settings follow. `engines`: the GPUs of each."""
    where = ", ".join([f"trainer on {_gpus(placement.trainer)}", *(f"engine on {_gpus(gpus)}" for gpus in engines)])
    # The name is enough: trainer and engine mostly get the same value.
    settings = dict.fromkeys(f"{key.rpartition('.')[2]} = {str(value).lower()}" for key, value in chosen.items())
    return where + (f"; set by the device: {', '.join(settings)}" if settings else "")


def _gpus(gpus: Sequence[hardware.Gpu]) -> str:
    """Return `GPU 0,1 (2 x NVIDIA H100)`, or `the CPU`."""
    return f"GPU {names_of(gpus)} ({len(gpus)} x {gpus[0].model or 'NVIDIA'})" if gpus else "the CPU"


def names_of(gpus: Sequence[hardware.Gpu]) -> str:
    """Return the names of GPUs as CUDA_VISIBLE_DEVICES has them."""
    return ",".join(gpu.name for gpu in gpus)
