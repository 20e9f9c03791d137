"""Checks within one process: kernels, the head, waiting for the device, families of models, files for engines."""

import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self
from unittest.mock import patch

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer

from holdfast.config.data import SftDataConfig
from holdfast.config.rl_trainer import CollectiveWeights
from holdfast.config.training import AdamWConfig, TrainedModelConfig
from holdfast.inference import transfer
from holdfast.inference.weight_files import Architecture, read_architecture, read_weights
from holdfast.protocol.transfer import Offer, Transfer
from holdfast.run.run_dir import RunDir
from holdfast.trainer.data.packing import PackedIndex, Sample
from holdfast.trainer.mesh import Mesh, Sums
from holdfast.trainer.model import weight_offers
from holdfast.trainer.model.attention import KERNELS, packed_attention
from holdfast.trainer.model.logprobs import plain_head, token_logprobs
from holdfast.trainer.model.parity_check import check_model
from holdfast.trainer.model.policy import Policy, build_policy, supervised_step
from holdfast.trainer.model.publish import WeightPublisher
from holdfast.trainer.model.weight_offers import WeightOffers
from holdfast.trainer.optimizer import build_optimizer
from holdfast.trainer.session import throughput
from tests.gpu.gpu_place import LARGE, SMALL, Place
from tests.models.families import FAMILIES, random_samples, reference_outcome, trainer_outcome, write_model


def attention(place: Place, dtype: torch.dtype, window: int | None) -> None:
    """The kernel for samples of any length: values, gradients, time and memory, beside the padded batch."""
    heads, kv_heads, dim, total = (4, 2, 8, 48) if place.is_toy else (32, 8, 128, 32768)
    sequences = _sharing(_ragged(total))
    device = torch.device(place.device)
    generator = torch.Generator().manual_seed(0)

    def random(num: int) -> Tensor:
        drawn = torch.randn(1, num, total, dim, generator=generator)
        return drawn.to(device, dtype).requires_grad_()

    given = random(heads), random(kv_heads), random(kv_heads)
    upstream = torch.randn(1, total, heads, dim, generator=generator).to(device, dtype)
    index = PackedIndex.from_sequences(sequences, device=device)

    def run() -> tuple[Tensor, ...]:
        out, _ = packed_attention(nn.Identity(), *given, None, sliding_window=window, packed_index=index)
        return out.detach(), *torch.autograd.grad(out, given, upstream)

    what = f"{str(dtype).removeprefix('torch.')}, window {window or 'none'}"
    found = {"kernel": run()}
    _measure(place, f"kernel, {what}", run)
    if place.device == "cuda" and dtype == torch.bfloat16:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize()
        names = [event.key for event in seen.key_averages()]
        assert any("flash" in name.lower() for name in names), names
    with _without_kernel(place.device):
        found["padded"] = run()
        _measure(place, f"padded batch, {what}", run)
    expected = _plain(given, upstream, sequences, window)
    bound = 1e-4 if dtype == torch.float32 else 0.02
    for name, tensors in found.items():
        for part, ours, plain in zip(("values", "dQ", "dK", "dV"), tensors, expected, strict=True):
            apart = float((ours.float() - plain).norm() / plain.norm())
            place.note("attention", f"{part} apart from plain float32, {name}, {what}", apart, "of norm", f"<= {bound}")
            assert apart <= bound, (name, part)


def _ragged(total: int) -> list[int]:
    """Return lengths of a log-normal distribution that make a row of `total` tokens."""
    drawn = np.random.default_rng(0).lognormal(0, 1, 10_000) * total / 24
    lengths = list[int]()
    for length in drawn.astype(int):
        lengths.append(int(min(max(1, length), total - sum(lengths))))
        if sum(lengths) == total:
            break
    return lengths


def _sharing(lengths: list[int]) -> list[np.ndarray]:
    """Return the tokens of sequences of these many own tokens; every third begins with half of another."""
    sequences = list[np.ndarray]()
    for number, own in enumerate(np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])):
        prefix = sequences[-1][: (len(sequences[-1]) + 1) // 2] if number % 3 == 1 else own[:0]
        sequences.append(np.concatenate([prefix, own]))
    return sequences


def _plain(given: Sequence[Tensor], upstream: Tensor, sequences: list[np.ndarray], window: int | None) -> list[Tensor]:
    """Return values and gradients of attention sample by sample in float32."""
    queries, keys, values = (tensor.detach().float().requires_grad_() for tensor in given)
    outs, used = [], 0
    for sequence in sequences:
        tokens = torch.from_numpy(sequence).to(queries.device)
        place = torch.arange(len(tokens), device=queries.device)
        distance = place[:, None] - place[None, :]
        seen = (distance >= 0) & (distance < (window or len(tokens)))
        query, key, value = (tensor.index_select(2, tokens) for tensor in (queries, keys, values))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)
        own = int(tokens[-1]) + 1 - used
        outs.append(out[:, :, -own:])
        used += own
    out = torch.cat(outs, 2).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, (queries, keys, values), upstream.float())]


@contextmanager
def _without_kernel(device: str) -> Iterator[None]:
    kernel = KERNELS.pop(device, None)
    try:
        yield
    finally:
        if kernel is not None:
            KERNELS[device] = kernel


def _measure(place: Place, what: str, run: Callable[[], object]) -> None:
    with place.peak_mib() as peak:
        seconds = place.seconds(run)
        mib = peak()
    place.note("attention", f"forward and backward, {what}", seconds * 1e3, "ms")
    place.note("attention", f"memory, {what}", mib, "MiB")


def head(place: Place) -> None:
    """The head of a large vocabulary, by tokens of a chunk: the same numbers, time and memory."""
    tokens, hidden, vocabulary = (48, 16, 97) if place.is_toy else (16384, 4096, 151936)
    chunks = (8, 16, 64) if place.is_toy else (512, 1024, 4096)
    device = torch.device(place.device)
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16
    hidden_NH = torch.randn(tokens, hidden, generator=generator).to(device, dtype).requires_grad_()
    weight_VH = (torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5).to(device, dtype).requires_grad_()
    target_ids_N = torch.randint(vocabulary, (tokens,), generator=generator).to(device)
    found = []
    for chunk in chunks:

        def run(chunk: int = chunk) -> Tensor:
            head = plain_head(weight_VH)
            logprobs_N = token_logprobs(hidden_NH, head, target_ids_N, chunk_tokens=chunk).logprobs_N
            torch.autograd.grad(logprobs_N.mean(), (hidden_NH, weight_VH))
            return logprobs_N.detach()

        with place.peak_mib() as peak:
            seconds = place.seconds(run, repeat=2)
            mib = peak()
        place.note("head", f"forward and backward, chunks of {chunk}", seconds * 1e3, "ms")
        place.note("head", f"memory, chunks of {chunk}", mib, "MiB")
        found.append(run())
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-3)


def speed(place: Place, mesh: Mesh) -> None:
    """Train steps of four full rows: tokens a second, MFU and memory, with each way to hold activations."""
    seq_len = 32 if place.is_toy else 8192
    samples = [_sample(seq_len) for _ in range(4)]
    data = SftDataConfig(seq_len=seq_len, micro_batch_size=1)
    kinds = {"recomputed": (True, False), "kept": (False, False)}
    if not place.is_toy:
        kinds |= {"kept, compiled": (False, True)}
    for kind, (recomputed, compiled) in kinds.items():
        config = TrainedModelConfig(
            name=str(place.model(**({} if place.is_toy else LARGE))), init="random", dtype="bfloat16",
            activation_checkpointing=recomputed, compile=compiled, logits_chunk_tokens=1024,
        )  # fmt: skip
        with place.peak_mib() as peak:
            policy = build_policy(config, mesh, seed=0)
            optimizer = build_optimizer(policy.hf_model, AdamWConfig())

            def step(policy: Policy = policy, optimizer: torch.optim.Optimizer = optimizer) -> None:
                supervised_step(policy, samples, data, mesh)
                optimizer.step()
                optimizer.zero_grad()

            seconds = place.seconds(step)
            mib = peak()
        parameters = sum(parameter.numel() for parameter in policy.hf_model.parameters())
        found = throughput(mesh, parameters, num_tokens=4 * seq_len, seconds=seconds)
        place.note("speed", f"a step of 4 rows, activations {kind}", seconds, "s")
        place.note("speed", f"tokens a second, activations {kind}", found["tokens_per_s"], "tokens/s")
        if "mfu" in found:
            place.note("speed", f"MFU, activations {kind}", found["mfu"], "", "H200: 0.17, kept 0.22, compiled 0.29")
        place.note("speed", f"memory, activations {kind}", mib / 1024, "GiB")
        place.note("speed", f"16 bytes for each of {parameters:,} parameters", 16 * parameters / 2**30, "GiB")
        del policy, optimizer, step


def no_waiting(place: Place, mesh: Mesh) -> None:
    """A step of several micro-batches reads the device once, at its end; anything else is an error of CUDA's own."""
    config = TrainedModelConfig(name=str(place.model()), init="random", dtype="bfloat16")
    policy = build_policy(config, mesh, seed=0)
    samples = [_sample(length) for length in (20, 9, 31, 4, 17, 25)]
    data = SftDataConfig(seq_len=32, micro_batch_size=1)
    supervised_step(policy, samples, data, mesh)  # kernels load, and memory is taken, at the first
    read, reads = Sums.read, list[int]()

    def allowed(sums: Sums) -> dict[str, float]:
        reads.append(1)
        with _sync("default", place.device):
            return read(sums)

    Sums.read = allowed
    try:
        with _sync("error", place.device):
            supervised_step(policy, samples, data, mesh)
    finally:
        Sums.read = read
    place.note("waiting", "times that a step of 5 micro-batches reads the device", len(reads), "", "1")
    assert len(reads) == 1


@contextmanager
def _sync(mode: str, device: str) -> Iterator[None]:
    if device != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _sample(length: int) -> Sample:
    ids = np.random.default_rng(length).integers(5, 100, length).astype(np.int32)
    return Sample(ids, np.ones(length, dtype=bool))


def family(place: Place, mesh: Mesh, name: str) -> None:
    """What docs/models.md says of a family: its loss and gradient are those of plain transformers on a CPU."""
    kind = next(family for family in FAMILIES if family.name == name)
    directory = write_model(kind, place.folder / f"family_{abs(hash(name))}", seed=1)
    samples = random_samples((23, 5, 31, 2, 14, 9), seed=1)
    expected = reference_outcome(directory, samples)
    for dtype in ("float32", "bfloat16"):
        if dtype == "bfloat16" and kind.kind in ("minimax", "mamba", "mamba2"):
            continue  # transformers mixes dtypes there, and docs/models.md says so
        config = TrainedModelConfig(name=str(directory), logits_chunk_tokens=16, dtype=dtype)
        policy = build_policy(config, mesh, seed=0)
        check_model(policy, mesh, name=name, pack=True, dtype=dtype)
        loss, gradient = trainer_outcome(policy.eval(), samples, pack=True, budget=64).difference(expected)
        bound = 1e-4 if dtype == "float32" else 0.05
        place.note("families", f"loss apart from transformers', {name}, {dtype}", loss, "nats", f"<= {bound:g}")
        assert loss <= bound
        if dtype == "float32":
            place.note("families", f"gradient apart, {name}", gradient, "of norm", "<= 0.001")
            assert gradient <= 1e-3


class _Channel:
    """A process group of one sender and one receiver within this process: NCCL wants a GPU for each."""

    def __init__(self, sent: queue.Queue[Tensor], *, sends: bool) -> None:
        self._sent, self._sends = sent, sends
        self.streams = set[int]()

    def allreduce(self, tensors: list[Tensor], options: object) -> Self:
        return self

    def broadcast(self, tensors: list[Tensor], options: object) -> Self:
        if tensors[0].is_cuda:
            stream = torch.cuda.current_stream()
            self.streams.add(stream.stream_id)
            stream.synchronize()
        if self._sends:
            self._sent.put(tensors[0].cpu())
        else:
            tensors[0].copy_(self._sent.get())
        return self

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        pass


def weights_on_streams(place: Place) -> None:
    """A trainer sends on a stream of its own; an engine that copies late, on another stream, gets what was sent."""
    sent = queue.Queue[Tensor](maxsize=1)
    sends, receives = _Channel(sent, sends=True), _Channel(sent, sends=False)
    device, run_dir = torch.device(place.device, 0), RunDir(place.folder / "offered")
    run_dir.create()
    tensors = {f"layer.{number}": torch.full((256, 256), float(number)) for number in range(20)}
    architecture = Architecture(shapes=dict.fromkeys(tensors, (256, 256)), tied=False)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ))  # what the transfer sets is for its own groups
        for module, channel in ((weight_offers, sends), (transfer, receives)):
            stack.enter_context(patch.object(module, "_open_group", lambda *_, channel=channel: channel))
        stack.enter_context(patch.object(weight_offers, "_GROUP_BYTES", 256 * 256 * 4))
        offers = stack.enter_context(WeightOffers(run_dir, CollectiveWeights(), device))
        offers.offer(1, list(tensors.items()))
        offer = msgspec.json.decode(run_dir.offer.read_bytes(), type=Offer)
        wanted = Transfer(offer, num_members=2, attempt="first", first_rank=1)
        incoming = transfer.Incoming.join(wanted, rank=0, architecture=architecture, device=device)
        copies = dict[str, Tensor]()
        if place.device == "cuda":
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
        for name, tensor in incoming.receive(architecture, torch.float32):
            if place.device == "cuda":
                torch.cuda._sleep(20_000_000)
            copies[name] = tensor.clone()
            del tensor  # its memory is free before the copy has run
        place.synchronize()
    assert copies.keys() == tensors.keys()
    wrong = [name for name, tensor in copies.items() if not torch.equal(tensor.cpu(), tensors[name])]
    place.note("collective", "tensors that arrived with other values", len(wrong), "", "0")
    assert not wrong
    if place.device == "cuda":
        assert torch.cuda.default_stream().stream_id not in sends.streams


def files_for_engines(place: Place, mesh: Mesh) -> None:
    """Publishing weights, and reading them as an engine's worker does."""
    model = place.model(**({} if place.is_toy else SMALL))
    policy = build_policy(TrainedModelConfig(name=str(model), init="random", dtype="bfloat16"), mesh, seed=0)
    run_dir = RunDir(place.folder / "published")
    run_dir.create()
    publisher = WeightPublisher(run_dir, policy, AutoTokenizer.from_pretrained(model), mesh, dtype="bfloat16")
    begin = time.perf_counter()
    published = publisher.publish(1)
    seconds = time.perf_counter() - begin
    size = sum(path.stat().st_size for path in Path(published).glob("*.safetensors"))
    begin = time.perf_counter()
    read = read_weights(published, read_architecture(published), dtype=torch.bfloat16, version=1)
    place.note("publish", "gathering, writing and hashing", seconds, "s")
    place.note("publish", "reading and checking", time.perf_counter() - begin, "s")
    place.note("publish", "size", size / 2**30, "GiB")
    assert read.tensors and all(tensor.dtype == torch.bfloat16 for tensor in read.tensors.values())
