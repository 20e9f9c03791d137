"""Which files of tests go to which worker, and when.

Processes that import vLLM or torch are started once per worker, as are the server and the undisturbed run that the
tests of `rl` share. So the files that use them lie at the two ends of one queue, the longest outermost; half of the
workers take from its front, half from its back, and they meet among the many short files in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

_HERE = Path(__file__).parent
# Longest first. A file that is missing here is taken for a short one.
_WITH_ENGINES = [
    "test_rl_families", "test_rl_side_by_side", "test_rl_heals", "test_rl_killed", "test_chaos", "test_rl_exact",
    "test_rl_distillation", "test_rl_everything", "test_rl_full_disk", "test_parts_by_hand", "test_rl_dropped",
    "test_rl_errors", "test_rl_ranks", "test_rl_stuck", "test_lora_exact", "test_rl_quick_start",
    "test_reference_losses", "test_names", "test_rl_reward_model", "test_algorithms_benchmark",
    "test_evaluate", "test_inference_weights", "test_inference_process", "test_inference_owner",
    "test_engine_contract",
]  # fmt: skip
_WITH_TRAINERS = [
    "test_kill_rl_trainer", "test_kill_orchestrator", "test_kill_during_start", "test_kill_during_save",
    "test_documented_commands", "test_full_disk", "test_power_cut", "test_preemption", "test_plain_loop", "test_dpo",
    "test_reward_model_command", "test_resume_every_step", "test_sft_exact", "test_trainer_ranks", "test_remote_s3",
    "test_remote_run", "test_resume_from_elsewhere", "test_ckpt_export", "test_family_ranks", "test_sft_stop",
    "test_misuse",
    "test_keep_best", "test_scale_benchmark", "test_storage", "test_damage", "test_refusals", "test_kill_padded",
    "test_moe_files", "test_installed", "test_journal_benchmark", "test_checkpoint_ranks", "test_scalar_ranks",
    "test_policy_metrics", "test_gpu_checks",
]  # fmt: skip


def _place(path: Path) -> int:
    """Return where in the queue a file lies: below 0 near the front, above 0 near the back."""
    if path.stem in _WITH_ENGINES:
        return _WITH_ENGINES.index(path.stem) - len(_WITH_ENGINES)
    return len(_WITH_TRAINERS) - _WITH_TRAINERS.index(path.stem) if path.stem in _WITH_TRAINERS else 0


def sort(items: list[pytest.Item]) -> None:
    """Sort tests by file into the queue; those of one file stay as they are."""
    items.sort(key=lambda item: _place(item.path))


class TwoEnds(LoadFileScheduling):
    """Every second worker takes its files from the back of the queue."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        if list(self.nodes).index(node) % 2:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def scheduler(config: pytest.Config, log: Callable[..., None]) -> TwoEnds:
    """Return a scheduler that keeps the order of the queue."""
    config.option.loadscopereorder = False
    return TwoEnds(config, log)
