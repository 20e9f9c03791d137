"""Several ranks: the same losses as one, exact resume, and checkpoints that do not tie a run to their number."""

from __future__ import annotations

import pytest

from holdfast.shared.files import manifest
from tests.runs.training import Runs


def test_two_ranks_give_the_losses_of_one(sft_runs: Runs) -> None:
    one, two = sft_runs.succeeded("packed"), sft_runs.succeeded("packed_on_two")
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-5)
    assert two.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=1e-4)
    assert two.column("tokens") == one.column("tokens")


def test_two_ranks_resume_bit_for_bit(sft_runs: Runs) -> None:
    straight, resumed = sft_runs.succeeded("two_straight"), sft_runs.succeeded("two_resumed")
    assert "resuming from step 5" in resumed.output
    assert straight.weights(10) == resumed.weights(10)
    assert straight.column("loss") == resumed.column("loss") and len(straight.column("loss")) == 10
    for rank in (0, 1):
        name = f"trainer/random_rank_{rank}.json"
        first, second = (run.run_dir.checkpoint(10) / name for run in (straight, resumed))
        assert first.read_bytes() == second.read_bytes()
    drawn = {(straight.run_dir.checkpoint(10) / f"trainer/random_rank_{rank}.json").read_bytes() for rank in (0, 1)}
    assert len(drawn) == 2, "each rank has a generator of its own"
    assert manifest.verify(straight.run_dir.checkpoint(5)).world_size == 2


def test_what_a_resume_from_an_older_step_supersedes_is_set_aside(sft_runs: Runs) -> None:
    """The resumed run went back to step 5 in a copy of the finished run."""
    resumed = sft_runs.succeeded("two_resumed")
    aside = resumed.run_dir.discarded(2)
    assert manifest.verify(aside / "checkpoints" / "step_10").step == 10
    assert len((aside / "metrics.jsonl").read_text().splitlines()) == 5
    assert "set aside" in resumed.output
    assert resumed.column("step") == list(range(1, 11))


def test_one_rank_loads_what_two_have_saved_bit_for_bit(sft_runs: Runs) -> None:
    """It has no steps left, so it publishes exactly what it loaded."""
    two, one = sft_runs.succeeded("two_straight"), sft_runs.succeeded("two_loaded_by_one")
    assert "resuming from step 10" in one.output
    assert one.weights(10) == two.weights(10)


def test_copies_of_the_model_go_on_from_a_sharded_checkpoint(sft_runs: Runs) -> None:
    """Each rank holds all parameters, and the norm of the gradients is summed in another order."""
    sharded, copies = sft_runs.succeeded("two_straight"), sft_runs.succeeded("two_copies_resumed")
    assert "resuming from step 5" in copies.output
    assert copies.column("loss") == pytest.approx(sharded.column("loss"), rel=1e-6)
    assert copies.column("grad_norm") == pytest.approx(sharded.column("grad_norm"), rel=1e-6)
    sizes = [
        sum(path.stat().st_size for path in run.run_dir.checkpoint(10).glob("trainer/*.distcp"))
        for run in (sharded, copies)
    ]
    assert sizes[1] <= sizes[0], "what two ranks have alike is saved once"


def test_one_rank_loads_what_copies_have_saved_bit_for_bit(sft_runs: Runs) -> None:
    copies, one = sft_runs.succeeded("two_copies_resumed"), sft_runs.succeeded("two_copies_loaded_by_one")
    assert one.weights(10) == copies.weights(10)


def test_offloaded_ranks_go_on_bit_for_bit_from_a_checkpoint_of_others_and_back(sft_runs: Runs) -> None:
    straight, offloaded = sft_runs.succeeded("two_straight"), sft_runs.succeeded("two_offloaded_resumed")
    assert "resuming from step 5" in offloaded.output
    assert offloaded.weights(10) == straight.weights(10)
    assert offloaded.column("loss") == straight.column("loss")
    assert sft_runs.succeeded("two_offloaded_loaded_by_one").weights(10) == straight.weights(10)


def test_one_offloaded_rank_has_the_bits_of_one_that_is_not(sft_runs: Runs) -> None:
    straight, offloaded = sft_runs.succeeded("straight"), sft_runs.succeeded("resumed_offloaded")
    assert offloaded.weights(10) == straight.weights(10)
    assert offloaded.column("loss") == straight.column("loss")


def test_two_ranks_that_share_rows_give_the_losses_of_one(sft_runs: Runs) -> None:
    one, two = sft_runs.succeeded("packed"), sft_runs.succeeded("packed_in_slices")
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-5)
    assert two.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=1e-4)


@pytest.mark.slow
def test_two_ranks_that_share_rows_resume_bit_for_bit(sft_runs: Runs) -> None:
    straight, resumed = sft_runs.succeeded("two_slices_straight"), sft_runs.succeeded("two_slices_resumed")
    assert straight.weights(10) == resumed.weights(10)
    assert straight.column("loss") == resumed.column("loss") and len(straight.column("loss")) == 10
