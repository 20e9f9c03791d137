"""`--log-format json`: every line on stdout is one object, and the last one says how it ended."""

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.config.rl import RlConfig, hand_down_shared
from holdfast.errors import ConfigError, ProcessDied
from holdfast.launcher import restarts
from holdfast.view.console import as_json_lines, json_lines
from tests.builders.checkpoint_files import write_checkpoint
from tests.runs.stand_ins import Stands
from tests.unit.conftest import Command

Objects = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def objects(capsys: pytest.CaptureFixture[str]) -> Objects:
    return lambda: [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines()]


_METRICS = '{"step": 1, "loss": null, "time/step": 2.0}'
_EVENTS = (
    "from holdfast.process.events import report\n"
    "report('loading model', model=Path('here'))\n"
    "report('ALERT: entropy fell', step=1)\n"
    "report('checkpoint saved', step=1, bytes=10, seconds=0.5)\n"
)


@pytest.mark.usefixtures("restored_signals")
def test_a_run_is_told_by_objects_alone(stands: Stands, objects: Objects) -> None:
    trainer = f"{_EVENTS}print('a line of the log')\nPath('metrics.jsonl').write_text('{_METRICS}\\n')\n"
    with as_json_lines() as lines:
        print("before,", end=" ")
        print("in one line\n\nand another")
        write_checkpoint(stands.run_dir, 1)
        code = stands.watch(heals=False, trainer=trainer + "made('weights/step_1')", ckpt={})
        sys.stdout.write("no end of a line")
        lines.close_with(code)
    told = objects()
    assert json_lines() is None, "stdout is what it was"
    by_type = {one["type"]: one for one in told}
    assert {"message", "phase", "alert", "checkpoint", "step", "end"} == by_type.keys()
    texts = [one["text"] for one in told if one["type"] == "message"]
    assert texts[:2] == ["before, in one line", "and another"] and texts[-1] == "no end of a line"
    phase, step, saved, end = (by_type[name] for name in ("phase", "step", "checkpoint", "end"))
    assert (phase["process"], phase["phase"], phase["details"]) == ("trainer", "loading model", {"model": "here"})
    assert (step["step"], step["max_steps"], step["metrics"]) == (1, 1, {"loss": None, "time/step": 2.0})
    assert (saved["state"], saved["step"], saved["bytes"]) == ("committed", 1, 10)
    assert (by_type["alert"]["text"], by_type["alert"]["step"]) == ("entropy fell", 1)
    assert told[-1] is end and (end["exit_code"], end["step"], end["max_steps"]) == (0, 1, 1)
    assert end["checkpoint"] == {"step": 1, "path": str(stands.run_dir.checkpoint(1))}
    assert end["weights"] == str(stands.run_dir.weights_of(1)) and end["resume"] == "--ckpt.resume-step latest"


@pytest.mark.usefixtures("restored_signals")
def test_a_run_that_fails_says_why_and_what_is_left(stands: Stands, objects: Objects) -> None:
    fails = "print('error: no good', file=sys.stderr); sys.exit(3)"
    trainer = f"Path('metrics.jsonl').write_text('{_METRICS}\\n')\n{fails}"
    with pytest.raises(ProcessDied), as_json_lines():
        stands.watch(heals=False, trainer=trainer)
    *_, end = objects()
    assert (end["type"], end["exit_code"], end["checkpoint"], end["weights"]) == ("end", 3, None, None)
    assert end["error"].startswith("trainer: no good")
    last = json.loads((stands.run_dir.logs(1) / "events.jsonl").read_text().splitlines()[-1])
    assert (last["process"], last["phase"], last["exit_code"], last["step"]) == ("launcher", "ended", 3, 1)


@pytest.mark.parametrize(("error", "code"), [
    (ConfigError("no"), 2), (KeyboardInterrupt(), 128 + signal.SIGINT),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 2), (RuntimeError(), 1),
])  # fmt: skip
def test_every_end_has_an_object(error: BaseException, code: int, objects: Objects) -> None:
    with pytest.raises(type(error)), as_json_lines():
        raise error
    (end,) = objects()
    assert (end["type"], end["exit_code"]) == ("end", code) and end["error"]


@pytest.mark.launch  # counts the data in a process that imports transformers
def test_a_dry_run_of_a_command_says_it_so(run_command: Command, tmp_path: Path, in_root: Path) -> None:
    for program in ("sft", "evaluate"):
        words = [program, "@", f"configs/reverse_text/{program}.toml"]
        code, out, _ = run_command(*words, "--dry-run", "--output-dir", tmp_path / words[0], "--log-format", "json")
        told = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and {one["type"] for one in told} == {"message", "end"} and told[-1]["exit_code"] == 0
        assert any("resolved configuration" in one.get("text", "") for one in told)


def test_rl_says_it_as_its_trainer_was_asked_to() -> None:
    config = RlConfig.model_validate({"trainer": {"log_format": "json"}})
    assert config.log_format == "json" and hand_down_shared(config).trainer.log_format == "json"
    assert RlConfig.model_validate({"log_format": "text", "trainer": {"log_format": "json"}}).log_format == "text"


@pytest.mark.usefixtures("restored_signals")
def test_an_error_that_nobody_expected_is_noted_as_the_end(stands: Stands, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(restarts._Watcher, "_refresh_views", fails)
    with pytest.raises(RuntimeError):
        stands.watch(heals=False, trainer="time.sleep(600)")
    last = json.loads((stands.run_dir.logs(1) / "events.jsonl").read_text().splitlines()[-1])
    assert (last["phase"], last["exit_code"], last["error"]) == ("ended", 1, "a bug")
