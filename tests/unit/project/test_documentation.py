"""README, docs and the project's papers say what is so, in plain English: commands, settings, links and tables."""

import ast
import asyncio
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import Response

from docs_tools.english import Page, faults_of_code, overall, pages
from docs_tools.listing import free_settings
from holdfast import JudgeConfig, TaskSeed, errors, judging
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.cli import COMMANDS
from holdfast.config import InferenceConfig, RlConfig
from holdfast.config.environments import EnvironmentConfig
from holdfast.launcher import liveness, restart_policy, server_choice
from holdfast.orchestrator.client import http, pool
from holdfast.orchestrator.env import guard
from holdfast.run import record_log
from tests.builders.scripted_sessions import scripted_session
from tests.conftest import BASE, ROOT
from tests.forking.commands import shared_commands
from tests.integration.test_documented_commands import STARTED
from tests.pages import documentation, guarantees
from tests.pages.documentation import PAGES, Block, anchors, behind_uv, blocks, commands, links, prose, shows
from tests.pages.runs import Checkout, can_be_started, settings_file
from tests.servers.judge import Body, FakeJudge, completion, judge_serving
from tests.unit.conftest import Command as RunCommand

IDS = [str(page.relative_to(ROOT)) for page in PAGES]
EVERYWHERE = [block for page in PAGES for block in blocks(page)]


@pytest.fixture
def checkout(in_tmp_path: Path) -> Checkout:
    return Checkout(in_tmp_path)


@pytest.fixture
def run_forked(tmp_path: Path) -> RunCommand:
    """Return what runs a command in `tmp_path`, and what it checks in processes of its own, by forks."""
    there = f"import os; os.chdir({str(tmp_path)!r})"

    def run(name: str, *argv: object) -> tuple[int, str, str]:
        log = tmp_path / f"dry_{len(list(tmp_path.glob('dry_*')))}.out"
        run = shared_commands().start(name, tmp_path, [str(word) for word in argv], log=log, fault=there).wait()
        assert run.code is not None
        return run.code, run.log, ""

    return run


def test_every_fence_names_its_language() -> None:
    assert not [block.where for block in EVERYWHERE if block.language not in documentation.LANGUAGES]
    fences = sum(page.read_text().count("```") for page in PAGES)
    assert fences == 2 * len(EVERYWHERE), "a fence is not closed, or closes another"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "llms.txt"], ids=[*IDS, "llms.txt"])
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists() and path.is_relative_to(ROOT), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {link}"


@pytest.mark.docs
@pytest.mark.launch
@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_hold_in_the_order_of_their_page(page: Path, checkout: Checkout, run_forked: RunCommand) -> None:
    """None is refused by what those before it have left; what is resumed or looked into was made before."""
    checkout.save_files(page)
    for command in commands(page):
        if page.name not in STARTED or not can_be_started(command):
            checkout.dry_run(command, run_forked)
    for number, line in enumerate(re.findall(r"`uv run ([^`]+)`", prose(page))):
        alone = documentation.Command(f"{page.name}, inline {number}", line, behind_uv(["uv", "run", *line.split()]))
        checkout.made.clear()
        if alone.words[0] not in ("ckpt", "rollouts", "report"):
            checkout.dry_run(alone, run_forked)


@pytest.mark.docs
@pytest.mark.launch
@pytest.mark.parametrize("block", [b for b in EVERYWHERE if b.language == "toml"], ids=lambda block: block.where)
def test_settings_can_be_used(block: Block, checkout: Checkout, run_forked: RunCommand) -> None:
    checkout.save_files(ROOT / "docs" / "environments.md")  # whose programs other pages import
    checkout.save_files(block.page)
    base = ROOT / "configs" / "reverse_text" / f"{block.info[1]}.toml"
    flags = ("@", base, "@", settings_file(block, checkout.path), "--output-dir", checkout.path / "run", "--dry-run")
    code, printed, _ = run_forked(block.info[1], *flags)
    assert code == 0, f"{block.where}: {printed}"


@pytest.mark.parametrize("block", [b for b in EVERYWHERE if b.language == "yaml"], ids=lambda block: block.where)
def test_yaml_on_the_pages_is_read(block: Block) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)


@pytest.mark.parametrize("block", [b for b in EVERYWHERE if b.language == "bash"], ids=lambda block: block.where)
def test_scripts_are_scripts(block: Block) -> None:
    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("block", [b for b in EVERYWHERE if b.language == "python"], ids=lambda block: block.where)
def test_programs_compile_and_import_what_exists(block: Block) -> None:
    """What they do is tested below, in test_example_loops.py and in test_losses.py."""
    tree = ast.parse(block.text)
    own = {"shout", "guessing"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module not in own and node.module != "__future__":
            names = ", ".join(alias.name for alias in node.names)
            assert node.module is not None
            # Those that take seconds are compiled only.
            if not node.module.startswith(("holdfast.trainer", "torch", "trl", "datasets")):
                exec(f"from {node.module} import {names}", {})


@pytest.fixture
def documented(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """A checkout with the programs of README and the pages about environments, from which they can be imported."""
    for page in ("README.md", "docs/environments.md", "docs/tools.md", "docs/rewards.md"):
        checkout.save_files(ROOT / page)
    monkeypatch.syspath_prepend(checkout.path)
    for name in ("addition", "shout", "guessing", "ranked", "warmer", "prices", "polite", "asked"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return checkout


def play(environment: Any, index: int, answers: list[str]) -> tuple[Any, Any]:
    """Play one session in which the policy says `answers`; return its task and the session. What asks without a prompt
    of its own begins with none."""
    tokenizer = load_tokenizer(str(BASE))
    task = environment.make_task(TaskSeed(0, "documented", index))
    prompt = tokenizer.prompt(task.prompt) if task.prompt else []
    turns = [[*tokenizer.encode(answer), tokenizer.stop_token_ids[0]] for answer in answers]
    session = scripted_session(tokenizer, prompt, turns, seq_len=256, max_tokens=16)
    asyncio.run(environment.run(session, task))
    return task, session


def scores_of(environment: Any, task: Any, *sessions: Any) -> list[float]:
    return [score.reward for score in asyncio.run(environment.score(task, sessions))]


def test_the_environment_of_the_readme_asks_for_the_last_letters_backwards(documented: Checkout) -> None:
    from last_letters import LastLetters  # type: ignore[import-not-found]

    tasks = [LastLetters().make_task(TaskSeed(0, "last_letters", index)) for index in range(50)]
    words = [task.prompt[0].content for task in tasks]
    assert len(set(words)) > 40, "the same task again and again"
    assert [task.answer for task in tasks] == ["".join(reversed(word))[:3] for word in words]
    word = LastLetters().make_task(TaskSeed(0, "documented", 7)).prompt[0].content
    task, whole = play(LastLetters(), 7, [word[::-1]])
    _, right = play(LastLetters(), 7, [word[::-1][:3]])
    assert scores_of(LastLetters(), task, right, whole) == [1.0, 2 * 3 / 9]


def test_the_environments_of_their_page_do_what_it_says(documented: Checkout) -> None:
    from guessing import Guessing  # type: ignore[import-not-found]
    from ranked import Shortest  # type: ignore[import-not-found]
    from shout import Shout  # type: ignore[import-not-found]
    from warmer import Warmer  # type: ignore[import-not-found]

    words = ["yes", "no"]
    for environment in (Shout(words), Shortest(words)):
        task, session = play(environment, 1, ["x"])
        _, right = play(environment, 1, [task.answer])
        _, long = play(environment, 1, ["nonsense"])
        assert session.completion == "x"
        assert scores_of(environment, task, right, long) == [1.0, 0.0], environment
    _, longer = play(Shortest(words), 1, [task.answer * 2])
    assert scores_of(Shortest(words), task, longer, right, long) == [0.5, 1.0, 0.0]
    assert scores_of(Shortest(words), task, long) == [0.0]
    secret = Guessing().make_task(TaskSeed(0, "documented", 3))
    low, high = str(secret.number - 1), str(secret.number + 1)
    task, session = play(Guessing(), 3, [low, high, secret.answer])
    assert session.texts == [low, high, secret.answer] and scores_of(Guessing(), task, session) == [1 / 3]
    _, lost = play(Guessing(), 3, [low] * 9)
    assert len(lost.texts) == 4 and scores_of(Guessing(), task, lost) == [0.0]
    (score,) = asyncio.run(Warmer().score(task, [session]))
    assert (score.reward, score.turn_rewards) == (1.0, [0.5, 0.5, 1.0])
    assert guard.checked_scores([score], [session], what="documented") == [score]  # type: ignore[list-item]


def test_the_judged_environment_of_its_page_asks_and_is_answered(documented: Checkout) -> None:
    from polite import Polite  # type: ignore[import-not-found]

    async def scores() -> list[float]:
        async with judging():
            return [score.reward for score in await environment.score(task, [good, bad])]

    async def answer(body: Body) -> Response:
        return completion("Yes." if body["messages"][0]["content"] == "YES please" else "No.")

    with judge_serving(FakeJudge(answer)) as judge:
        config = JudgeConfig(url=judge.url, model="m", prompt="{word} {reply}", verdicts={"yes": 1.0, "no": 0.0})
        environment = Polite(["yes"], config)
        (task, good), (_, bad) = play(environment, 1, ["please"]), play(environment, 1, ["now"])
        assert asyncio.run(scores()) == [1.0, 0.0]


def test_the_tools_of_their_page_look_up_and_add(documented: Checkout) -> None:
    from prices import Prices  # type: ignore[import-not-found]

    from tests.unit.orchestrator.env.test_environment_tools import called
    from tests.unit.orchestrator.env.test_environment_tools import play as play_with_tools

    task = Prices().make_task(TaskSeed(0, "adds", 0))
    words = task.prompt[0].content.split()
    prices = [task.prices[words[2]], task.prices[words[4]]]
    look_up = [called("hermes", "price_of", {"item": item}) for item in (words[2], words[4], "gold")]
    turns = ["".join(look_up), called("hermes", "add", {"numbers": prices}), f"It is {task.answer}"]
    session = play_with_tools("hermes", turns, Prices())
    assert session.texts == turns and scores_of(Prices(), task, session) == [0.9]
    assert str(sum(prices)) == task.answer


def test_the_harness_of_their_page_asks_twice(documented: Checkout) -> None:
    from asked import Asked  # type: ignore[import-not-found]

    said = [Asked().make_task(TaskSeed(0, "documented", 1)).answer, "x"]
    task, session = play(Asked(), 1, said)
    assert session.loss_mask.num_stretches == 2 and session.texts == said
    assert scores_of(Asked(), task, session) == [0.5]


def test_the_table_of_exit_codes_is_whole() -> None:
    page = (ROOT / "docs" / "files.md").read_text()
    table = page.partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| (\d+|128 \+ signal) \|", table, re.MULTILINE)
    classes = [value for value in vars(errors).values() if isinstance(value, type) and hasattr(value, "exit_code")]
    codes = {value.exit_code for value in classes} | {0, 1, errors.NOT_SAVED, errors.STORAGE_FAILED}
    assert documented == [*map(str, sorted(codes)), "128 + signal"]


def test_what_a_resume_may_change_freely_is_listed() -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| free |"))
    documented = {name.removesuffix(".*") for name in re.findall(r"`([^`]+)`", row)}
    assert documented == free_settings() - {"dry_run", "clean"}


def test_messages_to_look_up_are_those_of_the_code() -> None:
    source = "".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    said = re.sub(r"\{[^{}]*\}", "...", re.sub(r'"\s*\n\s*f?"', "", source))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    parts = [part.strip(" '") for message in messages for part in message.split("...") if part.strip(" '")]
    assert len(messages) >= 10 and not [part for part in parts if part not in said]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    assert not [name for name in guarantees.named_tests(prose(page)) if not guarantees.exists(name)]


def test_every_claim_of_the_guarantees_names_a_test() -> None:
    page = guarantees.PAGE.read_text()
    notes, claims = guarantees.footnotes(page), list(guarantees.claims(page))
    assert len(claims) > 100
    assert not [one for one in claims if not guarantees.tests_of(one, notes) and not guarantees.is_not_tried(one)]
    assert notes.keys() == guarantees.notes_used(page), "footnotes without a claim, or claims without a footnote"
    assert all("::" in test for tests in notes.values() for test in tests) and all(notes.values())


def test_defaults_that_the_guarantees_name_are_those_of_the_settings() -> None:
    named = list(guarantees.defaults(guarantees.PAGE.read_text()))
    sending = RlConfig.model_validate({"trainer": {"weights": {"transport": "collective"}}})
    assert len(named) >= 15
    for path, value in named:
        found: list[object] = []
        for config in (RlConfig(), sending, InferenceConfig(), EnvironmentConfig(id="reverse_text")):
            for part in path.split("."):
                config = getattr(config, part, None)
            found.append(config)
        assert value in found, f"{path}: {found}"


def test_constants_that_the_guarantees_name_are_those_of_the_code() -> None:
    page = " ".join(guarantees.PAGE.read_text().split())
    for text in (
        f"again after {pool.FIRST_BACKOFF_S:g} s, then twice as long each time up to {pool.LAST_BACKOFF_S:g} s",
        f"`Retry-After` says ({pool._LONGEST_PAUSE_S:g} s at most)",
        f"for {['no', 'one', 'two'][round(http._RETRY_FAILING_S / 60)]} minutes with 500",
        f"silent from {liveness._FIRST_BEAT_S:g} s after its start",
        f"named after {guard.NAMED_AFTER_S:g} s with environment",
        f"after {restart_policy._STORAGE_FIRST_DELAY_S:g} s, then 2, 4, "
        f"... up to {restart_policy._STORAGE_LAST_DELAY_S:g} s",
        f"takes the server at port {InferenceConfig().server.port} if it is nobody's",
        f"waits up to {server_choice._ENDING_S:g} s for what a killed launcher",
        f"The answers of the last {1000 * record_log._BETWEEN_SYNCS_S:g} ms",
    ):
        assert text in page, text


def test_the_comparison_with_a_page_notices_what_differs() -> None:
    printed = "directory  status  size\nstep_20    OK      7.56 MB\n2 of 2 OK; 15.1 MB in 0.06 s\n"
    assert shows(["directory status size", "step_7 OK 1,234.5 MB", "2 of 2 OK; ..."], printed) is None
    assert shows(["step_20 damaged 7.56 MB"], printed) == "step_20 damaged 7.56 MB"
    assert shows(["2 of 2 OK; ...", "step_20 OK 7.56 MB"], printed) == "step_20 OK 7.56 MB", "another order"


ENGLISH_PAGES = pages(ROOT)


@pytest.mark.parametrize("page", ENGLISH_PAGES, ids=lambda page: page.path.name)
def test_a_page_is_in_plain_english(page: Page) -> None:
    assert not page.breaks, "\n".join([f"{page.path.name}:", *page.breaks])


def test_docstrings_and_comments_are_in_plain_english() -> None:
    found = [line for path in sorted((ROOT / "src").rglob("*.py")) for line in faults_of_code(path)]
    assert not found, "\n".join(found)


def test_all_pages_together_are_short() -> None:
    assert not overall(ENGLISH_PAGES)


def test_bad_english_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Of headings nothing is asked\n\n"
        "What it has is that of the one that was there before it, or not. A file is no page, but for `is no` code.\n\n"
        "```text\nWhat is in here is no matter.\n```\n\n"
        "| Who | Saves run in the background |\n|---|---|\n\n"
        "[^note]: What tests are called is no matter.\n"
    )
    first, second, *cells = Page(page).sentences
    assert first.vagueness > 0.9 and len(first.faults) == 3 and first.num_words == 15
    assert len(second.faults) == 2 and second.vagueness < 0.7
    assert [cell.text for cell in cells if cell.faults] == ["Who"]
    module = tmp_path / "module.py"
    module.write_text('"""Text.\n\n    Args:\n        path: what lies there.\n"""\n\nx = 1  # So it is\n')
    assert [line.partition(": ")[0][-1] for line in faults_of_code(module)] == ["1", "7"]
    page.write_text("The trainer saves every step, the orchestrator reads a journal, " * 4 + "and so on.\n")
    assert len(Page(page).breaks) == 2, "too long a sentence, and too long on average"


DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
_OF_OTHERS = re.compile(r"^(VLLM|CUDA|NVIDIA|TORCH|PYTORCH|TOKENIZERS|RAY_ENABLE|PYTHON(HASHSEED|SAFEPATH))")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_file_for_language_models_has_its_form_and_every_page() -> None:
    """llmstxt.org: a title, a quote, text, and sections of links with a note behind each."""
    lines = (ROOT / "llms.txt").read_text().splitlines()
    assert lines[0] == f"# {project()['name']}" and lines[2].startswith("> ")
    below = lines[next(number for number, line in enumerate(lines) if line.startswith("## ")) :]
    assert not [line for line in below if line and not re.fullmatch(r"## .+|- \[[^\]]+\]\([^)]+\): .+", line)]
    named = {(ROOT / link).resolve() for link in links(ROOT / "llms.txt")}
    assert not [page.name for page in PAGES if page not in named]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_are_clean_and_copy_what_is_there(dockerfile: Path) -> None:
    linted = subprocess.run([Path(sys.executable).with_name("hadolint"), dockerfile], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    text = dockerfile.read_text()
    allowed = set((ROOT / ".dockerignore").read_text().replace("!", "").split())
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists() and source in allowed, source
    users = re.findall(r"^USER (\d+)$", text, re.MULTILINE)
    assert users and users[-1] != "0"
    assert "--frozen --no-dev" in text and f"docker/{dockerfile.name}" in (ROOT / "docs/your_model.md").read_text()


def test_groups_that_the_dockerfiles_name_are_there() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    named = {name for path in DOCKERFILES for name in re.findall(r"--(?:no-)?group (\w+)", path.read_text())}
    assert named == {"cpu", "gpu"} and named <= groups.keys()


def test_environment_variables_that_are_read_are_documented() -> None:
    """Every name in capitals that the code asks the environment for, or sets for its own processes."""
    page = (ROOT / "docs" / "files.md").read_text()
    asked = re.compile(
        r"""(?:environ(?:\.get|\.pop|\.setdefault)?[\[(]|environment\.get\(|_ENV(?:: str)? = )"([A-Z][A-Z_]+)\""""
    )
    code = "".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    names = {name for name in asked.findall(code) if not _OF_OTHERS.match(name)}
    assert len(names) > 8
    missing = [name for name in sorted(names) if name not in page and not name.startswith("SLURM_")]
    # Set by torchrun for ranks that it starts, and read by them alone.
    assert set(missing) <= {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}


def test_the_readme_is_short_and_names_every_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 160 and not [name for name in COMMANDS if f"`{name}`" not in text]


def test_every_page_is_linked_from_the_readme_or_another_page() -> None:
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links(page)}
    assert not [page.name for page in PAGES if page.name != "README.md" and page not in linked]
