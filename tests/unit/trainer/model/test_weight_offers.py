"""Weights that the trainer sends over gloo: the bits of the directory, a refusal that changes nothing, or an error."""

import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from holdfast.config.rl_trainer import CollectiveWeights
from holdfast.config.training import TrainedModelConfig
from holdfast.errors import ConfigError, DataError
from holdfast.inference import transfer as receiving
from holdfast.inference.transfer import Incoming, TransferError
from holdfast.inference.weight_files import Architecture, read_architecture, read_weights
from holdfast.protocol import transfer
from holdfast.protocol.transfer import Offer, PlannedFile, Transfer
from holdfast.run.manifest import describe_files
from holdfast.run.run_dir import RunDir
from holdfast.trainer.mesh import Mesh
from holdfast.trainer.model import safetensors_files, weight_offers
from holdfast.trainer.model.policy import build_policy
from holdfast.trainer.model.publish import WeightPublisher
from holdfast.trainer.model.safetensors_files import SafetensorsFile
from holdfast.trainer.model.weight_offers import WeightOffers
from tests.conftest import ModelFactory
from tests.runs.processes import HANG_S

CPU = torch.device("cpu")
NAMES = ("b.weight", "a.weight", "a.bias", "c")
ARCHITECTURE = Architecture(shapes=dict.fromkeys(NAMES, (4, 3)), tied=False)


@pytest.fixture
def offers(tmp_path: Path) -> Iterator[WeightOffers]:
    (tmp_path / "weights").mkdir()
    with WeightOffers(RunDir(tmp_path), CollectiveWeights(stall_timeout_s=HANG_S), CPU) as offers:
        yield offers
    assert not RunDir(tmp_path).offer.exists()
    assert "weight offer" not in {thread.name for thread in threading.enumerate()}, "it would abort the process"


def offered(directory: Path) -> Offer:
    return msgspec.json.decode(RunDir(directory).offer.read_bytes(), type=Offer)


def tensors(seed: int = 0) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(4, 3, generator=generator)) for name in NAMES]


def join(
    offer: Offer, rank: int = 1, num_members: int = 2, architecture: Architecture = ARCHITECTURE, attempt: str = "first"
) -> Incoming:
    wanted = Transfer(offer, num_members=num_members, first_rank=rank, attempt=attempt)
    return Incoming.join(wanted, rank=0, architecture=architecture, device=CPU)


def receive(incoming: Incoming, architecture: Architecture = ARCHITECTURE) -> dict[str, Tensor]:
    return dict(incoming.receive(architecture, torch.float32))


def test_the_file_is_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        f"{name}.{dtype}.{len(shape)}": torch.ones(shape).to(dtype)
        for dtype in safetensors_files._DTYPES
        for name in ("a", 'é"\\\n\u2028/')
        for shape in ((), (0,), (3, 5))
    }
    file = SafetensorsFile.of(tensors)
    entry = file.write(path := tmp_path / "model.safetensors")
    assert path.read_bytes() == safetensors.torch.save(tensors, {"format": "pt"})
    assert entry == file.describe() == describe_files(tmp_path)[path.name]
    header = transfer.encode_header(file.entries)
    assert transfer.entries_of(PlannedFile(path.name, header)) == file.entries


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_files", [1, 4])
def test_what_is_sent_is_what_is_written(
    dtype: str, num_files: int, offers: WeightOffers, tiny_model: ModelFactory, mesh: Mesh,
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = tiny_model()
    policy = build_policy(TrainedModelConfig(name=str(model)), mesh, seed=0)
    if num_files > 1:
        monkeypatch.setattr(safetensors_files, "MAX_FILE_BYTES", 30_000 if dtype == "float32" else 15_000)
    monkeypatch.setattr(weight_offers, "_GROUP_BYTES", 5_000)
    directory = WeightPublisher(RunDir(tmp_path), policy, tokenizer, mesh, dtype=dtype).publish(3, offers=offers)
    assert len(list(directory.glob("*.safetensors"))) == num_files
    with torch.no_grad():  # the next step, which may begin before anybody takes the offer
        for parameter in policy.parameters():
            parameter.zero_()
    architecture, offer = read_architecture(model), offered(tmp_path)

    def take(rank: int) -> tuple[dict[str, Tensor], str]:
        incoming = join(offer, rank, 3, architecture)
        return dict(incoming.receive(architecture, torch.float32)), incoming.digest

    with ThreadPoolExecutor() as pool:
        taken = list(pool.map(take, (1, 2)))
    expected = read_weights(directory, architecture, dtype=torch.float32, version=3)
    for found, digest in taken:
        assert digest == expected.digest and found.keys() == expected.tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.tensors.items())


def test_an_offer_is_refused_before_anything_is_sent(offers: WeightOffers, tmp_path: Path) -> None:
    offers.offer(1, tensors())
    first = offered(tmp_path)
    other = Architecture(shapes={**ARCHITECTURE.shapes, "c": (3, 4)}, tied=False)
    with pytest.raises(DataError, match=r"tensor 'c' has shape \[4, 3\], the model needs \[3, 4\]"):
        join(first, architecture=other)
    with pytest.raises(DataError, match="tensor 'd' is missing"):
        join(first, architecture=Architecture(shapes={**ARCHITECTURE.shapes, "d": (1,)}, tied=False))
    with pytest.raises(DataError, match=r"the offer of version 2 at .* was replaced by version 1"):
        join(msgspec.structs.replace(first, version=2))
    offers.offer(2, tensors(1))
    with pytest.raises(DataError, match=r"the offer of version 1 at 127\.0\.0\.1:\d+ (cannot be taken|is not open)"):
        join(first)
    second = offered(tmp_path)
    assert receive(join(second)).keys() == ARCHITECTURE.shapes.keys()
    for sending in offers._sent:
        sending.join()
        assert sending.is_alive or not sending._files, "a copy of the model stays"
    for other in ({"num_members": 3}, {"attempt": "second"}):  # such as of an orchestrator that was started again
        with pytest.raises(DataError, match="is not open any more: '2 first', asked for was '"):
            join(second, **other)


def test_a_sender_that_does_not_answer_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen, ThreadPoolExecutor() as pool:
        joining = pool.submit(join, Offer(1, "digest", f"127.0.0.1:{frozen.getsockname()[1]}", stall_timeout_s=0.1))
        wait([joining], HANG_S)
        frozen.shutdown(socket.SHUT_RDWR)  # torch's client still waits
        with pytest.raises(DataError, match="cannot be taken: no answer came in time"):
            joining.result(HANG_S)


def test_a_sender_that_stops_is_noticed(offers: WeightOffers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_offers, "_GROUP_BYTES", 48)
    groups, is_over = weight_offers._groups_of, threading.Event()

    def fail(file: SafetensorsFile) -> Iterator[Tensor]:
        yield next(groups(file))
        raise RuntimeError("the device is gone")

    def stand_still(file: SafetensorsFile) -> Iterator[Tensor]:
        yield next(groups(file))
        is_over.wait()
        raise RuntimeError("nobody waits any more")

    try:
        for version, sabotage, timeout_s, reason in (
            (1, fail, HANG_S, "Connection (closed|reset) by peer"),
            (2, stand_still, 0.5, r"no bytes came for 0\.5 s"),
        ):
            monkeypatch.setattr(weight_offers, "_groups_of", sabotage)
            offers.offer(version, tensors())
            incoming = join(msgspec.structs.replace(offered(tmp_path), stall_timeout_s=timeout_s))
            arriving = incoming.receive(ARCHITECTURE, torch.float32)
            assert next(arriving)[0] == "a.bias"
            with pytest.raises(TransferError, match=reason):
                next(arriving)
    finally:
        is_over.set()


def test_the_clock_of_gloo_gives_the_same_error(offers: WeightOffers, tmp_path: Path) -> None:
    offers.offer(1, tensors())
    incoming = join(offered(tmp_path))
    incoming._group = None
    incoming._arrived.put(RuntimeError("[unbound_buffer.cc:78] Timed out waiting 500ms for recv operation to complete"))
    with pytest.raises(TransferError, match=f"no bytes came for {HANG_S:g} s"):
        next(incoming.receive(ARCHITECTURE, torch.float32))


def test_no_thread_outlives_its_transfer(offers: WeightOffers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_offers, "_GROUP_BYTES", 48)
    offers.offer(1, tensors())
    incoming = join(offered(tmp_path))
    arriving = incoming.receive(ARCHITECTURE, torch.float32)
    for _ in NAMES[:2]:
        next(arriving)
    while not incoming._arrived.not_full._waiters:  # type: ignore[attr-defined]  # with the last group
        time.sleep(0.01)
    (fetching,) = [thread for thread in threading.enumerate() if thread.name == "weights"]
    arriving.close()  # type: ignore[attr-defined]
    fetching.join(HANG_S)
    assert not fetching.is_alive()


def test_a_member_that_is_gone_ends_the_transfer_of_the_others(offers: WeightOffers, tmp_path: Path) -> None:
    offers.offer(1, tensors())
    with ThreadPoolExecutor() as pool:
        stays, goes = pool.map(lambda rank: join(offered(tmp_path), rank, 3), (1, 2))
    arriving = stays.receive(ARCHITECTURE, torch.float32)
    del goes  # before it is ready
    gc.disable()
    try:
        with pytest.raises(TransferError, match="Connection (closed|reset) by peer"):
            next(arriving)
        open_group = weakref.ref(stays)
        del stays, arriving
        assert open_group() is None, "its connections stay until a collection, and the trainer waits for it"
    finally:
        gc.enable()


class Nccl:
    """Stands in for NCCL, which needs a GPU for each member. `made`: what each member was given, and what was set."""

    made: ClassVar[dict[int, tuple[object, ...]]] = {}

    class Options:
        _timeout: timedelta

    def __init__(self, store: dist.TCPStore, rank: int, size: int, options: Options) -> None:
        self.rank = rank
        keys = [transfer.joined_key(other) for other in range(size)]
        self.made[rank] = (store.check(keys), options._timeout, os.environ["TORCH_NCCL_BLOCKING_WAIT"])

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.made[self.rank] = (*self.made[self.rank], device, os.environ.get("NCCL_PROTO"))


@pytest.mark.engine
def test_members_meet_before_they_connect_by_nccl_and_a_lost_one_is_an_error(
    offers: WeightOffers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.utils import nccl

    assert os.environ.pop("TORCH_NCCL_BLOCKING_WAIT") == "1"  # of the trainer
    offers.offer(1, tensors())
    join(offered(tmp_path))
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"  # of the engine
    monkeypatch.setattr(Nccl, "made", {})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(nccl, "_unpinned_env", {"NCCL_PROTO": None})
    monkeypatch.setenv("NCCL_PROTO", "Simple")  # as vLLM pins it in its own process
    cuda, wait_s = torch.device("cuda", 0), timedelta(seconds=HANG_S)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    another = dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False)
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(weight_offers._open_group, store, 2, cuda, wait_s)
        receiving._open_group(another, 1, 2, cuda, wait_s)
        sending.result(HANG_S)
    assert Nccl.made.pop(1) == (True, wait_s, "1", cuda, None) and Nccl.made.pop(0)[:4] == (True, wait_s, "1", cuda)
    with pytest.raises(RuntimeError):  # the third does not come
        receiving._open_group(another, 1, 3, cuda, timedelta(seconds=0.1))
    assert not Nccl.made


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(ConfigError, match=rf"weights\.host = '{host}': this machine cannot listen there \("):
            WeightOffers(RunDir(tmp_path), CollectiveWeights(host=host), CPU)
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match=rf"weights\.host = '{host}': no engine can connect to that"):
            WeightOffers(RunDir(tmp_path), CollectiveWeights(host=host), CPU)


def test_other_bytes_than_the_digest_says_are_an_error(offers: WeightOffers, tmp_path: Path) -> None:
    sent = tensors()
    offers.offer(1, sent)
    sent[0][1][0, 0] += 1
    arriving = join(offered(tmp_path)).receive(ARCHITECTURE, torch.float32)
    assert [next(arriving)[0] for _ in NAMES] == sorted(NAMES)
    with pytest.raises(TransferError, match="the bytes have the digest .*, expected was"):
        next(arriving)
    sent[1][1][0, 0] = float("nan")
    offers.offer(2, sent)
    with pytest.raises(DataError, match=r"version 2: tensor 'a\.weight' holds NaN or infinity"):
        receive(join(offered(tmp_path)))
