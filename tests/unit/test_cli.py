"""The commands as a user meets them: their table, help, dry runs, exit codes, refusals, and where output goes."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import tomli

import holdfast
from holdfast import cli, config, errors
from holdfast.config import InferenceConfig, OrchestratorConfig, RlConfig, SftConfig
from holdfast.config.load import read_toml
from holdfast.launcher.server_choice import reserve
from holdfast.run.run_dir import RunDir
from tests.builders.toy import TOY
from tests.conftest import ROOT
from tests.runs.ports import free_port
from tests.unit.conftest import Command, Refused


@pytest.fixture
def run(run_command: Command, in_root: Path) -> Command:
    return run_command


_PROCESSES = ("launcher.launch", "orchestrator.main", "trainer.launch", "inference.main", "view.track")
_FACE = ("Environment", "Message", "Score", "Session", "Task", "TaskSeed")
_NEEDS_TORCH = {  # what takes or returns tensors
    *("Checkpointer", "load_state_with_optimizer", "load_weights_only", "module_tensors", "save_state"),
    *("PolicyLossInput", "build_policy_loss"),
}


@pytest.mark.parametrize(("code", "heavy"), [
    ("import holdfast.orchestrator.check", "aiohttp"),  # nothing is asked for yet
    (
        "".join(f"import holdfast.{name}\n" for name in _PROCESSES),
        "torch vllm numpy httpx uvicorn rich pynvml fsspec prometheus_client psutil",
    ),
    (f"from holdfast import {', '.join(_FACE)}", "pydantic numpy jinja2 tokenizers aiohttp holdfast.config.base"),
    (f"from holdfast import {', '.join({*holdfast.__all__} - _NEEDS_TORCH)}", "torch transformers vllm"),
    (
        "from holdfast import cli\n"
        "for name, (_, _, read) in cli.COMMANDS.items():\n    assert not read or cli.run(name, ['--help']) == 0\n",
        "pydantic asyncio holdfast.launcher torch transformers datasets numpy",
    ),
    (
        "from holdfast import cli\ntry: cli.run('sft', [])\nexcept Exception: pass\n",
        "torch numpy transformers vllm",
    ),
], ids=["check", "processes", "environment", "names", "help", "refusal"])  # fmt: skip
def test_what_imports_nothing_heavy(code: str, heavy: str) -> None:
    program = f"import sys\n{code}\nprint('HEAVY', {{*{heavy!r}.split()}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY set()", done.stderr


def test_the_installed_command_ends_the_same_way(command: Callable[[str], str], tmp_path: Path) -> None:
    done = subprocess.run([command("sft"), "--max-steps", "0"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: flag --max-steps") and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.launch  # counts the data in a process that imports transformers
@pytest.mark.everyday
def test_a_dry_run_writes_the_resolved_config_and_starts_nothing(run: Command, in_root: Path, tmp_path: Path) -> None:
    code, out, _ = run("sft", "@", "configs/reverse_text/sft.toml", "--max-steps", "20", "--ckpt", "--dry-run",
                       "--output-dir", tmp_path / "run")  # fmt: skip
    assert code == 0
    resolved = tmp_path / "run" / "configs" / "dry_run" / "sft.toml"
    assert str(resolved) in out and "step 20" in out
    config = read_toml(SftConfig, resolved)
    assert config.max_steps == 20 and config.ckpt is not None
    assert config.optim == read_toml(SftConfig, in_root / "configs/reverse_text/sft.toml").optim
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [resolved]


@pytest.mark.launch
def test_a_dry_run_shows_every_node_and_what_is_offloaded(run: Command, tmp_path: Path) -> None:
    several = ("--parallel.nodes", "3", "--parallel.rdzv-endpoint", "first:29500", "--parallel.cpu-offload")
    code, out, _ = run("sft", "@", "configs/reverse_text/sft.toml", "--dry-run", "--output-dir", tmp_path, *several)
    assert code == 0
    assert re.findall(r"^trainer \((.*?)\) +(\w+) +(CPU, CPU offload) +(\d) ", out, re.MULTILINE) == [
        ("node 0", "first", "CPU, CPU offload", "1"), ("nodes 1-2", "others", "CPU, CPU offload", "1")
    ]  # fmt: skip


def test_several_inference_servers_have_a_configuration_each(run: Command, tmp_path: Path) -> None:
    code, out, _ = run("rl", "@", "configs/reverse_text/rl.toml", "--dry-run", "--output-dir", tmp_path,
                       "--inference.engines", "3", "--inference.server.port", "4321",
                       "--model.name", "somebody/model")  # fmt: skip
    assert code == 0 and "model: somebody/model, of the hub, not looked at, float32\n" in out
    written = tmp_path / "configs" / "dry_run"
    paths = [written / f"inference_{number}.toml" for number in range(3)]
    assert all(str(path) in out for path in paths)
    servers = [read_toml(InferenceConfig, path) for path in paths]
    assert [(server.server.port, server.engines) for server in servers] == [(4321, 1), (4322, 1), (4323, 1)]
    assert len({server.engine.threads for server in servers}) == 1 and servers[0].engine.threads is not None
    shared = read_toml(InferenceConfig, written / "inference.toml")
    assert read_toml(RlConfig, written / "rl.toml").output_dir == tmp_path and (written / "trainer.toml").is_file()
    assert not RunDir(tmp_path).holds_run()
    assert shared.engines == 3 and {"inference_0": servers[0]}.items() <= shared.of_each().items()
    urls = read_toml(OrchestratorConfig, written / "orchestrator.toml").client.urls
    assert urls == [server.server.url for server in servers]


@pytest.mark.parametrize("program", [pytest.param("trainer", marks=pytest.mark.launch), "orchestrator", "inference"])
def test_a_dry_run_of_one_process(program: str, run: Command, tmp_path: Path) -> None:
    code, _, _ = run(program, *TOY[program], "--dry-run", "--output-dir", tmp_path)
    assert code == 0 and (tmp_path / "configs" / "dry_run" / f"{program}.toml").is_file()
    assert not RunDir(tmp_path).holds_run()


def test_a_server_at_a_taken_port_is_refused(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.launcher.launch.os.execv", None)  # this process must not become a server
    port = free_port()
    held = reserve("127.0.0.1", port)
    assert held is not None
    policy = ("--model.name", "examples/reverse_text/model")
    code, _, err = run("inference", *policy, "--server.port", port, "--output-dir", tmp_path)
    held.release()
    assert code == 2 and f"http://127.0.0.1:{port} is in use, by another server or a run. Stop it, or choose" in err


def test_an_existing_run_is_refused_with_the_ways_out_and_stays(run: Command, run_dir: RunDir) -> None:
    run_dir.metrics.write_text('{"step": 1}\n')
    for flags in ((), ("--dry-run",)):
        code, _, err = run("sft", *TOY["sft"], "--output-dir", run_dir.path, *flags)
        assert code == 2
        assert all(word in err for word in ("already holds a run", "--output-dir", "--ckpt.resume-step auto"))
        assert "--clean" not in err, "no way out may remove what can be resumed"
    code, _, err = run("sft", *TOY["sft"], "--output-dir", run_dir.path, "--clean", "--ckpt.resume-step", "latest")
    assert code == 2 and "--clean" in err and "--ckpt.resume-step" in err, "the two contradict each other"
    assert run("sft", *TOY["sft"], "--dry-run", "--clean", "--output-dir", run_dir.path)[0] == 0
    assert run_dir.holds_run()


CODE = "import sys; from holdfast import cli; sys.argv = ['orchestrator', *sys.argv[1:]]; cli.orchestrator()"


def test_a_dry_run_may_write_nothing_at_all(run: Command) -> None:
    code, out, err = run("orchestrator", *TOY["orchestrator"], "--output-dir", "/dev/null", "--dry-run")
    assert (code, err) == (0, "") and "resolved configuration: /dev/null\n" in out


@pytest.mark.launch
def test_names_that_the_locale_has_no_characters_for_end_nothing(tmp_path: Path, in_root: Path) -> None:
    where = tmp_path / "café"
    where.mkdir()
    environment = os.environ | {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    argv = [sys.executable, "-c", CODE, *TOY["orchestrator"], "--dry-run", "--output-dir"]

    def started(output_dir: bytes) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*argv, output_dir], env=environment, capture_output=True, text=True, check=False)

    for strange in (str(where).encode(), str(tmp_path).encode() + b"/caf\xe9"):
        done = started(strange)
        assert done.returncode in (0, 2) and "Traceback" not in done.stderr
        assert done.returncode == 0 or "must be text in UTF-8" in done.stderr


def test_system_errors_are_one_line_each(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(error: BaseException) -> tuple[object, str]:
        def run() -> int:
            raise error

        with pytest.raises(SystemExit) as caught:
            cli._exit(run)
        return caught.value.code, capsys.readouterr().err

    advice = "Check permissions and free space there, or choose another directory.\n"
    full = OSError(errno.ENOSPC, "No space left on device", "/run")
    assert ends(full) == (2, f"error: No space left on device: /run. {advice}")
    assert ends(OSError("no such thing")) == (2, f"error: no such thing. {advice}")
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # as in a notebook
    assert ends(KeyboardInterrupt()) == (128 + signal.SIGINT, "")


CLOSED, FULL, GONE = ">&-", ">/dev/full", "| true"
Started = Callable[..., tuple[int, str]]


@pytest.fixture
def started(in_root: Path) -> Started:
    """Run a command in a shell; return its exit code, and what it said on stderr."""

    def start(words: str, redirected: str) -> tuple[int, str]:
        command = f'"$0" -P -m holdfast {words} {redirected}'
        if redirected.startswith("|"):
            command += "; exit ${PIPESTATUS[0]}"
        done = subprocess.run(["bash", "-c", command, sys.executable], capture_output=True, text=True)
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
        return done.returncode, done.stderr

    return start


@pytest.mark.launch
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["monitor {run} --json", "sft --help", "ckpt --help"])
def test_what_was_to_be_printed_and_was_not_is_told(
    words: str, unbuffered: str, started: Started, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    words = words.format(run=run_dir.path)
    assert started(words, ">/dev/null") == (0, "")
    assert started(words, CLOSED) == (0, ""), "nobody wants to read it"
    assert started(words, ">&- 2>&- <&-") == (0, "")
    code, said = started(words, FULL)
    assert code == 2 and said.startswith("error: the output cannot be written: No space left on device. ")
    assert "--output-dir" not in said and started(words, f"{FULL} 2>/dev/full") == (2, "")


@pytest.mark.launch
def test_an_error_that_nobody_hears_has_its_exit_code(started: Started, tmp_path: Path) -> None:
    words = f"ckpt ls {tmp_path / 'nowhere'}"
    for redirected in ("2>&-", "2>/dev/full", ">&- 2>&-", ">/dev/full 2>/dev/full"):
        assert started(words, redirected) == (2, ""), redirected
    code, said = started(words, CLOSED)
    assert code == 2 and "nowhere" in said


@pytest.mark.launch
def test_help_to_a_reader_that_has_gone_is_no_error(started: Started) -> None:
    for words in ("ckpt --help", "sft --help"):
        code, said = started(words, GONE)
        assert code in (0, 128 + signal.SIGPIPE) and said == ""


def test_files_do_not_get_the_numbers_of_closed_streams(tmp_path: Path) -> None:
    """What a library prints would go into the first file that is opened."""
    code = (
        "import json, os, sys; from holdfast.process.run_module import open_closed_streams\n"
        "open_closed_streams(); opened = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)\n"
        "os.write(1, b'of a library'); print('out'); print('err', file=sys.stderr)\n"
        "assert sys.stdin.read() == '' and opened > 2\n"
        "os.write(opened, json.dumps([os.readlink(f'/proc/self/fd/{n}') for n in range(3)]).encode())\n"
    )
    path = tmp_path / "file"
    done = subprocess.run(["bash", "-c", '"$0" -c "$1" "$2" <&- >&- 2>&-', sys.executable, code, str(path)])
    assert done.returncode == 0 and json.loads(path.read_text()) == [os.devnull] * 3


@pytest.fixture
def holdfast(run_command: Command) -> Command:
    return partial(run_command, "main")


def test_every_command_is_installed_by_its_own_name_too() -> None:
    scripts = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    expected = {name: f"holdfast.cli:{name.replace('-', '_')}" for name in cli.COMMANDS}
    assert scripts == {"holdfast": "holdfast.cli:main", **expected}


def test_every_training_program_has_a_command_of_its_name() -> None:
    of_command = {name: entry[2] for name, entry in cli.COMMANDS.items()}
    for program, configuration in config.PROGRAMS.items():
        assert of_command["trainer" if program == "rl" else program] == configuration


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_is_the_same_by_either_name(name: str, run_command: Command, holdfast: Command) -> None:
    for words in (["--help"], ["--no-such-flag"]):
        by_itself = run_command(name, *words)
        assert holdfast(name, *words) == by_itself and by_itself[0] == (0 if words == ["--help"] else 2)


def test_help_of_a_command_may_be_asked_for_first(holdfast: Command) -> None:
    for words in (["rl"], ["rl", "loss"], ["ckpt"]):
        assert holdfast("help", *words) == holdfast(words[0], "--help", *words[1:])


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"], ["help"]])
def test_help_lists_every_command(words: list[str], holdfast: Command) -> None:
    code, out, err = holdfast(*words)
    assert (code, err) == (0, "")
    for name, (summary, _, _) in cli.COMMANDS.items():
        assert f"  {name:<14}{summary}\n" in out


def test_the_version_is_that_of_the_distribution(holdfast: Command) -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert holdfast("--version") == (0, f"holdfast {project['version']}\n", "")


def test_an_unknown_command_is_told_with_the_nearest(refused: Refused) -> None:
    said = refused("main", "rollout", "show")
    assert said.startswith("error: unknown command 'rollout'. Did you mean 'rollouts'? There are: sft, dpo,")
    assert "unknown command 'grpo'. Here that is `rl`." in refused("main", "grpo")


@pytest.mark.parametrize(("words", "said"), [
    ("track . --na b", "'--na'. Did you mean '--name'?"),
    ("monitor . --onc", "'--onc'. Did you mean '--once'?"),
    ("monitor . --step=3", "'--step'. There are: --interval, --json, --once, --wait."),
    ("report . --t b", "'--t'. Did you mean '--to'?"),
    ("ckpt export . --where b", "'--where'. There are: --base, --dtype, --format, --json, --private, --to, --to-hub."),
    ("rollouts --head 2", "'--head'. Did you mean '--limit'?"),
    ("report . --output b", "'--output'. Did you mean '--to'?"),
    ("sft --resume", "'--resume'. Did you mean '--ckpt.resume-step'?"),
    ("sft --data.no-pack", "'--data.no-pack'. Did you mean '--no-data.pack'?"),
    ("rl --model.lora.r 8", "'--model.lora.r'. Did you mean '--trainer.model.lora.rank'?"),
    ("rl --inference.server.api-key x", "'--inference.server.api-key'. Here generation needs no key;"),
    ("evaluate --compare . . --js", "'--js'. Did you mean '--json'?"),
])  # fmt: skip
def test_a_shortened_or_unknown_flag_is_not_guessed(words: str, said: str, refused: Refused) -> None:
    assert f"error: unknown flag {said} " in refused("main", *words.split())


@pytest.mark.parametrize("name", ["reward-model", "no_such_command", "main_"])
def test_only_commands_are_functions_of_the_module(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'holdfast.cli' has no attribute '{name}'"):
        getattr(cli, name)


def test_python_m_holdfast_does_not_import_from_the_working_directory(tmp_path: Path) -> None:
    for name in ("argparse", "pydantic", "tomli", "trainer", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')\n")
    for flags in ([], ["-P"]):
        argv = [sys.executable, *flags, "-m", "holdfast", "ckpt", "ls", "none"]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
        done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and done.stderr.startswith("error: there is no directory none"), done.stderr


def test_the_tree_of_errors_is_that_of_the_code() -> None:
    """Every public exception, with its base, as the docstring of `errors` draws it."""
    drawn: dict[str, str] = {}
    parents = ["HoldfastError"]
    for indent, name in re.findall(r"^    ((?:│   )*)[├└]── (\w+)", errors.__doc__ or "", re.MULTILINE):
        parents = [*parents[: len(indent) // 4 + 1], name]
        drawn[name] = parents[-2]
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    bases = dict(re.findall(r"^class (\w+)\((?:[\w.]+\.)?(\w+)[,)]", sources, re.MULTILINE))
    below = {"HoldfastError"}
    while more := {name for name, base in bases.items() if base in below} - below:
        below |= more
    assert len(drawn) > 10
    assert drawn == {name: bases[name] for name in below - {"HoldfastError"} if not name.startswith("_")}
