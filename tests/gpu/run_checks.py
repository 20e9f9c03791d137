"""Checks that run commands: they start, compute what the CPU computes, repeat, resume, and end."""

import hashlib
import json
import math
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from holdfast.run import manifest
from holdfast.run.run_dir import RunDir
from tests.conftest import write_tiny_model
from tests.gpu.gpu_place import LARGE, SMALL, Place
from tests.runs.processes import HANG_S
from tests.runs.training import PAIRS, LiveRun, SftRun, run_command, succeeded


def digest(run: SftRun, step: int) -> str:
    return hashlib.sha256(run.weights(step)).hexdigest()


def starts(place: Place) -> None:
    """The ranks start, though the launcher was asked about devices, and train in bfloat16."""
    run = succeeded(place.run("starts", *place.small("--model.dtype", "bfloat16", "--max-steps", 5)))
    losses = run.column("loss")
    assert len(losses) == 5 and all(math.isfinite(loss) for loss in losses)
    place.note("start", "loss of step 5 in bfloat16", losses[-1], "nats")


VARIANTS: dict[str, list[object]] = {
    "packed": ["--no-model.activation-checkpointing"], "unpacked": ["--no-data.pack"],
    "recomputed": ["--model.activation-checkpointing"], "compiled": ["--model.compile"], "lora": [],
}  # fmt: skip


def numbers(place: Place, dtype: str, variants: list[str], *, steps: int = 20) -> None:
    """Losses are those of the CPU in float32."""
    common = place.small("--max-steps", steps)
    adapted = [*common, "--model.name", _pretrained(place), "--model.init", "pretrained", "--model.lora.rank", 4]
    cpu = dict[str, list[float]]()
    for name in variants:
        kind, flags = ("adapted", adapted) if name == "lora" else ("whole", [*common, *VARIANTS[name]])
        if kind not in cpu:
            plain = adapted if name == "lora" else common
            cpu[kind] = succeeded(place.run(f"numbers_cpu_{kind}", *plain, device="cpu")).column("loss")
        found = succeeded(place.run(f"numbers_{dtype}_{name}", *flags, "--model.dtype", dtype)).column("loss")
        expected = cpu[kind]
        apart = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
        bound = 1e-4 if dtype == "float32" else 0.05
        place.note("numbers", f"losses apart from the CPU's, {dtype}, {name}", apart, "relative", f"<= {bound:g}")
        assert apart <= bound, name


def exactness(place: Place, *flags: object, steps: int = 20, is_exact: bool) -> None:
    """Twice the same run, and one that is resumed half way, have the same bits."""
    half = steps // 2
    small = place.small("--model.dtype", "bfloat16", *flags)
    kind = "deterministic" if is_exact else "plain"
    first = succeeded(place.run(f"{kind}_1", *small, "--max-steps", steps))
    second = succeeded(place.run(f"{kind}_2", *small, "--max-steps", half, "--ckpt"))
    second = succeeded(place.run(f"{kind}_2", *small, "--max-steps", steps, "--ckpt.resume-step", half))
    third = succeeded(place.run(f"{kind}_3", *small, "--max-steps", steps))
    same = {"again": digest(third, steps), "resumed": digest(second, steps)}
    for what, other in same.items():
        is_same = other == digest(first, steps)
        expected = "1" if is_exact else "whatever comes out"
        place.note("exactness", f"weights of a {kind} run are the same {what}", float(is_same), "", expected)
        assert is_same or not is_exact, what


def rl_over_a_journal(place: Place) -> None:
    """The trainer of `rl`, with all that can be beside the policy, learns from a journal what the CPU learns."""
    pytest.importorskip("fastapi")  # the stand-in for an engine, which made the batches
    from tests.faults.rl_trainers import STEPS, Trainers, make_journal
    from tests.runs.rl import EVERYTHING

    journal = make_journal(place.folder / "journal")
    trainers = Trainers(_pretrained(place), journal, place.folder)
    losses = dict[str, list[float]]()
    for device in ("cpu", place.device):
        name = f"rl_{device}_{len(losses)}"
        config = trainers.prepare(name, **EVERYTHING, parallel={"device": device, "threads": 1})
        command = [*place.command(name, program="trainer")[: 1 if place.is_toy else 4], "@", str(config)]
        run = succeeded(run_command(command, place.folder / name, starts_python=not place.is_toy))
        losses[name] = run.column("value_loss") + run.column("loss")
    first, second = losses.values()
    assert len(first) == len(second) > STEPS
    apart = max(abs(a - b) / max(1e-3, abs(b)) for a, b in zip(second, first, strict=True))
    place.note("rl", "losses of policy and critic apart from the CPU's", apart, "relative", "<= 0.001")
    assert apart <= 1e-3


def preferences(place: Place, *, steps: int = 5) -> None:
    """`dpo` and `reward-model` compute the losses of the CPU, in float32."""
    flags: list[object] = [
        "--model.name", _pretrained(place), "--data.name", PAIRS, "--data.batch-size", 8, "--data.micro-batch-size", 2,
        "--data.seq-len", 40, "--optim.lr", 1e-3, "--model.dtype", "float32", "--max-steps", steps,
    ]  # fmt: skip
    for program in ("dpo", "reward-model"):
        found = list[list[float]]()
        for device in ("cpu", place.device):
            name = f"{program}_{len(found)}"
            found.append(succeeded(place.run(name, *flags, program=program, device=device)).column("loss"))
        assert len(found[0]) == len(found[1]) == steps
        apart = max(abs(a - b) / abs(b) for a, b in zip(found[1], found[0], strict=True))
        place.note("preferences", f"losses of {program} apart from the CPU's", apart, "relative", "<= 0.0001")
        assert apart <= 1e-4, program


def _pretrained(place: Place) -> Path:
    directory = place.folder / "pretrained"
    if not directory.exists():
        directory.mkdir()
        write_tiny_model(directory, "qwen3", tied=True, weights=True, seed=0, fields={})
    return directory


def offload(place: Place) -> None:
    """Parameters on the host change no loss, go on from a checkpoint of others and back, and take less memory."""
    small, steps = place.small("--ckpt.interval", 2), 6
    flags = {"plain": [], "offloaded": ["--parallel.cpu-offload"]}
    losses = dict[str, list[float]]()
    for name, own in flags.items():
        losses[name] = succeeded(place.run(f"offload_{name}", *small, *own, "--max-steps", steps)).column("loss")
    for name, own in {"plain": flags["offloaded"], "offloaded": flags["plain"]}.items():
        again = ["--max-steps", steps, "--ckpt.resume-step", 2]
        losses[f"{name}, then not so"] = succeeded(place.run(f"offload_{name}", *small, *own, *again)).column("loss")
    for name, found in losses.items():
        assert len(found) == steps
        apart = max(abs(a - b) / abs(b) for a, b in zip(found, losses["plain"], strict=True))
        place.note("offload", f"losses apart, {name}", apart, "relative", "<= 0.0001")
        assert apart <= 1e-4, name
    shape = {} if place.is_toy else SMALL
    for name, own in flags.items():
        settings = place.small("--model.dtype", "bfloat16", "--max-steps", 3, *own)
        settings[1] = place.model(**shape)
        run = succeeded(place.run(f"offload_large_{name}", *settings))
        for metric, unit in (("memory_gib", "GiB"), ("time/step", "s")):
            place.note("offload", f"{metric}, {name}", run.column(metric)[-1], unit)


def checkpoints(place: Place) -> None:
    """A save stalls the training briefly; what a kill leaves is whole, and the run ends with the bits of another."""
    settings = [*_full_rows(place, {} if place.is_toy else SMALL), "--deterministic", "--ckpt.keep", 2]
    whole = succeeded(place.run("undisturbed", *settings, "--max-steps", 5, "--ckpt.interval", 5))
    settings += ["--ckpt.interval", 1]
    with LiveRun(place.command("saves", *settings, "--max-steps", 1000), place.folder / "saves") as run:
        run.wait_for("step    3/")
        run.process.send_signal(signal.SIGKILL)
        for pid in run.descendants:
            _gone(pid)
    run_dir = RunDir(place.folder / "saves")
    steps = run_dir.committed_steps()
    for step in steps:
        manifest.verify(run_dir.checkpoint(step))
    again = succeeded(place.run("saves", *settings, "--max-steps", 5, "--ckpt.resume-step", "auto"))
    # A line is written before its own checkpoint, and has the time of the one before.
    stalls = again.column("time/checkpoint")
    assert again.column("step") == [1, 2, 3, 4, 5]
    place.note("checkpoints", "stall of a save, the least", min(stalls), "s")
    is_same = digest(again, 5) == digest(whole, 5)
    place.note("checkpoints", "weights of a killed run are those of another", float(is_same), "", "1")
    assert is_same


def _full_rows(place: Place, shape: dict[str, int]) -> list[object]:
    """Return flags of steps of two full rows in bfloat16 on a model of this shape."""
    data, seq_len = place.folder / "long.jsonl", 32 if place.is_toy else 8192
    data.write_text(json.dumps({"prompt": "a", "completion": "abcdefgh" * (seq_len // 8 - 1)}) + "\n")
    return [
        *place.small("--model.dtype", "bfloat16"), "--model.name", place.model(**shape), "--data.name", data,
        "--data.batch-size", 2, "--data.micro-batch-size", 1, "--data.seq-len", seq_len,
    ]  # fmt: skip


def plans(place: Place) -> None:
    """The memory that a step takes is the memory of its plan."""
    shapes = {"toy": {}} if place.is_toy else {"0.6B": SMALL, "1.7B": LARGE}
    kinds = {"recomputed": ["--model.activation-checkpointing"], "kept": ["--no-model.activation-checkpointing"]}
    for shape, fields in shapes.items():
        for kind, own in kinds.items():
            settings, what = [*_full_rows(place, fields), *own, "--max-steps", 2], f"{shape}, activations {kind}"
            dry = ["--dry-run", "--parallel.card-gb", 141]
            told = succeeded(place.run("planned", *settings, *dry, device="cuda")).output
            (planned,) = re.findall(r"on each rank: ([0-9.]+) GiB", told)
            found = succeeded(place.run(f"planned_{shape}_{kind}", *settings)).column("memory_gib")[-1]
            place.note("plans", f"memory of a step, {what}", found, "GiB", f"{planned} planned")
            assert place.is_toy or 0.9 < found / float(planned) < 1.1


def ends(place: Place) -> None:
    """A killed rank ends the run, which says so, and leaves the device free."""
    free = torch.cuda.mem_get_info()[0] if place.device == "cuda" else 0
    for number in (signal.SIGKILL,) if place.is_toy else (signal.SIGKILL, signal.SIGTERM):
        command = place.command(f"ends_{number}", *place.small("--max-steps", 100000))
        with LiveRun(command, place.folder / f"ends_{number}") as run:
            run.wait_for("step      2/")
            (rank,) = run.ranks()
            begin = time.monotonic()
            rank.send_signal(number)
            assert run.wait(within_s=HANG_S) == 1, run.output
            ended = time.monotonic() - begin
            place.note("ends", f"seconds to the end, {signal.Signals(number).name} to the rank", ended, "s")
            for pid in run.descendants:
                _gone(pid)
    if place.device == "cuda":
        left = free - torch.cuda.mem_get_info()[0]
        place.note("ends", "memory of the device that was left", left / 2**20, "MiB", "about 0")
        assert left < 256 * 2**20


def _gone(pid: int) -> None:
    try:
        psutil.Process(pid).wait(HANG_S)
    except psutil.NoSuchProcess:
        return


def out_of_memory(place: Place) -> None:
    """What does not fit ends the run with a message, not a hang. Needs a device whose memory ends."""
    data = place.folder / "long.jsonl"
    data.write_text(('{"prompt": "a", "completion": "' + "abcdefgh" * 1000 + '"}\n') * 8)
    # A small model, quickly drawn, whose logits are 256 GB in float32.
    settings = [
        *place.small("--model.dtype", "bfloat16", "--max-steps", 2), "--model.name", place.model(vocab_size=2**20),
        "--data.name", data, "--data.micro-batch-size", 8, "--data.seq-len", 8192,
        "--model.logits-chunk-tokens", 65536,
    ]  # fmt: skip
    run = place.run("oom", *settings)
    assert run.code == 1 and "out of memory" in run.output.lower(), run.output
