"""What docs/developing.md adds is added to a copy of the repository, and used there."""

import re
from pathlib import Path

import pytest

from holdfast.run.run_dir import RunDir
from tests.conftest import ROOT
from tests.pages.additions import PAGE, Copy
from tests.pages.documentation import PAGES, blocks, prose, section

CHECKED = {"Add a policy loss", "Add an advantage", "Add a command", "Add an environment", "Add a metric", "Add a test"}


@pytest.mark.docs
def test_an_environment_is_a_file_and_a_line(tmp_path: Path) -> None:
    copy = Copy(tmp_path, "Add an environment")
    printed = copy.python(
        "-c",
        "import asyncio; from types import SimpleNamespace\n"
        "from holdfast import TaskSeed\n"
        "from holdfast.orchestrator.env.registry import load_environment\n"
        "from holdfast.config.environments import EnvironmentConfig\n"
        "environment = load_environment(EnvironmentConfig(id='sorting', args={'length': 7}), key='environments[0]')\n"
        "task = environment.make_task(TaskSeed(0, 'sorting', 3))\n"
        "sessions = [SimpleNamespace(completion=said) for said in (task.answer, task.prompt[0].content)]\n"
        "print(len(task.answer), [score.reward for score in asyncio.run(environment.score(task, sessions))])",
    )
    assert printed == "7 [1.0, 0.0]\n" and len(copy.added_lines()) == 1


@pytest.mark.docs
def test_a_policy_loss_is_a_function_and_a_line(tmp_path: Path) -> None:
    copy = Copy(tmp_path, "Add a policy loss")
    printed = copy.python(
        "-c",
        "import torch\n"
        "from holdfast import PolicyLossInput, build_policy_loss\n"
        "from holdfast.config import TrainerConfig\n"
        "config = TrainerConfig(loss={'type': 'positive'}).loss\n"
        "logprobs_N = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)\n"
        "ones_N, zeros_N = torch.ones(4), torch.zeros(4)\n"
        "advantages_N = torch.tensor([2.0, -1.0, 0.0, 4.0])\n"
        "data = PolicyLossInput(logprobs_N, zeros_N, zeros_N, advantages_N, zeros_N, ones_N / 4,\n"
        "    ones_N, torch.zeros(4, dtype=torch.long), step_sequences=1, step_tokens=4)\n"
        "loss, counts = build_policy_loss(config)(data)\n"
        "loss.backward()\n"
        "print(loss.item(), logprobs_N.grad.tolist(), counts['positive'].item())",
    )
    assert printed == "4.5 [-0.5, -0.0, -0.0, -1.0] 2\n"


@pytest.mark.docs
def test_an_advantage_is_a_function_and_a_line(tmp_path: Path) -> None:
    copy = Copy(tmp_path, "Add an advantage")
    printed = copy.python(
        "-c",
        "from types import SimpleNamespace\n"
        "from holdfast.config import TrainerConfig\n"
        "from holdfast.trainer.rl.assign_advantages import build_advantage\n"
        "rollouts = [SimpleNamespace(environment='a', total_reward=reward) for reward in (0.0, 1.0, 1.0, 7.0)]\n"
        "print([value * 3 for value in build_advantage(TrainerConfig(advantage='ranks'))([rollouts])[0]])",
    )
    assert printed == "[-3.0, 0.0, 0.0, 3.0]\n"


@pytest.mark.docs
def test_a_command_is_a_file_and_a_line(tmp_path: Path) -> None:
    copy = Copy(tmp_path / "copy", "Add a command")
    RunDir(tmp_path / "outputs" / "first").create()
    assert copy.python("-m", "holdfast", "runs", str(tmp_path / "outputs")) == "first -\n"
    assert "runs" in copy.python("-m", "holdfast", "--help") and len(copy.added_lines()) == 1


@pytest.mark.docs
def test_a_metric_is_a_line_and_a_row(tmp_path: Path) -> None:
    copy = Copy(tmp_path, "Add a metric")
    (name,) = re.findall(r'^ +"([\w/]+)": ', copy.added_lines()[0])
    (row,) = re.findall(r"^\| `([\w/]+)` ", copy.added_lines()[1])
    assert name == row
    copy.python("-c", "import holdfast.orchestrator.batch_pipeline")


@pytest.mark.docs
def test_a_test_is_a_file_in_the_package_of_its_module(tmp_path: Path) -> None:
    copy = Copy(tmp_path, "Add a test")
    (added,) = (block.option("add") for block in copy.additions)
    assert "1 passed" in copy.python("-m", "pytest", "-n", "0", "-q", str(added))


@pytest.mark.docs
def test_all_additions_together_keep_the_import_contracts(tmp_path: Path) -> None:
    copy = Copy(tmp_path, *sorted(CHECKED))
    copy.python("-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())")
    copy.python("-m", "tests.pages.architecture")
    assert "All checks passed!" in copy.python("-m", "ruff", "check", "src")


def test_every_addition_of_the_page_is_tried() -> None:
    titles = re.findall(r"^## (.*)$", prose(PAGE), re.MULTILINE)
    assert set(titles) >= CHECKED
    lines = {line for title in CHECKED for line in section(PAGE, title)}
    additions = [block.line for block in blocks(PAGE) if block.option("add") or block.option("of")]
    assert len(additions) > 4 and lines.issuperset(additions)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_modules_and_programs_that_a_page_names_exist(page: Path) -> None:
    text = prose(page)
    files = re.findall(r"`((?:src|tests|docs|configs|examples|benchmarks)/[\w/.-]*\w)`", text)
    assert not [name for name in files if not (ROOT / name).exists()]
    modules = re.findall(r"`holdfast\.([\w.]*\w)`", text)
    assert not [name for name in modules if not name.endswith("py") and not _exists(name)]
    named = re.findall(r"python -m ((?:tests|benchmarks|holdfast)[\w.]*\w)", text)
    paths = [(ROOT / "src" if name.startswith("holdfast") else ROOT) / name.replace(".", "/") for name in named]
    assert all((path / "__main__.py").is_file() or path.with_suffix(".py").is_file() for path in paths), paths


def _exists(name: str) -> bool:
    """Whether `name`, below `holdfast`, is a module, or a word of one."""
    path, words = ROOT / "src" / "holdfast", name.split(".")
    while words and ((path / words[0]).is_dir() or (path / f"{words[0]}.py").is_file()):
        path /= words.pop(0)
    module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return not words or re.search(rf"\b{words[0]}\b", module.read_text()) is not None
