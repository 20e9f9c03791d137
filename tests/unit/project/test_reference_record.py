"""What is said where numbers are not those that were recorded."""

from dataclasses import replace

from tests.reference_losses.record import differences, largest_relative, other_numerics, read_records
from tests.reference_losses.runs import COMMANDS, STEPS, Numbers

RECORDED = Numbers({"loss": [2.0, 1.0, 0.5]}, ["a", "b", "c"], {"model.safetensors": "w"})


def test_every_command_is_recorded() -> None:
    records = read_records()
    assert tuple(records) == COMMANDS
    for command, record in records.items():
        assert all(len(values) == STEPS for values in record.numbers.metrics.values()) and record.numbers.weights
        assert len(record.numbers.rollouts) == len(set(record.numbers.rollouts)) == (STEPS if command == "rl" else 0)
        assert ("vllm" in record.numerics) == (command == "rl")


def test_the_first_step_and_the_largest_difference_are_named() -> None:
    now = replace(RECORDED, metrics={"loss": [2.0, 1.25, 0.5]}, weights={"model.safetensors": "v"})
    assert differences(RECORDED, now) == [
        "loss: from step 2 on, recorded 1.0, now 1.25; the largest relative difference of a step is 0.25",
        "weights in model.safetensors: recorded w, now v",
    ]
    assert largest_relative([0.0, 1.0], [0.0, 1.0]) == 0 and largest_relative([0.0], [1.0]) == float("inf")


def test_batches_that_were_sampled_otherwise_are_named() -> None:
    now = replace(RECORDED, rollouts=["a", "x", "y"])
    assert differences(RECORDED, now) == ["rollouts: from batch 2 on, 2 of 3 batches differ"]
    assert differences(RECORDED, replace(RECORDED)) == []
    assert differences(RECORDED, replace(RECORDED, metrics={})) == ["loss: recorded or made by one side only"]


def test_what_a_machine_does_otherwise_is_named() -> None:
    assert other_numerics({"torch": "1", "kernels": "A"}, {"torch": "2", "kernels": "A", "vllm": "3"}) == [
        "torch: recorded 1, here 2",
        "vllm: recorded None, here 3",
    ]
