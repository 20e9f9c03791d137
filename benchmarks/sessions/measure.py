"""One measured run of the orchestrator with all of its sessions in flight at once, and the check that none was lost."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.sessions.stub import SEED_DIGITS
from holdfast import TaskSeed
from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.orchestrator.main import run
from holdfast.orchestrator.state import request_seed
from holdfast.protocol.rollouts import Rollout
from holdfast.run import journal
from holdfast.run.run_dir import RunDir

MODEL = Path("examples/reverse_text/base")
TEMPLATE = Path(__file__).with_name("tools.jinja")
TOOL_CALL = '<tool_call>\n{"name": "look_up", "arguments": {"account": "rent"}}\n</tool_call>'
ENVIRONMENTS = {"single": "benchmarks.journal.environment:Nothing", "tool": "examples.environments.ledger:Ledger"}
"""By the kind of session: one turn; and one in which a tool of the built-in environment is called, and another one."""
_PROMPT_TOKENS = 2048
# In the example's vocabulary every character is a token, and digits follow one another.
_ZERO = 57


class Measured(msgspec.Struct):
    """What one run took.

    Attributes:
        num_rollouts: rollouts that are in the journal.
        num_sessions: that were in flight at once.
        wall_s: seconds from the first line of the program to the last batch on the disk.
        core_s: seconds of a core that the process used meanwhile, all threads.
        before_bytes: of memory, before.
        most_bytes: of memory, at its most.
    """

    num_rollouts: int
    num_sessions: int
    wall_s: float
    core_s: float
    before_bytes: int
    most_bytes: int

    @property
    def wall_rate(self) -> float:
        """Rollouts per second by the clock."""
        return self.num_rollouts / self.wall_s

    @property
    def core_rate(self) -> float:
        """Rollouts per second of the core's time."""
        return self.num_rollouts / self.core_s

    @property
    def session_bytes(self) -> float:
        """Memory of a session in flight, with its share of connections, batches in the making and writing."""
        return (self.most_bytes - self.before_bytes) / self.num_sessions

    def __str__(self) -> str:
        return (
            f"{self.num_rollouts:,} rollouts, none lost: {self.wall_rate:,.0f}/s by the clock, {self.core_rate:,.0f}/s "
            f"by the core's time; {self.session_bytes / 1024:.1f} KiB a session, {self.most_bytes / 2**20:,.0f} MiB in "
            "all"
        )


def make_model(path: Path) -> None:
    """Copy the example's tokenizer to `path`, with a chat template that writes tools."""
    shutil.copytree(MODEL, path)
    (path / "chat_template.jinja").write_text(TEMPLATE.read_text())


def measure(
    run_dir: RunDir,
    url: str,
    *,
    model: Path,
    kind: str,
    num_sessions: int,
    num_batches: int,
    num_tokens: int,
    size: int,
) -> Measured:
    """Make batches of `num_sessions` rollouts each, check every one of them, and return what making them took.

    Args:
        kind: of session, one of `ENVIRONMENTS`.
        num_tokens: that are sampled in one turn, at most.
        size: of a group.
    """
    config = OrchestratorConfig.model_validate(
        {
            "output_dir": run_dir.path,
            "max_steps": num_batches,
            "async_level": num_batches,  # version 0 makes all batches, so that no trainer is needed
            "model": {"name": str(model)},
            "environments": [{"id": ENVIRONMENTS[kind]}],
            "problems_per_step": num_sessions // size,
            "group_size": size,
            "seq_len": _PROMPT_TOKENS + 2 * num_tokens,
            "sampling": {"max_tokens": num_tokens},
            "client": {"urls": [url], "max_concurrency": num_sessions},
        }
    )
    before = _resident_bytes()
    wall, core = time.perf_counter(), time.process_time()
    run(config)
    wall, core = time.perf_counter() - wall, time.process_time() - core
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # before the check, which reads all batches
    return Measured(_check(run_dir, config, kind=kind), num_sessions, wall, core, before, most)


def _check(run_dir: RunDir, config: OrchestratorConfig, *, kind: str) -> int:
    """Return how many rollouts the journal has: one for each session, each with what was sampled for it."""
    number = 0
    for step in range(1, config.max_steps + 1):
        rollouts = journal.read_batch(run_dir, step).rollouts
        first = (step - 1) * config.problems_per_step
        wanted = [
            (task, sample)
            for task in range(first, first + config.problems_per_step)
            for sample in range(config.group_size)
        ]
        found = [(rollout.task_id, rollout.sample_index) for rollout in rollouts]
        assert found == wanted, f"batch {step} has other rollouts than its {len(wanted)}"
        for rollout in rollouts:
            _check_turns(rollout, step, num_turns=1 if kind == "single" else 2, run_seed=config.seed)
        number += len(rollouts)
    return number


def _check_turns(rollout: Rollout, step: int, *, num_turns: int, run_seed: int) -> None:
    starts = _turn_starts(rollout.loss_mask)
    task = TaskSeed(run_seed, rollout.environment, rollout.task_id)
    seeds = [request_seed(task, step=step, sample_index=rollout.sample_index, turn=turn) for turn in range(num_turns)]
    # In the example's vocabulary every character is a token, and digits follow one another.
    zero = 57
    found = [
        int("".join(str(one - zero) for one in rollout.token_ids[start : start + SEED_DIGITS])) for start in starts
    ]
    assert found == seeds, f"task {rollout.task_id}, sample {rollout.sample_index} has the turns of others"


def _turn_starts(loss_mask: Sequence[int]) -> list[int]:
    return [place for place, sampled in enumerate(loss_mask) if sampled and (place == 0 or not loss_mask[place - 1])]


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
