"""The command `chat`: which weights it takes, what it says of the rest, and a talk with the model of the example."""

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.commands.chat import weights_of
from holdfast.run.run_dir import RunDir
from tests.builders.checkpoint_files import write_weights
from tests.conftest import BASE, ROOT
from tests.unit.conftest import Refused


def test_a_run_stands_for_its_newest_weights(tmp_path: Path, refused: Refused) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    assert f"`uv run ckpt export {run_dir.path} latest --to DIR`" in refused("chat", run_dir.path)
    for version in (4, 10):
        write_weights(run_dir, version)
    assert weights_of(run_dir.path) == str(run_dir.weights_of(10))
    assert weights_of(str(BASE)) == str(BASE) and weights_of("owner/model") == "owner/model"
    for place in ("./nowhere/x", f"{tmp_path}/nothing"):
        assert "there is no directory" in refused("chat", place)
    assert "has neither config.json nor run.json" in refused("chat", tmp_path)
    assert "must be a number from 0 on" in refused("chat", BASE, "--temperature", "-1")
    assert "unknown flag '--max-token'. Did you mean '--max-tokens'?" in refused("chat", BASE, "--max-token", "3")


@pytest.mark.launch
def test_a_chat_keeps_its_history_until_it_is_reset(tmp_path: Path) -> None:
    model = ROOT / "examples" / "reverse_text" / "model"

    def talk(*lines: str, flags: tuple[str, ...] = ("--temperature", "0", "--max-tokens", "12")) -> tuple[str, str]:
        command = [sys.executable, "-m", "holdfast", "chat", str(model), *flags]
        done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True, cwd=tmp_path)
        return done.stdout, done.stderr

    out, err = talk("qkmy", "abcd", "/reset", "abcd", "/wrong", "/quit", "never")
    first, with_history, alone = out.splitlines()
    assert first.startswith("ymkq"[0]) and with_history != alone and alone == talk("abcd")[0].strip()
    assert "there is no /wrong. There are: /system TEXT" in err and err.count("tokens/s)") == 3
    flags = ("--system", "x", "--temperature", "0", "--max-tokens", "12")
    assert talk("abcd", flags=flags)[0] == talk("/system x", "abcd")[0]
    seeded = [talk("abcd", flags=("--seed", seed, "--temperature", "3", "--max-tokens", "12"))[0] for seed in "112"]
    assert seeded[0] == seeded[1] != seeded[2]
    _, err = talk("abcd", flags=("--max-tokens", "1000000"))
    assert "exceeds the" in err and "/reset, or a smaller --max-tokens" in err
