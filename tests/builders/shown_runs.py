"""Run directories for reports: what the processes of a run leave, written as they write it."""

import itertools
import math
from pathlib import Path

import msgspec

from holdfast.run.metrics import MetricsWriter
from holdfast.run.run_dir import RunDir
from holdfast.run.timeline import Span
from tests.builders.attempts import tell, write_settings

BEGIN = 1_800_000_000.0
"""Unix time of the first thing that a run does."""


def make_run(
    path: Path, *, steps: int = 12, resumed_from: tuple[int, ...] = (), metrics: int = 3, lr: float = 1e-3
) -> RunDir:
    """Return an `rl` run, started again behind each of `resumed_from`. `metrics`: how many `custom/N` it has."""
    run_dir = RunDir(path)
    run_dir.create()
    for number, step in enumerate((None, *resumed_from), start=1):
        _write_attempt(run_dir, number, step, max_steps=steps, lr=lr)
    writer = MetricsWriter(run_dir.metrics)
    for step in range(1, steps + 1):
        writer.write(step, _numbers(step, metrics))
    writer.close()
    _write_timeline(run_dir, steps, resumed_from)
    return run_dir


def _numbers(step: int, metrics: int) -> dict[str, float]:
    wave = math.sin(step / 7)
    return {
        "reward/mean": 1 - 1 / (1 + step / 50) + 0.1 * wave, "reward/a/mean": 0.4, "reward/b/mean": 0.6,
        "loss": wave, "entropy": 1 / step, "mismatch_kl": float("nan") if step == 3 else 1e-3 / step, "lr": 1e-4,
        "rollout/tokens_mean": 20.0, "grad_norm": 1.0 + wave, "tokens_per_s": 1000.0, "memory_gib": 1.5,
        "time/step": 2.0, "time/forward_backward": 1.0, "time/wait_for_batch": 0.5,
        "time/batch": 2.0, "time/generate": 1.5, "time/wait_for_weights": 0.25,
        **{f"custom/{number}": wave * number for number in range(metrics)},
    }  # fmt: skip


def _write_attempt(run_dir: RunDir, number: int, resume_step: int | None, *, max_steps: int, lr: float) -> None:
    ckpt = "" if resume_step is None else f"\n[ckpt]\nresume_step = {resume_step}\n"
    settings = f"max_steps = {max_steps}\n{ckpt}\n[optim]\nlr = {lr}\n"
    write_settings(run_dir, "trainer", settings, attempt=number)
    begin = _time_of(resume_step or 0, number)
    tell(run_dir, "trainer", "importing torch", attempt=number, time=begin)
    tell(run_dir, "inference", "loading vllm", attempt=number, time=begin)
    tell(run_dir, "inference", "ready", attempt=number, time=begin + 3)
    alert = {"time": begin + 5, "step": (resume_step or 0) + 1}
    with open(tell(run_dir, "trainer", "ALERT: entropy fell", attempt=number, **alert), "a") as file:
        file.write('{"time": 1, "pro')


def _time_of(step: int, attempt: int) -> float:
    """Return when an attempt begins, or does `step`; each start takes 10 seconds."""
    return BEGIN + 2.0 * step + 10.0 * (attempt - 1)


def _write_timeline(run_dir: RunDir, steps: int, resumed_from: tuple[int, ...]) -> None:
    """Write the spans of every attempt, up to where the next one goes on."""
    encoder = msgspec.json.Encoder()
    for number, (first, last) in enumerate(itertools.pairwise([0, *resumed_from, steps]), start=1):
        begin = _time_of(first, number) + 6
        spans = {name: [Span(name, "start", begin, begin, step=first)] for name in ("trainer", "orchestrator")}
        for step in range(first + 1, last + 1):
            at = _time_of(step, number) + 6
            spans["trainer"] += [
                Span("trainer", "wait_for_batch", at - 2, at - 1.5, step=step),
                Span("trainer", "forward_backward", at - 1.5, at - 0.5, step=step),
                Span("trainer", "optimizer", at - 0.5, at - 0.4, step=step),
                Span("trainer", "publish_weights", at - 0.4, at - 0.3, step=step),
                Span("trainer", "save", at - 0.3, at + 0.3, step=step, lane="checkpoints"),
            ]
            spans["orchestrator"] += [
                Span("orchestrator", "wait_for_weights", at - 2, at - 1.75, step=step, version=step - 1),
                Span("orchestrator", "generate", at - 1.75, at - 0.25, step=step, version=step - 1),
            ]
        for name, found in spans.items():
            path = run_dir.logs(number) / f"timeline_{name}.jsonl"
            path.write_bytes(b"\n".join(map(encoder.encode, found)) + b'\n{"process":"tra')
