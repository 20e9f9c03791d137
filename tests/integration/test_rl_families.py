"""Every family through vLLM as `models/families_in_rl.json` says, and a mixture of experts through `rl`. Every night
twelve, and a fifth of the others by the date; with TESTS_ALL_FAMILIES=1 all."""

import os
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from holdfast.run.metrics import read_metrics
from holdfast.trainer.mesh import Mesh
from tests.conftest import ModelFactory
from tests.forking.engines import config_of, start_server
from tests.integration.conftest import UsedServer
from tests.models.families_in_rl import Refused, measure, names, read_results
from tests.runs.ports import free_port
from tests.runs.rl import CompletedRun, RlRun, succeeded

pytestmark = [pytest.mark.engine, pytest.mark.launch]

HIGHEST_MISMATCH_KL = 1e-6
RESULTS = read_results()
EVERY_NIGHT = (
    "llama", "qwen3", "mistral (sliding window)", "phi3 (sliding window)", "gemma3_text", "olmo2", "glm4", "gpt_oss",
    "qwen3_moe", "mixtral", "deepseek_v3", "falcon_h1",
)  # fmt: skip
_NIGHTS = 5
RECURRENT = ("falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h")


def _without_numbers(text: str) -> str:
    """Leave out what may differ from machine to machine, such as how far apart two programs are."""
    return re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", text)


def _is_tonight(name: str) -> bool:
    tonight = datetime.now(UTC).toordinal() % _NIGHTS
    return name in EVERY_NIGHT or names().index(name) % _NIGHTS == tonight or "TESTS_ALL_FAMILIES" in os.environ


@pytest.mark.parametrize("name", names())
def test_engine_and_trainer_agree_or_the_family_is_refused(name: str, mesh: Mesh, tmp_path: Path) -> None:
    if not _is_tonight(name):
        pytest.skip("another night: TESTS_ALL_FAMILIES=1 takes all")
    expected = RESULTS[name]
    if expected != "yes":
        with pytest.raises(Refused) as caught:
            measure(name, tmp_path, mesh)
        found, said = _without_numbers(str(caught.value)), _without_numbers(expected.removeprefix("no: "))
        assert found[:40] == said[:40], "run `python -m tests.models.families_in_rl NAME`"
    else:
        assert measure(name, tmp_path, mesh) < HIGHEST_MISMATCH_KL
        said = "WARNING: the model has a recurrent state" in (tmp_path / "inference.log").read_text()
        assert said is (name in RECURRENT)


def test_rl_trains_a_mixture_of_experts(tiny_model: ModelFactory, tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
    run = _trained(tiny_model("mixtral", tied=False, **experts), tmp_path / "run")
    for done in (run, _trained(run.run_dir.weights_of(3), tmp_path / "on")):
        first = next(iter(read_metrics(done.run_dir.metrics)))
        assert first["mismatch_kl"] is not None and first["mismatch_kl"] < HIGHEST_MISMATCH_KL


def _trained(model: Path, output_dir: Path) -> CompletedRun:
    """Train on what vLLM samples, which is forked: `rl` finds it at its port."""
    log = output_dir.with_name(f"{output_dir.name}_inference.log")
    with UsedServer(start_server("vllm", config_of(model), log).wait_ready()) as server:
        return succeeded(output_dir, "--model.name", str(model), "--max-steps", "3", "--ckpt", *server.flags)


def test_rl_ends_at_once_where_the_engine_cannot_run_the_model(tiny_model: ModelFactory, tmp_path: Path) -> None:
    model = tiny_model("qwen3", head_dim=16)
    port = ("--inference.server.port", str(free_port()))
    with RlRun(tmp_path / "run", "--model.name", str(model), "--max-steps", "2", *port, engine="vllm") as run:
        assert run.wait() == 3
    assert "cannot run this model" in run.output and "head_dim=16" in run.output
    assert "starting it again" not in run.output
