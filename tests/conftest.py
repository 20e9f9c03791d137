"""What several test files share: one thread, no network, tiny models, a process group of one rank."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.shared.process.scratch import drop, make_scratch
from tests.lanes import marks, without
from tests.lanes.durations import NAME, Durations
from tests.lanes.marks import LANES, lane_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from holdfast.trainer.mesh import Mesh
    from tests.runs.training import Runs, SftRun

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "examples" / "reverse_text" / "base"

ModelFactory = Callable[..., Path]

_cache = ""
_TINY = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 3,
    "bos_token_id": None,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of lanes."""
    lanes = parser.getgroup("lanes")
    lanes.addoption(
        "--lane",
        choices=(*LANES, "all"),
        help="run the tests of one lane; default: everyday, or all of the paths that are given",
    )
    lanes.addoption("--light", action="store_true", help="refuse imports of torch, transformers and vLLM")


def pytest_configure(config: pytest.Config) -> None:
    """Before torch or datasets are imported: threads, and a cache that is not the user's."""
    global _cache
    if config.option.light:
        without.refuse()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(everyday=_lane(config) == "everyday", path=config.rootpath / NAME))
    gc.disable()  # until all is collected: as `heavy_imports` of every process does it, for modules of tests as well
    _cache = str(make_scratch(Path(tempfile.gettempdir())))  # also one that was killed leaves nothing for good
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HOLDFAST_CACHE"] = f"{_cache}/holdfast"
    os.environ["HF_DATASETS_CACHE"] = f"{_cache}/datasets"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for GPUs must not keep forks from using them
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:  # in the background of a shell; commands would ignore it as well
            signal.signal(number, handler)
    _keep_bytecode()


def _keep_bytecode() -> None:
    """Where no bytecode may be written, each of the many processes would compile torch anew, for 6 s."""
    torch = importlib.util.find_spec("torch")
    if not sys.dont_write_bytecode or torch is None or torch.origin is None:
        return
    if not Path(importlib.util.cache_from_source(torch.origin)).exists():
        sys.dont_write_bytecode = False
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = f"{_cache}/bytecode"
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_unconfigure() -> None:
    """Remove the cache."""
    drop(Path(_cache))


def _lane(config: pytest.Config) -> str:
    """Return the lane that is run; `all` where tests are named."""
    if config.option.lane:
        return config.option.lane
    return "all" if config.args_source is pytest.Config.ArgsSource.ARGS else "everyday"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other lanes, and those that need a GPU where there is none; put files into an order."""
    wanted: set[str] = set(LANES) if (lane := _lane(config)) == "all" else {lane}
    lanes = {item: lane_of(mark.name for mark in item.iter_markers()) for item in items}
    if "gpu" in wanted and "gpu" in lanes.values():
        import torch

        wanted -= set() if torch.cuda.is_available() else {"gpu"}
    if others := [item for item in items if lanes[item] not in wanted]:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if lanes[item] in wanted]
    if hasattr(config, "workerinput"):
        from tests.lanes import order

        order.sort(items)
    elif lane == "everyday" and any(item.get_closest_marker("engine") for item in items):
        from tests.forking.engines import shared_engines

        shared_engines()  # it imports vLLM beside all other tests
        items.sort(key=lambda item: item.get_closest_marker("engine") is not None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Let a test have the resources that its marks name, and no others."""
    marks.begin(mark.name for mark in item.iter_markers())


def pytest_collection_finish() -> None:
    """From here on garbage is looked for, but not among the million objects that the imports have made."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., None]) -> object:
    """Let workers take files from both ends of that order."""
    from tests.lanes import order

    return order.scheduler(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the test in the root of the repository, where the paths of the shipped configs are right."""
    monkeypatch.chdir(ROOT)
    return ROOT


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """Return a maker of model directories: `tiny_model("llama", tied=False, weights=True, **config)`."""
    made: dict[str, Path] = {}

    def make(kind: str = "qwen3", *, tied: bool = True, weights: bool = True, seed: int = 0, **fields: Any) -> Path:
        key = json.dumps([kind, tied, weights, seed, fields], sort_keys=True, default=str)
        if key not in made:
            directory = tmp_path_factory.mktemp(kind)
            made[key] = write_tiny_model(directory, kind, tied=tied, weights=weights, seed=seed, fields=fields)
        return made[key]

    return make


def write_tiny_model(
    directory: Path, kind: str, *, tied: bool, weights: bool, seed: int, fields: dict[str, Any]
) -> Path:
    """Write a tiny model of the characters of the example; return its directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    config = AutoConfig.for_model(kind, **(_TINY | {"tie_word_embeddings": tied} | fields))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if weights:
            with torch.no_grad():
                for parameter in model.parameters():  # norms and biases that a mistake in them would show
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            model.save_pretrained(directory)
        else:
            config.architectures = [type(model).__name__]
            config.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BASE / name, directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """Return the character tokenizer of the example: one token per character."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(BASE)


@pytest.fixture(scope="session")
def mesh() -> Iterator[Mesh]:
    """Return the ranks of a trainer of one process: this one."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from holdfast.trainer.mesh import Mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device_mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    yield Mesh(rank=0, world_size=1, device=torch.device("cpu"), device_mesh=device_mesh)
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def sft_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of ragged samples."""
    from tests.runs.training import write_data

    return write_data(tmp_path_factory.mktemp("data") / "samples.jsonl")


@pytest.fixture(scope="session")
def sft_runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: ModelFactory, sft_data: Path) -> Runs:
    """Return runs of the real `sft` command by name."""
    from tests.runs.training import Runs, run_sft

    home = tmp_path_factory.mktemp("runs")
    plain, dropout = tiny_model(weights=False), tiny_model(weights=False, attention_dropout=0.3)
    runs = Runs()

    def define(name: str, model: Path, *flags: str, after: str | None = None, starts_python: bool = False) -> None:
        """Define a run in a directory of its own, or in a copy of that of the run before."""

        def make() -> SftRun:
            if after is not None:
                shutil.copytree(runs.succeeded(after).run_dir.path, home / name)
            return run_sft(home / name, model, sft_data, *flags, starts_python=starts_python)

        runs.define(name, make)

    exact = ("--data.validation-fraction", "0.1", "--val-interval", "3", "--max-steps")
    two = ("--parallel.num-ranks", "2", "--max-steps")
    define("two_straight", dropout, *two, "10", "--ckpt.interval", "5")
    define("half", dropout, *exact, "5", "--ckpt", starts_python=True)
    define("packed", plain, "--max-steps", "4")
    define("straight", dropout, *exact, "10", starts_python=True)
    define("broken_numbers", plain, "--optim.lr", "1e30", "--ckpt.interval", "1")
    define("too_long", plain, "--data.seq-len", "6")
    define("packed_on_two", plain, *two, "4")
    for name, size in (("one_by_one", "1"), ("eight_at_once", "8")):
        define(name, plain, "--no-data.pack", "--data.micro-batch-size", size, "--max-steps", "4")
    define("resumed", dropout, *exact, "10", "--ckpt.resume-step", "5", after="half", starts_python=True)
    two_resumed = (*two, "10", "--ckpt.interval", "5", "--ckpt.resume-step", "5")
    define("two_resumed", dropout, *two_resumed, after="two_straight")
    loaded = ("--max-steps", "10", "--ckpt.resume-step", "latest")
    define("two_loaded_by_one", dropout, *loaded, after="two_straight")
    slices = ("--parallel.sequence-parallel", "2")
    define("packed_in_slices", plain, *two, "4", *slices)
    define("two_slices_straight", dropout, *two, "10", "--ckpt.interval", "5", *slices)
    define("two_slices_resumed", dropout, *two_resumed, *slices, after="two_slices_straight")
    copies = (*two_resumed, "--parallel.replicas", "2")
    define("two_copies_resumed", dropout, *copies, after="two_straight")
    define("two_copies_loaded_by_one", dropout, *loaded, after="two_copies_resumed")
    define("two_offloaded_resumed", dropout, *two_resumed, "--parallel.cpu-offload", after="two_straight")
    define("two_offloaded_loaded_by_one", dropout, *loaded, after="two_offloaded_resumed")
    offloaded = ("10", "--ckpt.resume-step", "5", "--parallel.cpu-offload")
    define("resumed_offloaded", dropout, *exact, *offloaded, after="half")
    return runs


@pytest.fixture(scope="session")
def ends() -> Callable[..., bool]:
    """Return a wait for the end of any process, child or not: `ends(pid, within_s=0)`."""
    from tests.runs.processes import HANG_S

    def wait(pid: int, *, within_s: float = HANG_S) -> bool:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([descriptor], [], [], within_s)[0])
        finally:
            os.close(descriptor)

    return wait


@pytest.fixture
def restored_signals() -> Iterator[None]:
    """Put the signal handlers back that a supervisor in this process replaces."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def command() -> Callable[[str], str]:
    """Return where an installed console script lies: `command("sft")`."""
    return lambda name: str(Path(sys.executable).with_name(name))
