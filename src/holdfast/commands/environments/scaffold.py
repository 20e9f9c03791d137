"""`environments init`: a module with an environment of one turn, a test that passes as it stands, settings for `rl`."""

from __future__ import annotations

import importlib.util
import keyword
from pathlib import Path

from holdfast.commands.installation import is_checkout
from holdfast.commands.tables import Report
from holdfast.shared.errors import ConfigError, RunDirError

_MODULE = '''"""The environment of {name}.toml."""

from collections.abc import Sequence

from holdfast import Environment, Message, Score, Session, Task, TaskSeed


class {cls}(Environment):
    """Add two numbers: 1 for the right sum, else 0."""

    # Tools are functions or methods with a docstring and annotations:
    #
    #     def look_up(self, session: Session, word: str) -> str:
    #         """Look a word up.
    #
    #         Args:
    #             word: it.
    #         """
    #         return ...
    #
    #     tools = (look_up,)
    #
    # The policy then calls them, turn by turn, until a turn calls none. For other sessions of several turns write an
    # `async def run(self, session: Session, task: Task) -> None` that awaits `session.sample()`.

    def __init__(self, largest: int = 99) -> None:
        self._largest = largest

    def make_task(self, seed: TaskSeed) -> Task:
        # A function of the seed and of nothing else: every task may be made again after a crash.
        random = seed.random()
        first, second = random.randint(0, self._largest), random.randint(0, self._largest)
        question = f"What is {{first}} + {{second}}? Answer with the number alone."
        return Task(prompt=[Message("user", question)], answer=str(first + second))

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        # All sessions of one task; whatever a policy says must get a finite number.
        rights = [float(session.completion.strip() == task.answer) for session in sessions]
        return [Score(right, {{"exact": right}}) for right in rights]
'''
_TEST = '''"""The environment {cls}: its tasks, and what answers earn."""

import asyncio
from types import SimpleNamespace

from holdfast import Task, TaskSeed
from {name} import {cls}


def make_task(index: int) -> Task:
    return {cls}().make_task(TaskSeed(run_seed=0, environment="{name}", index=index))


def rewards(task: Task, *answers: str) -> list[float]:
    sessions = [SimpleNamespace(completion=answer, texts=[answer]) for answer in answers]
    return [score.reward for score in asyncio.run({cls}().score(task, sessions))]


def test_a_task_is_a_pure_function_of_its_seed() -> None:
    tasks = [make_task(index) for index in range(20)]
    assert [make_task(index) for index in reversed(range(20))] == tasks[::-1]
    assert len({{task.answer for task in tasks}}) > 1


def test_the_right_answer_earns_most() -> None:
    task = make_task(0)
    assert rewards(task, task.answer, f" {{task.answer}}\\n") == [1.0, 1.0]
    assert rewards(task, "", "no number", "9" * 10_000, "\\u0663") == [0.0] * 4
'''
_SETTINGS = """# {run}environments check {name}:{cls}
# {run}rl @ {name}.toml
output_dir = "outputs/{name}"
max_steps = 100

[model]
name = "Qwen/Qwen2.5-0.5B-Instruct"  # a directory, or a model of the hub

[trainer]
advantage = "grpo"

[trainer.loss]
type = "grpo"

[trainer.optim]
lr = 1e-6
weight_decay = 0.0

[trainer.ckpt]
interval = 10
resume_step = "auto"

[orchestrator]
problems_per_step = 16
group_size = 8
seq_len = 512

[orchestrator.sampling]
max_tokens = 64

[[orchestrator.environments]]
id = "{name}:{cls}"
args = {{ largest = 99 }}

[inference.model]
max_len = 512
"""


def create(name: str, directory: Path) -> Report:
    """Write `NAME.py`, `test_NAME.py` and `NAME.toml` into `directory`, and say what to do with them.

    Raises:
        ConfigError: the name cannot be that of a module, or is taken; or one of the files is there. Nothing is written.
        RunDirError: they cannot be written.
    """
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name[0] == "_":
        raise ConfigError(
            f"'{name}' cannot be the name of a module: letters, digits and _ are allowed, a letter first, no word of "
            "Python, such as word_game"
        )
    cls = "".join(word[0].upper() + word[1:] for word in name.split("_") if word)
    texts = {f"{name}.py": _MODULE, f"test_{name}.py": _TEST, f"{name}.toml": _SETTINGS}
    run = "uv run " if is_checkout() else ""
    paths = {directory / file: text.format(name=name, cls=cls, run=run) for file, text in texts.items()}
    if there := [path.name for path in paths if path.exists() or path.is_symlink()]:
        raise ConfigError(
            f"{', '.join(there)}: there already, so nothing was written. Choose another name, or move them away."
        )
    found = importlib.util.find_spec(name)
    if found is not None:
        raise ConfigError(
            f"the name '{name}' belongs to {found.origin or 'another module'}, which would be imported in the place of "
            "yours; nothing was written. Choose another name."
        )
    try:
        for path, text in paths.items():
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise RunDirError(f"{error.filename} cannot be written: {error.strerror or error}") from error
    lines = [
        f"wrote {', '.join(path.name for path in paths)}. What comes next:",
        f"  {'uv run --with pytest pytest' if run else 'python -m pytest'} test_{name}.py",
        f"  {run}environments check {name}:{cls}",
        f"  {run}rl @ {name}.toml",
    ]
    return Report({}, lines)
