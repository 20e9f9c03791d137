"""What a dry run forecasts is what two real ranks need and send."""

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.run.forecast import Step
from tests.conftest import ROOT
from tests.forking.commands import RUN_TIMEOUT_S, shared_commands
from tests.ranks.forecast import DIVISIONS, FEW, programs

pytestmark = [pytest.mark.launch, pytest.mark.ranks]
Found = tuple[list[dict[str, Any]], dict[str, Any]]
UNITS = FEW + 2  # the embedding, and the head with the last norm


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank needed and sent, and what was forecast."""
    directory = tmp_path_factory.mktemp("ranks")
    model, path = ROOT / "examples" / "reverse_text" / "model", directory.with_name("forecast.pt")
    fork = shared_commands().call(
        "tests.ranks.forecast:save_forecasts", path.with_suffix(".log"), model=str(model), path=str(path)
    )
    assert fork.wait(RUN_TIMEOUT_S) == 0, fork.log
    ranks = shared_commands().two_ranks("tests.ranks.forecast", directory, model)
    return ranks, torch.load(path, weights_only=False)


@pytest.mark.parametrize("program", list(programs(Path())))
def test_ranks_need_and_send_what_was_forecast(program: str, found: Found) -> None:
    ranks, forecasts = found
    for rank in ranks:
        # 0.2 % apart on an idle machine. On a busy machine buffers are freed later, beside those of the next layer.
        assert rank[program]["peak"] == pytest.approx(forecasts[program].peak[1].total, rel=0.1)
        kinds = forecasts[program].of_step.kinds
        assert rank[program]["sent"] == {kind: calls for kind, (calls, _) in kinds.items()}


def test_moments_in_bfloat16_need_half_of_the_bytes(found: Found) -> None:
    wide, narrow = (found[1][program].peak[1].parts["moments"] for program in ("sft", "compact"))
    assert 2 * narrow == pytest.approx(wide, rel=1e-3)  # with the count of steps of each parameter


def test_all_layers_follow_from_some(found: Found) -> None:
    assert found[1]["extended"] == found[1]["whole"]


@pytest.mark.parametrize("division", DIVISIONS)
def test_a_row_sends_no_more_than_it_must(division: str, found: Found) -> None:
    """Layers are gathered twice, the rest once; replicas and metrics meet with the last row only."""
    step: Step = found[1]["divided"][division]
    first, last = ({kind: calls for kind, (calls, _) in row.kinds.items()} for row in (step.first_row, step.last_row))
    trained = FEW if division == "lora" else UNITS
    expected = {"all-gather": 2 * FEW + 2, "reduce-scatter": trained}
    if division == "ulysses":  # three of four exchanges are of queries, keys and values; recomputed, and backwards
        expected |= {"all-to-all": 4 * 3 * FEW, "all-reduce": 1}
    assert first == expected
    of_replicas = trained if division == "hsdp" else 0
    assert last == expected | {"all-reduce": expected.get("all-reduce", 0) + of_replicas + 1}
