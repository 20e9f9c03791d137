"""Our part of vLLM's worker processes: loads weights, swaps weights, and ends the process with the server.

vLLM imports this module by name (`--worker-extension-cls`) in every worker process, before it loads the model, and
mixes `PolicyWorker` into its worker. The server calls the methods by `collective_rpc`: `stage_weights` at any time,
`apply_weights` while the engine is paused.
"""

import functools
import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, cast

import msgspec
import torch
from vllm import _custom_ops
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from holdfast.errors import DataError, ReadError, is_storage_failure
from holdfast.inference.transfer import Incoming, TransferError
from holdfast.inference.weight_files import CheckedWeights, DirectorySource, read_architecture, read_weights
from holdfast.process.child import die_with_parent
from holdfast.protocol.transfer import Transfer

LOAD_FORMAT = "holdfast"
SWAP_FAILED_EXIT_CODE = 70
# Reading may block the engine for so long: then the server need not ask again.
_STAGE_AT_ONCE_S = 0.2

# Below vLLM's own logger, which marks lines of the engine: `launcher.restart_policy` looks for that mark.
_log = logging.getLogger("vllm.inference.worker")
# It warns at every update of each layer without weights.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

# Digest of the weights that `CheckedLoader` has put into the model of this process.
_loaded_digest: str | None = None


class ApplyResult(TypedDict):
    """Answer of `apply_weights`: the digest of the new weights, or why the model is torn."""

    digest: str | None
    torn: str | None


class StageResult(TypedDict):
    """Answer of `stage_weights`: why the weights are refused or unreadable; both None if the weights are staged."""

    refused: str | None
    unreadable: str | None


def prepare_engine_process(*, parent: int) -> None:
    """Make this process end with process `parent`, limit torch's threads as the environment says, and mend kernels.

    Call before vLLM binds threads: later `torch.set_num_threads` has no effect."""
    die_with_parent(parent=parent)
    threading.excepthook = _end_with_sockets
    if current_platform.is_cpu():
        _mend_kernels()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


def _end_with_sockets(failed: threading.ExceptHookArgs) -> None:
    """Report a thread's exception, and end the engine if the thread read or wrote its sockets.

    vLLM's threads `process_input_sockets` and `process_output_sockets` end at a message that they cannot decode. The
    engine would live on without an answer to anybody."""
    threading.__excepthook__(failed)
    if failed.thread is not None and failed.thread.name.endswith("_sockets)"):
        os._exit(1)


def _rotate_flattened(rotate: Callable[..., None]) -> Callable[..., None]:
    """Return vLLM's in-place rotary embedding, also for queries and keys (tokens, heads, size) of LFM2.

    vLLM's kernel for CPUs treats these as one head, and rotates beyond its end."""

    def flattened(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None, *others: Any, **named: Any
    ) -> None:
        if positions.dim() == 1:
            query, key = query.flatten(1), None if key is None else key.flatten(1)  # views
        rotate(positions, query, key, *others, **named)

    return flattened


def _never_one_row(multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return vLLM's matrix product on CPUs with a single row doubled.

    For one row oneDNN uses another kernel, which adds up more than 1,024 products in float32 in another order. The last
    answer of a batch would have other bits than the same answer beside others."""

    def multiplied(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if torch.compiler.is_compiling():  # vLLM compiles one graph for any number of rows
            rows = x.reshape(-1, x.shape[-1])
            return multiply(handler, torch.cat([rows, rows[:1]]), bias)[:-1].reshape(*x.shape[:-1], -1)
        if x.numel() != x.shape[-1]:
            return multiply(handler, x, bias)
        twice = x.reshape(1, -1).expand(2, -1).contiguous()
        return multiply(handler, twice, bias)[0].reshape(*x.shape[:-1], -1)

    return multiplied


def _in_sixteens(linear: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return PyTorch's linear layer with rows padded to a multiple of 16; vLLM uses this layer for small products.

    In float32 the order of MKL's sums depends on the number of rows."""

    def applied(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        num_rows = rows.shape[0]
        filled = torch.nn.functional.pad(rows, (0, 0, 0, -num_rows % 16))
        return linear(filled, weight, bias)[:num_rows].reshape(*x.shape[:-1], -1)

    return applied


@functools.cache
def _mend_kernels() -> None:
    """Replace the kernels for CPUs that are wrong, or whose bits depend on the number of rows."""
    _custom_ops.rotary_embedding = _rotate_flattened(_custom_ops.rotary_embedding)
    _custom_ops.onednn_mm = _never_one_row(_custom_ops.onednn_mm)
    torch.nn.functional.linear = _in_sixteens(torch.nn.functional.linear)  # type: ignore[assignment]


if (_parent := multiprocessing.parent_process()) is not None and _parent.pid is not None:
    prepare_engine_process(parent=_parent.pid)


@register_model_loader(LOAD_FORMAT)
class CheckedLoader(BaseModelLoader):
    """Loads version 0 with the same checks and digest as later versions."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: the server resolves hub names before it starts the engine."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Read, check and load the weights of `model.name`. Raise DataError if weights are missing or damaged."""
        global _loaded_digest
        directory = Path(model_config.model)
        checked = read_weights(directory, read_architecture(directory), dtype=_engine_dtype(model_config))
        loaded: set[str] | None = cast(Any, model).load_weights(iter(checked.tensors.items()))
        _refuse_unset_weights(model, loaded, directory)
        _loaded_digest = checked.digest


class PolicyWorker:
    """Methods mixed into vLLM's worker for versions of the policy's weights."""

    if TYPE_CHECKING:
        vllm_config: VllmConfig
        model_config: ModelConfig
        device: torch.device
        rank: int
        model_runner: Any

    # Class attributes: a mixin of vLLM's worker gets no constructor call.
    _source: DirectorySource | None = None
    _staged: CheckedWeights | Incoming | None = None
    _staging: Future[StageResult] | None = None

    def loaded_digest(self) -> str | None:
        """Return the digest of the weights that were loaded at the start; None with dummy weights."""
        return _loaded_digest

    def stage_weights(self, location: str, version: int, transfer: str | None = None) -> StageResult | None:
        """Read and check the weights of `version` in a thread; None if that takes long: see `staged_weights`.
        `transfer`: JSON of a `Transfer`, which the thread joins instead."""
        if self._staging is not None:
            self._staging.exception()  # wait until an abandoned update has ended
        self._staging = Future()
        thread = threading.Thread(target=self._stage, args=(location, version, transfer, self._staging), daemon=True)
        thread.start()
        thread.join(_STAGE_AT_ONCE_S)
        return self.staged_weights()

    def staged_weights(self) -> StageResult | None:
        """Return the result of `stage_weights`; None while it is running."""
        assert self._staging is not None
        return self._staging.result() if self._staging.done() else None

    def _stage(self, location: str, version: int, transfer: str | None, result: Future[StageResult]) -> None:
        self._staged = None  # of an update that was given up
        try:
            if self._source is None:
                self._source = DirectorySource(Path(self.model_config.model), _engine_dtype(self.model_config))
            if transfer is None:
                self._staged = self._source.stage(location, version)
            else:
                wanted = msgspec.json.decode(transfer, type=Transfer)
                self._staged = Incoming.join(
                    wanted, rank=self.rank, architecture=self._source.architecture, device=self.device
                )
        except (DataError, ReadError, OSError) as error:
            said, unreadable = str(error), is_storage_failure(error)
            result.set_result(
                StageResult(refused=None if unreadable else said, unreadable=said if unreadable else None)
            )
        except BaseException as error:  # noqa: BLE001 - raised by `staged_weights`
            result.set_exception(error)
        else:
            result.set_result(StageResult(refused=None, unreadable=None))

    def apply_weights(self) -> ApplyResult:
        """Swap the staged weights into the model and return their digest. The engine must be paused.

        If a transfer breaks off, the model is torn until the next call succeeds. A half-written model must never serve,
        so any other failure ends the process with SWAP_FAILED_EXIT_CODE."""
        try:
            staged, self._staged = self._staged, None
            assert staged is not None, "apply_weights without stage_weights"
            try:
                self._swap(staged)
            except (TransferError, DataError) as error:  # of `Incoming.receive`
                return ApplyResult(digest=None, torn=str(error))
            self.model_runner.reset_lora_state()
        except BaseException:  # noqa: BLE001 - the process ends
            _log.exception("the weights could not be swapped; the engine ends, because its model is half-written")
            # os._exit flushes nothing.
            logging.shutdown()
            os._exit(SWAP_FAILED_EXIT_CODE)
        return ApplyResult(digest=staged.digest, torn=None)

    def _swap(self, staged: CheckedWeights | Incoming) -> None:
        model, dtype = self.model_runner.get_model(), _engine_dtype(self.model_config)
        if isinstance(staged, Incoming):
            assert self._source is not None
            tensors = staged.receive(self._source.architecture, dtype)
        else:
            tensors = iter(staged.tensors.items())
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            experts = _forget_packed_experts(model) if self.device.type == "cpu" else []
            _forget_torn_layers(model)
            initialize_layerwise_reload(model)
            model.load_weights(tensors)
            deque(tensors, maxlen=0)  # to the end: a digest comes last
            finalize_layerwise_reload(model, self.model_config)
            if self.device.type == "cpu":
                _repack_tied_layers(model)
            if any(method.moe_kernel is None for method in experts):
                raise RuntimeError(
                    f"this build of vLLM does not renew the experts of {type(model).__name__} when weights are "
                    "pushed: the model can be served, and not trained by rl"
                )


def _engine_dtype(model_config: ModelConfig) -> torch.dtype:
    assert isinstance(model_config.dtype, torch.dtype)
    return model_config.dtype


def _refuse_unset_weights(model: torch.nn.Module, loaded: set[str] | None, directory: Path) -> None:
    """Refuse a model if no file set some weights, which are random memory then; `loaded`: names that were set."""
    if loaded is None:
        return
    unset = sorted(name for name, parameter in model.named_parameters() if parameter.numel() and name not in loaded)
    if unset:
        raise DataError(
            f"{directory}: vLLM's {type(model).__name__} has {len(unset)} weights that are in no file, such as "
            f"'{unset[0]}'. What config.json asks for and what the files hold differ: correct config.json"
        )


def _forget_torn_layers(model: torch.nn.Module) -> None:
    """Forget the tensors of a transfer that broke off, for layers that did not get all of them.

    vLLM would count them as loaded: such a layer would take the next weights for whole too early, and leave out others.
    """
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0


def _forget_packed_experts(model: torch.nn.Module) -> list[Any]:
    """Make layers of experts pack their weights again, as at the first load; return their packing methods.

    On CPU vLLM packs only at the first load: a reload would copy plain weights into the memory of packed weights."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    packing = [method for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method in packing:
        method.moe_kernel = None
    return packing


def _repack_tied_layers(model: torch.nn.Module) -> None:
    """Pack again the weights of tied output layers, which keep a packed beside a plain weight.

    The reload renews the embedding's weight, but not the packed copy, which would compute with the old weights."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch: Callable[..., None] = dispatch_cpu_unquantized_gemm
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and isinstance(weight, torch.Tensor) and weight.numel():
            dispatch(module, remove_weight=False)
