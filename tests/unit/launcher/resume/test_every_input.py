"""Every setting that may name an input of a run, found by its type, and what is said when the input is another one at
the next attempt. A setting without a row in `SETTINGS` fails."""

import inspect
import re
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from holdfast.config.evaluation import EvaluateConfig
from holdfast.config.inference import InferenceConfig
from holdfast.config.preference import DpoConfig, RewardTrainingConfig
from holdfast.config.rl import RlConfig
from holdfast.config.training import SftConfig
from holdfast.launcher.resume.attempt import write_config
from holdfast.launcher.resume.prepare import prepare
from holdfast.orchestrator.evaluation.evaluator import files_of
from holdfast.run.run_dir import RunDir
from tests.builders.launches import start_rl
from tests.conftest import ROOT
from tests.unit.launcher.resume.test_resume import add_batch, rl

COMMANDS = (RlConfig, SftConfig, DpoConfig, RewardTrainingConfig, EvaluateConfig, InferenceConfig)
MODEL = ROOT / "examples" / "reverse_text" / "model"


def _environment(**settings: Any) -> dict[str, Any]:
    return {"orchestrator": {"environments": [{"id": "jsonl", "name": "mine", **settings}]}}


_SERVERS = {"command": "python", "args": ["-u", "CODE"]}
_LEVELS = {"levels": [{"path": "ROWS"}, {"path": "another"}], "advance_reward": 1.0}
EXCHANGED: dict[str, tuple[tuple[dict[str, Any], str], ...]] = {
    "ModelConfig.name": (
        ({"trainer": {"model": {"name": "MODEL"}}}, "model/model.safetensors"),
        ({"trainer": {"model": {"name": "MODEL"}}}, "model/config.json"),
    ),
    "ModelConfig.tokenizer": (
        ({"trainer": {"model": {"tokenizer": "MODEL"}}}, "model/chat_template.jinja"),
        ({"trainer": {"model": {"tokenizer": "MODEL"}}}, "model/tokenizer.json"),
    ),
    "CriticConfig.name": (({"trainer": {"advantage": "gae", "critic": {"name": "MODEL"}}}, "model/config.json"),),
    "KlConfig.reference": (({"trainer": {"kl": {"coef": 0.1, "reference": "MODEL"}}}, "model/model.safetensors"),),
    "RewardModelConfig.name": (({"trainer": {"reward_model": {"name": "MODEL"}}}, "model/config.json"),),
    "PolicyLossConfig.type": (({"trainer": {"loss": {"type": "own_code:loss"}}}, "own_code.py"),),
    "AdvantageConfig.type": (
        ({"trainer": {"advantage": "own_code:advantage"}}, "own_code.py"),
        ({"trainer": {"environments": {"mine": {"advantage": "own_code:advantage"}}}}, "own_code.py"),
    ),
    "EnvironmentConfig.id": ((_environment(id="own_code:Own"), "own_code.py"),),
    "EnvironmentConfig.args": (
        (_environment(args={"deep": [{"path": "ROWS"}]}), "rows.jsonl"),
        (_environment(args={"scorer": "own_code:score"}), "own_code.py"),
    ),
    "CurriculumConfig.levels": ((_environment(curriculum=_LEVELS), "rows.jsonl"),),
    "McpServerConfig.command": ((_environment(mcp_servers={"tools": {"command": "CODE"}}), "own_code.py"),),
    "McpServerConfig.args": ((_environment(mcp_servers={"tools": _SERVERS}), "own_code.py"),),
}
"""Settings over those of a small run, by which the setting of that name names an input, and the file that is exchanged.
`rl` says each of them, and makes its batches anew."""


_HERE = "test_every_input.py::test_an_input_that_was_exchanged_is_said_and_what_it_made_is_made_anew"
_ITSELF = "is itself what is computed with: another value is told as a changed setting"
_OTHERS = "names what runs elsewhere, and nobody here can know what stands behind it"
_NOTHING = "changes nothing that is computed"
SETTINGS: dict[str, str | tuple[str, ...]] = {
    **dict.fromkeys(EXCHANGED, (_HERE,)),
    # Said by the trainer, or refused.
    "SftDataConfig.name": (
        "test_continued.py::test_other_data_under_the_same_name_are_said",
        "test_continued.py::test_what_a_run_depends_on_must_be_what_it_began_with",
    ),
    "CkptConfig.init_from": ("test_every_input.py::test_other_weights_to_begin_with_are_said",),
    "ModelConfig.chat_template": ("test_config_models.py::test_a_chat_template_of_its_own_is_in_every_process",),
    "CkptConfig.resume_dir": ("test_resume.py::test_a_fork_begins_with_anothers_checkpoint",),
    "ReferencedLoss.reference_model": (
        "test_every_input.py::test_another_reference_of_dpo_is_said",
        "test_continued.py::test_what_a_run_depends_on_must_be_what_it_began_with",
    ),
    "TeacherConfig.model": ("test_teacher.py::test_another_teacher_is_refused_on_resume",),
    "EvaluateConfig.run": ("test_follow.py::test_elsewhere_a_step_trained_again_is_evaluated_again",),
    **dict.fromkeys(
        (
            "EnvironmentConfig.name", "LoraConfig.target_modules", "McpServerConfig.tools", "OwnLoss.args",
            "OptimConfig.type", "PreferenceLossConfig.type", "WeightsConfig.transport", "_AnyCorrection.type",
            "SftDataConfig.split", "SftDataConfig.chat_template_kwargs", "TrainedModelConfig.attention",
            "SamplingConfig.stop", "EnvironmentSamplingConfig.stop",
        ),
        _ITSELF,
    ),
    "EngineConfig.args": f"{_ITSELF}; the engine is compared with the trainer whenever it gets weights",
    **dict.fromkeys(("McpServerConfig.url", "ServersConfig.urls"), _OTHERS),
    "McpServerConfig.env": f"{_OTHERS}: variables, whose values may be secrets and are written nowhere",
    **dict.fromkeys(
        (
            "ClientConfig.admin_token_env", "Command.output_dir", "McpServerConfig.api_key_env",
            "HookConfig.args", "HookConfig.name", "HookConfig.type", "ParallelConfig.rdzv_endpoint",
            "RlConfig.cluster", "RlConfig.profile",
            "ServerConfig.admin_token_env", "ServerConfig.host", "ServerConfig.model_name", "SlurmConfig.account",
            "SlurmConfig.extra", "SlurmConfig.job_name", "SlurmConfig.partition", "SlurmConfig.setup",
            "SlurmConfig.time", "TrackingConfig.backends", "TrackingConfig.name", "TrackingConfig.project",
            "TrackingConfig.tags", "TrainerConfig.picked", "TrainingCommand.profile", "CollectiveWeights.host",
        ),
        _NOTHING,
    ),
    "CkptConfig.keep_best": f"{_NOTHING}: which checkpoints stay",
    "StopConfig.metric": f"{_NOTHING}: after which step the run ends",
    "CkptConfig.dir": f"{_NOTHING}: copies of checkpoints, which are verified when they are brought back",
    "SftDataConfig.cache_dir": f"{_NOTHING}: tokens are kept by all that they depend on",
}  # fmt: skip


def _own_fields(kind: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    inherited = {name for base in kind.__mro__[1:] for name in getattr(base, "model_fields", {})}
    yield from ((name, field.annotation) for name, field in kind.model_fields.items() if name not in inherited)


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield the types that values have, at any depth."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return
    if not arguments:
        yield annotation
    for one in arguments[1:] if origin is dict else arguments:  # keys are names
        yield from _parts(one)


def _settings() -> set[str]:
    """Return every setting that holds a text, a path or anything, by the class that brings it."""
    found: set[str] = set()
    seen: set[type[BaseModel]] = set()
    left: list[type[BaseModel]] = list(COMMANDS)
    while left:
        kind = left.pop()
        if kind in seen or not inspect.isclass(kind):
            continue
        seen.add(kind)
        left += [base for base in kind.__mro__[1:] if issubclass(base, BaseModel) and base.model_fields]
        for name, annotation in _own_fields(kind):
            parts = list(_parts(annotation))
            left += [part for part in parts if inspect.isclass(part) and issubclass(part, BaseModel)]
            if any(part in (str, Path, Any) for part in parts):
                found.add(f"{kind.__name__}.{name}")
    return found


def test_every_setting_that_may_name_an_input_has_a_row() -> None:
    assert _settings() == SETTINGS.keys(), "a setting of a text or a path needs a row in SETTINGS"
    for name in dict.fromkeys([name for row in SETTINGS.values() if not isinstance(row, str) for name in row]):
        file, _, test = name.partition("::")
        (path,) = (ROOT / "tests").rglob(file)
        assert f"def {test}(" in path.read_text(), name


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, rows, and a module of the user's."""
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "own_code.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def config_of(place: Path, settings: dict[str, Any]) -> RlConfig:
    """Return a run in `place` with these settings over its own, in which capitals stand for what is there."""
    names = {"MODEL": "model", "ROWS": "rows.jsonl", "CODE": "own_code.py"}

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: placed(one) for key, one in value.items()}
        if isinstance(value, list):
            return [placed(one) for one in value]
        return str(place / names[value]) if value in names else value

    config = rl(RunDir(place / "run"), resume_step="auto")
    for process, sections in placed(settings).items():
        section = getattr(config, process)
        merged = section.model_dump(exclude_unset=True)
        for key, value in sections.items():
            merged[key] = merged.get(key, {}) | value if isinstance(value, dict) else value
        setattr(config, process, type(section).model_validate(merged))
    return config


def exchange(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def said_of(path: Path, printed: str) -> list[str]:
    """Return the lines that tell of a change, without what stands before; each has both digests."""
    lines = [line.partition("from here on: ")[2] for line in printed.splitlines() if "from here on: " in line]
    assert all(re.search(r"[0-9a-f]{16} -> [0-9a-f]{16}$", line) for line in lines)
    return [line for line in lines if path.name in line or path.stem in line]


@pytest.mark.parametrize(
    ("settings", "file"), [pytest.param(*way, id=f"{key}, {way[1]}") for key, ways in EXCHANGED.items() for way in ways]
)
def test_an_input_that_was_exchanged_is_said_and_what_it_made_is_made_anew(
    settings: dict[str, Any], file: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, path = config_of(place, settings), place / file
    run = RunDir(config.output_dir)
    start_rl(config)
    for is_exchanged, kept in ((False, [1]), (True, []), (False, [1])):
        if not run.published_batches():
            add_batch(run, 1, version=0)
        if is_exchanged:
            exchange(path)
        capsys.readouterr()
        prepare(config.trainer, clean=False, dry_run=True, orchestrator=config.orchestrator)
        planned = capsys.readouterr().out
        assert run.published_batches() == [1] and ("makes journaled batches again: 1\n" in planned) is (not kept)
        start_rl(config)
        assert len(said := said_of(path, capsys.readouterr().out)) == is_exchanged
        assert said_of(path, planned) == said, "a dry run says the same"
        assert run.published_batches() == kept


def test_other_files_and_code_of_evaluations_cost_no_batch(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"id": "own_code:Own", "name": "asked", "args": {"path": "ROWS"}}
    config = config_of(place, {"orchestrator": {"eval": {"environments": [asked], "interval": 1}}})
    assert config.orchestrator.eval is not None and config.orchestrator.eval.environments is not None
    (section,) = config.orchestrator.eval.environments
    start_rl(config)
    add_batch(RunDir(config.output_dir), 1, version=0)
    before = files_of(section)
    for name in ("rows.jsonl", "own_code.py"):
        exchange(place / name)
        capsys.readouterr()
        start_rl(config)
        (line,) = said_of(place / name, capsys.readouterr().out)
        assert line.startswith("eval, environment 'asked', ")
    assert RunDir(config.output_dir).published_batches() == [1]
    assert before.keys() == files_of(section).keys() and not before.items() & files_of(section).items()


def test_other_weights_to_begin_with_are_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = rl(RunDir(place / "run"), resume_step="auto", init_from=place / "model")
    start_rl(config)
    exchange(place / "model" / "model.safetensors")
    capsys.readouterr()
    start_rl(config)
    (line,) = said_of(place / "model" / "model.safetensors", capsys.readouterr().out)
    assert line.startswith("ckpt.init_from, model.safetensors: ")


def test_another_reference_of_dpo_is_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = DpoConfig.model_validate(
        {
            "output_dir": place / "run", "max_steps": 5, "model": {"name": str(MODEL)},
            "loss": {"reference_model": str(place / "model")}, "ckpt": {"resume_step": "auto"},
        }
    )  # fmt: skip
    for _ in range(2):
        write_config(prepare(config, clean=False, dry_run=False, is_locked=True), "dpo", config, dry_run=False)
        exchange(place / "model" / "config.json")
    (line,) = said_of(place / "model" / "config.json", capsys.readouterr().out)
    assert line.startswith("loss.reference_model, config.json: ")
