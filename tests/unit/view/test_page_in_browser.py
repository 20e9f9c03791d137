"""The page of a report, opened in a browser without a network, and that of 10,000 steps and a million rollouts."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from benchmarks.report import make_journal, measure
from holdfast.protocol.rollouts import Batch, Logprobs, LossMask, Rollout, TokenIds
from holdfast.run import atomic
from holdfast.run.journal import publish_batch
from tests.builders.evaluations import evaluated
from tests.builders.shown_runs import make_run
from tests.conftest import BASE
from tests.runs.browser import browser_command
from tests.unit.commands.test_rollouts_cli import state_after
from tests.unit.view.test_report import figures_of, text_of

RunCommand = Callable[..., tuple[int, str, str]]

HOSTILE = '</script><img src=x onerror="document.documentElement.dataset.hit=1">'


def opened(page: Path, place: Path) -> tuple[str, list[str]]:
    """Return what a browser makes of a page, and what its console says. Nothing outside can be reached."""
    flags = ("--virtual-time-budget=20000", "--enable-logging=stderr", "--dump-dom")
    argv = [*browser_command(place), *flags, page.as_uri()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.docs
def test_the_page_draws_every_chart_and_runs_nothing_of_the_run(run_command: RunCommand, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "<img src=x onerror=alert()>", resumed_from=(4,))
    evaluated(run_dir, 4)
    settings = f"[model]\nname = \"{BASE}\"\nnote = '{HOSTILE}'\n"
    atomic.write_file(run_dir.configs(2) / "orchestrator.toml", settings.encode())
    told = {"time": 1.8e9, "process": "trainer", "phase": f"ALERT: {HOSTILE}"}
    with open(run_dir.logs(2) / "events.jsonl", "a") as file:
        file.write(f"\n{json.dumps(told)}\n")
    ids = Tokenizer.from_file(str(BASE / "tokenizer.json")).encode(HOSTILE, add_special_tokens=False).ids
    rollout = Rollout(
        environment=HOSTILE, task_id=0, sample_index=0, token_ids=TokenIds(ids), loss_mask=LossMask([True] * len(ids)),
        logprobs=Logprobs([-0.5] * len(ids)), versions=[],
    )  # fmt: skip
    batch = Batch(step=2, policy_version=1, weights_digest="d" * 32, rollouts=[rollout])
    publish_batch(run_dir, batch, msgspec.json.encode(state_after(2)))
    page = tmp_path / "page.html"
    assert run_command("report", run_dir.path, "--to", page)[0] == 0
    shown, said = opened(page, tmp_path / "profile")
    assert said == []
    num_charts = len([key for key in figures_of(page) if not key.startswith("other")])
    assert num_charts > 8 and f'data-charts="{num_charts}"' in shown
    assert shown.count('class="main-svg"') >= num_charts
    assert shown.count('data-title="Download plot as a PNG"') == num_charts
    assert "data-hit" not in re.sub(r"<script.*?</script>", "", shown, flags=re.S)
    assert "<img src" not in shown and "&lt;img src=x" in shown
    assert "ALERT: &lt;/script&gt;" in shown and 'note = "&lt;/script&gt;' in shown


def test_the_page_names_no_place_to_load_from(run_command: RunCommand, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    assert run_command("report", run_dir.path)[0] == 0
    page = (run_dir.path / "report.html").read_text()
    outside = re.sub(r"(<script[^>]*>).*?</script>", r"\1", page, flags=re.S)
    assert "default-src 'none'" in outside and not re.search(r"(src|href)=(?!\"#)|url\(|@import", outside)
    nonces = set(re.findall(r'nonce[=-]"?([\w-]+)', outside))
    assert len(nonces) == 1


@pytest.mark.clock
def test_a_long_run_takes_seconds_and_a_bounded_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", steps=10_000, metrics=42, resumed_from=(2500, 5000, 7500))
    make_journal(run_dir, 10_000)
    cost = measure(run_dir.path)
    # Of a core, not of the wall clock: that of a busy machine says nothing.
    assert cost.cpu_s < 20 and cost.memory_bytes < 1e9 and cost.page_bytes < 10e6
    page = run_dir.path / "page.html"
    assert len(figures_of(page)["reward"]["data"][0]["x"]) <= 1000
    assert "the last 6,000 of" in text_of(page) and text_of(page).count('class="rollout') == 16
