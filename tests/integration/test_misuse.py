"""Mistakes of somebody who sees the commands for the first time: each is one message that says what to do about it. A
real command must end with exit code 2, leave nothing, and say so before a model is loaded. Mistakes in the words alone
are in the unit tests of the command."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.run.run_dir import RunDir
from tests.conftest import ROOT, ModelFactory
from tests.forking.commands import Run, shared_commands

ROWS = [{"prompt": f"ab{number}=", "completion": f"{number}ba"} for number in range(12)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
QUICK_START = ("@", str(ROOT / "configs/reverse_text/rl.toml"))
LOADING = ("importing torch", "loading vllm", "starting the engine", "loading model")
"""What processes say when they begin with what takes long."""


@dataclass(frozen=True)
class Case:
    """One mistake. `words`: behind the command; `{here}` is the directory of the test, `{model}` a whole model,
    `{rows}` good data. `in_trainer`: only the trainer finds it, which is started, and trains nothing: what configs of
    models hold."""

    name: str  # what it is
    program: str  # the command
    words: tuple[str, ...]
    said: tuple[str, ...]  # what the message must hold
    makes: Callable[[Path], object] = lambda here: None  # prepares the directory of the test
    has_model: bool = False  # a copy of a good model lies in `{here}/mine`, before `makes` changes it
    in_trainer: bool = False


def _sft(name: str, *words: str, said: tuple[str, ...]) -> Case:
    return Case(name, "sft", ("--model.name", "{model}", "--data.name", "{rows}", *words), said)


def _data(name: str, file: str, content: str | bytes, *said: str) -> Case:
    """A file or directory of rows that cannot be trained on."""

    def makes(here: Path) -> None:
        (here / file).parent.mkdir(exist_ok=True)
        (here / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    named = file.partition("/")[0]
    return Case(name, "sft", ("--model.name", "{model}", "--data.name", f"{{here}}/{named}"), (named, *said), makes)


def _model(
    name: str, change: Callable[[Path], object], *said: str, program: str = "sft", in_trainer: bool = False
) -> Case:
    """A copy of a good model in which something is changed."""
    words = ("--model.name", "{here}/mine", *(("--data.name", "{rows}") if program == "sft" else ()))
    return Case(name, program, words, ("/mine", *said), change, has_model=True, in_trainer=in_trainer)


def _environment(name: str, source: str, *said: str) -> Case:
    """A module of the user's with an environment that cannot be one."""
    words = (*QUICK_START, "--model.name", "{model}", "--orchestrator.environments", '[{"id": "mine:Mine"}]')
    return Case(name, "rl", words, said, lambda here: (here / "mine.py").write_text(source))


def _changed(**fields: object) -> Callable[[Path], object]:
    """Set fields of config.json; None removes one."""

    def change(here: Path) -> None:
        path = here / "mine/config.json"
        config = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return change


def _without(*names: str, then: Callable[[Path], object] = lambda mine: None) -> Callable[[Path], object]:
    """Remove files of the model, then do something else with its directory."""

    def change(here: Path) -> None:
        for name in names:
            (here / "mine" / name).unlink()
        then(here / "mine")

    return change


def _sharded(mine: Path) -> None:
    """Leave the first of two files of weights."""
    (mine / "model.safetensors").rename(mine / "model-00001-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (mine / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def _cut(here: Path) -> None:
    weights = here / "mine/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _with_code(here: Path) -> None:
    """A model that brings its own code along, which would leave a file."""
    _changed(model_type="mine_own", auto_map={"AutoConfig": "configuration_mine.MineConfig"})(here)
    (here / "mine/configuration_mine.py").write_text(f"open({str(here / 'ran')!r}, 'w')\n")


def _adapter(mine: Path) -> None:
    (mine / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}))


BASE = "from holdfast import Environment, Score, Task\n\n\nclass Mine(Environment):\n"
CHAT = {"messages": [{"role": "user", "content": "ab"}, {"role": "bot", "content": "ba"}]}
BAD_LINE = LINES.replace('"completion": "5ba"', '"completion": ')
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"

FLAGS = [
    _sft("a flag of TRL", "--learning_rate", "1e-5", said=("'--learning_rate'", "Did you mean '--optim.lr'?")),
    Case("the end of a flag", "rl", ("--lr", "1"), ("'--lr'", "'--trainer.optim.lr'")),
    _sft("a section that is switched on", "--ckpt", "true", said=("--ckpt", "section", "--ckpt.NAME VALUE")),
    _sft("a file for a section", "--data", "x.jsonl", said=("--data is a section", "--data.name x.jsonl?")),
    _sft("a name with a dash", "--output-dir", "-out", said=("--output-dir", "--output-dir=-name")),
    Case("a word for a list", "rl", (*QUICK_START, "--orchestrator.environments", '["addition"]'),
         ("orchestrator.environments.0", "an object of settings", "addition")),
    Case("a list that is no JSON", "rl", (*QUICK_START, "--orchestrator.environments", "[{'id': 'addition'}]"),
         ("--orchestrator.environments", "not JSON")),
    _sft("a step that never was", "--ckpt.resume-step", "999", said=("999", "/run/checkpoints", "Leave --ckpt")),
]  # fmt: skip
DATA = [
    _data("a table of text", "mine.csv", "prompt;completion\na;b\n", "divided by ';'"),
    _data("a directory of texts", "texts/a.txt", "hello\n", "a.txt", "cannot be read as rows", ".jsonl"),
    _data("an empty file", "mine.jsonl", "", "holds no rows", "empty", "name another"),
    _data("UTF-16", "mine.jsonl", LINES.encode("utf-16"), "UTF-16", "iconv -f UTF-16 -t UTF-8"),
    _data("a table that was cut", "mine.parquet", b"PAR1" + bytes(90), "was cut", "PAR1", "Write it again"),
    _data("a bad line in the middle", "mine.jsonl", BAD_LINE, "row 6 is not JSON", "at character", "mend the line"),
    _data("a file over several lines", "mine.json", json.dumps({"rows": ROWS}, indent=1), "under the key 'rows'",
          "the list alone"),
    _data("other names of columns", "mine.jsonl", '{"question": "a", "answer": "b"}\n', "['answer', 'question']",
          "`prompt` and `completion`", "Rename the columns"),
    _data("other names of roles", "mine.jsonl", json.dumps(CHAT), "row 1", "`user`, `bot`", "`assistant`"),
    _data("a row that lacks a column", "mine.jsonl", LINES + '{"prompt": "a"}\n', "row 13", "got text and nothing"),
    Case("rows of sft for dpo", "dpo", ("--model.name", "{model}", "--data.name", "{rows}"),
         ("rows.jsonl", "`chosen` and `rejected`", "Train them with `sft`, or rename the columns")),
]  # fmt: skip
MODELS = [
    _model("an adapter", _without("config.json", then=_adapter), "an adapter for Qwen/Qwen3-0.6B",
           "--ckpt.init-from"),
    _model("GGUF beside a config", _without("model.safetensors", then=lambda mine: (mine / "m.gguf").touch()), "GGUF",
           "safetensors"),
    _model("a file that is missing", _without(then=_sharded), "lacks 1 of the 2", "model-00002-of-00002.safetensors",
           "Copy what is missing"),
    _model("a pointer of Git LFS", lambda here: (here / "mine/model.safetensors").write_text(LFS), "`git lfs pull`"),
    _model("weights that were cut", _cut, "model.safetensors was cut", "bytes", "Copy it again"),
    _model("no tokenizer", _without("tokenizer.json", "tokenizer_config.json"), "no tokenizer.json",
           "--model.tokenizer"),
    _model("a config that is no JSON", lambda here: (here / "mine/config.json").write_text("{"), "config.json is not",
           "Copy it again"),
    _model("a config without a type", _changed(model_type=None), "model_type", "Copy config.json again"),
    _model("a kind that nobody knows", _changed(model_type="frobnicator"), "no such kind", "docs/models.md",
           in_trainer=True),
    _model("code of its own", _with_code, "not run", "docs/models.md", in_trainer=True),
    _model("an adapter to serve", _without("config.json", then=_adapter), "an adapter", "merge", program="inference"),
    Case("a file of llama.cpp", "sft", ("--model.name", "{here}/m.gguf", "--data.name", "{rows}"), ("m.gguf", "GGUF"),
         lambda here: (here / "m.gguf").touch()),
    Case("a home that nobody expanded", "sft", ("--model.name", "~/mine", "--data.name", "{rows}"),
         ("'~/mine'", "`~` is not replaced", "whole path")),
]  # fmt: skip
ENVIRONMENTS = [
    _environment("a function that scores", "def Mine(prompts, completions):\n    return [1.0]\n", "'Mine'",
                 "holdfast.Environment", "`environments init"),
    _environment("no score", f"{BASE}    def make_task(self, seed):\n        return Task('a')\n", "no method score"),
    _environment("a method that is spelt otherwise", f"{BASE}    def make_tasks(self, seed):\n        return []\n",
                 "no method make_task", "Did you mean 'make_tasks'?"),
    _environment("an error of syntax", "class Mine(Environment)\n", "SyntaxError", "mine.py:1)"),
    _environment("a library that is missing", "import no_such_library\n", "no_such_library", "mine.py:1)", "Install"),
]  # fmt: skip
COMMANDS = [
    Case("questions in a table", "rl",
         (*QUICK_START, "--model.name", "{model}", "--orchestrator.environments",
          json.dumps([{"id": "jsonl", "args": {"path": "{here}/mine.csv"}}])),
         ("mine.csv:2 has no column 'answer'", "`answer`"),
         lambda here: (here / "mine.csv").write_text("prompt,solution\na,b\n")),
    Case("a run that is none to evaluate", "evaluate", ("--run", "{here}"), ("run.json", "Name the output directory")),
    Case("data in the place of a run", "report", ("{rows}",), ("rows.jsonl", "no run.json", "output directory")),
    Case("a flag of other commands", "monitor", ("--output-dir", "{here}"),
         ("--output-dir", "The command is:", "monitor ")),
    Case("a tracker that is spelt otherwise", "track", ("{here}", "--to", "tensorbord"),
         ("'tensorbord'", "Did you mean 'tensorboard'?"), lambda here: RunDir(here).create()),
    Case("a flag of report", "ckpt", ("ls", "--to", "{here}"), ("'--to'", "ckpt ls --help")),
]  # fmt: skip
CASES = [*FLAGS, *DATA, *MODELS, *ENVIRONMENTS, *COMMANDS]
EVERYDAY = (
    "a flag of TRL", "a section that is switched on", "a step that never was", "a table of text",
    "a bad line in the middle", "weights that were cut", "no tokenizer", "no score", "questions in a table",
    "data in the place of a run",
)  # fmt: skip
TRAINS = ("sft", "dpo", "rl", "inference", "evaluate")


@pytest.fixture(scope="module")
def model(tiny_model: ModelFactory) -> Path:
    return tiny_model()


def tree(directory: Path) -> dict[str, bytes]:
    """Return what is below a directory: files with what they hold, and directories; not Python's own."""
    paths = [path for path in sorted(directory.rglob("*")) if "__pycache__" not in path.parts]
    return {str(path.relative_to(directory)): path.read_bytes() if path.is_file() else b"" for path in paths}


def run_case(case: Case, here: Path, model: Path) -> Run:
    """Make the mistake in that directory, and look at what is left behind."""
    here.mkdir()
    rows = here / "rows.jsonl"
    rows.write_text(LINES)
    if case.has_model:
        shutil.copytree(model, here / "mine")
    case.makes(here)
    words = []
    for word in case.words:
        for name, path in (("{here}", here), ("{model}", model), ("{rows}", rows)):
            word = word.replace(name, str(path))
        words.append(word)
    if case.program in TRAINS and "--output-dir" not in words:
        words += ["--output-dir", str(here / "run")]
    before = tree(here)
    log, there = here.with_name("said"), f"import os; os.chdir({str(here)!r})"
    run = shared_commands().start(case.program, here / "run", words, log=log, fault=there).wait()
    after = tree(here)
    if case.in_trainer:  # settings and log of the attempt: what the trainer made, or was about to make, is elsewhere
        after = {name: what for name, what in after.items() if not re.match(r"run($|/(configs|logs|run\.))", name)}
    assert after == before, after.keys() ^ before.keys()
    return run


def _parameter(case: Case) -> object:
    marks = [pytest.mark.launch, *([pytest.mark.everyday] if case.name in EVERYDAY else [])]
    return pytest.param(case, id=case.name.replace(" ", "_"), marks=marks)


@pytest.mark.parametrize("case", [_parameter(case) for case in CASES])
def test_a_mistake_is_one_message_that_says_what_to_do(case: Case, tmp_path: Path, model: Path) -> None:
    run = run_case(case, tmp_path / "with a blank, ä", model)
    assert run.code == 2 and "Traceback" not in run.log, run.log
    (message,) = re.findall(r"^error: .*(?:\n {7}.*)*", run.log, re.MULTILINE)
    for part in case.said:
        assert part in message, f"{part!r} is not in {message}"
    too_early = LOADING if not case.in_trainer else LOADING[1:2]
    assert not [line for line in run.log.splitlines() if any(words in line for words in too_early)], run.log


@pytest.mark.launch
def test_a_model_that_the_hub_does_not_give_is_told_before_torch_is_imported(tmp_path: Path, model: Path) -> None:
    words = ("--model.name", "someone/nothing", "--data.name", "{rows}")
    run = run_case(Case("a model of nobody", "sft", words, (), in_trainer=True), tmp_path / "here", model)
    assert run.code == 2 and "model.name = 'someone/nothing' is not a directory" in run.log, run.log
    assert "asking the hub for someone/nothing" in run.log and LOADING[0] not in run.log
