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

from holdfast.process.scratch import drop, make_scratch
from tests.lanes import marks, skips, without
from tests.lanes.durations import NAME, Durations, recorded, seconds_of_files
from tests.lanes.marks import LANES, lane_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from xdist.workermanage import WorkerController

    from holdfast.trainer.mesh import Mesh

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "examples" / "reverse_text" / "base"

ModelFactory = Callable[..., Path]

_cache: Path | None = None
_SECONDS = pytest.StashKey[dict[str, float]]()
_TINY = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.1,
    "pad_token_id": 0, "eos_token_id": 3, "bos_token_id": None,
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
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
        config.pluginmanager.register(skips.Skips(config.rootpath / skips.NAME))
    gc.disable()  # until all is collected: as `heavy_imports` of every process does it, for modules of tests as well
    _cache = make_scratch(Path(tempfile.gettempdir()))  # also one that was killed leaves nothing for good
    kept = ("HOLDFAST_VERIFIERS_PYTHON",)
    for name in [name for name in os.environ if name.startswith("HOLDFAST_") and name not in kept]:  # users' settings
        del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = "1"
    # A thread that waits for another sleeps: on busy cores one that spins keeps the other from its work.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
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
    """Remove the cache; there is none where pytest ended before it was made."""
    if _cache is not None:
        drop(_cache)


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

        order.sort(items, config.workerinput["seconds_of_files"])
    elif lane == "everyday":
        _start_imports(items)


def _start_imports(items: list[pytest.Item]) -> None:
    """Import torch and vLLM for the commands of tests while other tests run; tests with commands come last."""
    needs = {item: {mark.name for mark in item.iter_markers()} & {"launch", "ranks", "engine"} for item in items}
    if any(needs.values()):
        from tests.forking.commands import shared_commands

        shared_commands()
    if any("engine" in names for names in needs.values()):
        from tests.forking.engines import shared_engines

        shared_engines()
    items.sort(key=lambda item: ("engine" in needs[item], bool(needs[item])))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Let a test have the resources that its marks name, and no others."""
    names = {mark.name for mark in item.iter_markers()}
    marks.begin(names)
    if item.config.option.light:
        without.refuse_to_children(names)


def pytest_collection_finish() -> None:
    """From here on garbage is looked for, but not among the million objects that the imports have made."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Give all workers the same durations to sort by, also one that replaces another; other runs write new ones."""
    node.workerinput["seconds_of_files"] = node.config.stash.setdefault(_SECONDS, dict(seconds_of_files(recorded())))


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
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def command() -> Callable[[str], str]:
    """Return where an installed console script lies: `command("sft")`."""
    return lambda name: str(Path(sys.executable).with_name(name))
