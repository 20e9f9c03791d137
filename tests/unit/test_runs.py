"""The commands as functions of Python: which command line they stand for, and what they refuse before they start it."""

import json
import subprocess
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.config import RlConfig, SftConfig
from holdfast.config.load import parse_command_line
from holdfast.config.view import HookConfig
from holdfast.orchestrator.env.reverse_text import ReverseText
from holdfast.run.run_dir import RunDir
from holdfast.runs import Rows, Run, RunFailed, _words
from tests.runs.own_hooks import Counting
from tests.unit.commands.test_rollouts_cli import publish


def parsed(kind: Any, **settings: Any) -> Any:
    return parse_command_line(kind, [word for key, value in settings.items() for word in _words(kind, key, value)])


def test_keywords_are_the_settings_of_the_command() -> None:
    sft = parsed(
        SftConfig,
        model={"name": Path("mine"), "lora": {"rank": np.int64(4), "target_modules": ["q_proj"]}},
        data={"name": "rows.jsonl", "pack": False, "chat_template_kwargs": {"a": {"b": [1]}}},
        optim={"lr": np.float64(1e-5), "betas": (0.9, 0.99)}, ckpt=True, tracking={}, max_steps=7, seed=3,
    )  # fmt: skip
    assert (sft.model.name, sft.model.lora.rank, sft.model.lora.target_modules) == ("mine", 4, ["q_proj"])
    assert (sft.data.pack, sft.data.chat_template_kwargs, sft.max_steps) == (False, {"a": {"b": [1]}}, 7)
    assert (sft.optim.lr, tuple(sft.optim.betas), sft.ckpt is None, sft.tracking is None) == (
        1e-5, (0.9, 0.99), False, False,
    )  # fmt: skip
    short = parsed(SftConfig, model=Path("mine"), data="rows.jsonl", max_steps=7, hooks=[Counting])
    assert (short.model.name, short.data.name) == ("mine", "rows.jsonl")
    assert short.hooks == [HookConfig(type="tests.runs.own_hooks:Counting")]
    rl = parsed(
        RlConfig,
        trainer={"loss": {"type": "dapo", "clip_high": 0.2}, "rewards": {"weights": {"exact": 2.0}}},
        orchestrator={
            "environments": [{"id": ReverseText, "args": {"scorer": SequenceMatcher}, "on_error": "drop"}],
            "sampling": {"stop": ["\n", "null"], "max_tokens": 16},
        },
        ckpt=None,
    )
    assert (rl.trainer.loss.type, rl.trainer.loss.clip_high, rl.trainer.rewards.weights) == (
        "dapo", 0.2, {"exact": 2.0},
    )  # fmt: skip
    (environment,) = rl.orchestrator.environments
    assert environment.id == "holdfast.orchestrator.env.reverse_text:ReverseText"
    assert environment.args == {"scorer": "difflib:SequenceMatcher"} and environment.on_error == "drop"
    assert [*rl.orchestrator.sampling.stop] == ["\n", "null"] and rl.ckpt is None


def _local() -> Callable[[], None]:
    def inner() -> None:
        """Stands in a function."""

    return inner


def test_what_other_processes_cannot_import_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_notebook = _local()
    in_notebook.__qualname__, in_notebook.__module__ = "mine", "__main__"
    elsewhere = _local()
    elsewhere.__qualname__, elsewhere.__module__ = "f", "not_there"
    cases: list[tuple[Any, str]] = [
        (in_notebook, "it is defined in the notebook or script itself. Move it into a file beside it"),
        (elsewhere, "start Python in the directory of that file, or set PYTHONPATH"),
        (_local(), "it has none: give a function or class that stands at the top of a module"),
        (lambda: None, "it has none"),
    ]
    monkeypatch.chdir(tmp_path)
    for function, said in cases:
        with pytest.raises(holdfast.ConfigError, match=said) as caught:
            holdfast.dpo(loss=function, output_dir="run")
        assert str(caught.value).startswith("loss: ")
    for name, settings, said in (
        ("sft", {"optim": {"lrr": 1}}, "Did you mean '--optim.lr'"),
        ("sft", {"max_steps": "x"}, "max-steps"),
        ("rl", {}, "rl needs model.name and orchestrator.environments"),
        ("evaluate", {"environments": 3}, "environments"),
    ):
        with pytest.raises(holdfast.ConfigError, match=said):
            getattr(holdfast, name)(**settings)
    with pytest.raises(holdfast.ConfigError, match="there is no directory"):
        holdfast.open(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_exists_is_looked_at(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    run = holdfast.open(str(tmp_path))
    assert (run.metrics, run.weights, run.step, run.results) == ([], None, 0, None)
    run_dir.metrics.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n')
    run_dir.weights_of(2).mkdir(parents=True)
    publish(run_dir, 2)
    assert (run.step, run.weights) == (2, run_dir.weights_of(2))
    assert run.metrics.to_pandas()["loss"].tolist() == [2.0, 1.5] == Rows(run.metrics).to_pandas().loss.to_list()
    rows = run.rollouts(where="environment == 'a'", sort="-reward", limit=1)
    assert [(row["task"], row["reward"]) for row in rows] == [(1, 1.0)] and "right_answer" in rows.to_pandas()
    (tmp_path / "summary.json").write_text(json.dumps({"format": 1}))
    assert run.results == {"format": 1}
    assert run.wait() is run and run.stop() is run and isinstance(run, Run)


def test_a_command_that_was_killed_is_a_failure(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run._process = subprocess.Popen(["sleep", "infinity"], text=True)
    run._process.kill()
    with pytest.raises(RunFailed, match="ended with -9 .*continues the run") as caught:
        run.wait()
    assert caught.value.exit_code == -9
