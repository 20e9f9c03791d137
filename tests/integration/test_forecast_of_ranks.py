"""What a dry run forecasts is what real ranks need and send."""

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.run.forecast import Step
from tests.conftest import ROOT
from tests.forking.commands import RUN_TIMEOUT_S, shared_commands
from tests.ranks.forecast import CHOSEN, DIVISIONS, EVEN, FEW, REAL, programs

pytestmark = [pytest.mark.launch, pytest.mark.ranks]
Found = tuple[list[dict[str, Any]], dict[str, Any]]
UNITS = FEW + 2  # the embedding, and the head with the last norm
PROGRAMS = [name for model in ("", REAL, EVEN, CHOSEN) for name in programs(Path(model))]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank needed and sent, and what was forecast."""
    commands, path = shared_commands(), tmp_path_factory.mktemp("models") / "forecast.pt"

    def forecast(what: str, **given: str) -> dict[str, Any]:
        fork = commands.call(f"tests.ranks.forecast:{what}", path.with_suffix(".log"), **given, path=str(path))
        assert fork.wait(RUN_TIMEOUT_S) == 0, fork.log
        return torch.load(path, weights_only=False)

    ranks, forecasts = list[dict[str, Any]](), forecast("save_divisions")
    models = [path.with_name(name) for name in (REAL, EVEN, CHOSEN)]
    for model in (ROOT / "examples" / "reverse_text" / "model", *models):
        forecasts |= forecast("save_forecasts", model=str(model))
        ranks += commands.two_ranks("tests.ranks.forecast", tmp_path_factory.mktemp("ranks"), model)
    return ranks, forecasts


@pytest.mark.parametrize("program", PROGRAMS)
def test_ranks_need_and_send_what_was_forecast(program: str, found: Found) -> None:
    ranks, forecasts = found
    forecast = forecasts[program]
    found_here, peak, planned = [rank[program] for rank in ranks if program in rank], forecast.peak[1], forecast.of_step
    # 0.2 % apart on an idle machine. A rank that waits frees buffers later, beside those of the next layer.
    most = 1.05 if program.startswith("135M") else 1.1
    assert min(rank["peak"] for rank in found_here) <= most * peak.total + peak.parts.get("gathered", 0)
    for rank in found_here:
        assert 0.95 * peak.total <= rank["peak"]
        sent = dict(rank["sent"])
        if program == "chosen":  # as many bytes as the model chooses
            sent["all-to-all"] = sent["all-to-all"][0], planned.kinds["all-to-all"][1]
        assert sent == planned.kinds


def test_moments_in_bfloat16_need_half_of_the_bytes(found: Found) -> None:
    wide, narrow = (found[1][program].peak[1].parts["moments"] for program in ("sft", "compact"))
    assert 2 * narrow == pytest.approx(wide, rel=1e-3)  # with the count of steps of each parameter


@pytest.mark.parametrize("model", ["fsdp", "experts"])
def test_all_layers_follow_from_some(model: str, found: Found) -> None:
    extended, whole = (found[1][which][model] for which in ("extended", "whole"))
    if model == "experts":  # the optimizer works on tensors in chunks
        for step in (extended, whole):
            for peak in step.peaks.values():
                peak.parts.pop("temporary", None)
    assert extended == whole


def test_nothing_of_a_layer_is_kept_for_the_backward_pass(found: Found) -> None:
    """Not even experts, or layers, that no other rank has: gathered is the head alone, 512 x 64 in bfloat16."""
    for step in (found[1]["rl of quarters"].step, found[1]["alone"]):
        assert step.peaks["forward 1"].parts["gathered"] == 2 * 512 * 64


def test_dividing_experts_is_a_way_out(found: Found) -> None:
    assert found[1]["ways"][0] == "--parallel.expert-parallel 4"


@pytest.mark.parametrize("division", DIVISIONS)
def test_a_row_sends_no_more_than_it_must(division: str, found: Found) -> None:
    """Layers are gathered twice, the rest once; replicas and metrics meet with the last row only."""
    step: Step = found[1]["divided"][division]
    first, last = ({kind: calls for kind, (calls, _) in row.kinds.items()} for row in (step.first_row, step.last_row))
    trained = FEW if division == "lora" else UNITS
    expected = {"all-gather": 2 * FEW + 2, "reduce-scatter": trained}
    if division == "experts":  # a unit more of each layer; counts twice, and pairs there and back, also backwards
        expected = {"all-gather": 4 * FEW + 2, "reduce-scatter": trained + FEW, "all-to-all": (2 + 6) * FEW}
    if division == "ulysses":  # three of four exchanges are of queries, keys and values; recomputed, and backwards
        expected |= {"all-to-all": 4 * 3 * FEW, "all-reduce": 3}  # log-probabilities, entropy, accuracy
    assert first == expected
    of_replicas = trained if division == "hsdp" else 0
    assert last == expected | {"all-reduce": expected.get("all-reduce", 0) + of_replicas + 1}
