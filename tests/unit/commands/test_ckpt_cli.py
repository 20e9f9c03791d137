"""`ckpt ls`, `verify` and the command line, on checkpoints of a real run; and what is around torch."""

import errno
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import SftConfig
from holdfast.errors import STORAGE_FAILED, CheckpointError
from holdfast.run import manifest
from holdfast.run.metrics import MetricsWriter, read_metrics
from holdfast.run.run_dir import RunDir
from holdfast.view.ckpt_dirs import TensorWorkFailed, tensor_work
from holdfast.view.tables import Report, age, size
from tests.builders.attempts import write_settings
from tests.builders.broken_storage import unreadable
from tests.builders.checkpoint_files import flip, write_checkpoint, write_weights
from tests.unit.conftest import Command, Refused


@pytest.fixture
def run_dir(run_dir: RunDir) -> RunDir:
    """An `sft` run with the checkpoints of steps 1 to 4; the files of the trainer hold anything."""
    config = SftConfig.model_validate({"output_dir": run_dir.path, "max_steps": 4, "ckpt": {"interval": 1}})
    write_settings(run_dir, "sft", config)
    metrics = MetricsWriter(run_dir.metrics)
    for step, loss in enumerate((3.0, 2.0, 2.5, 2.25), start=1):
        metrics.write(step, {"loss": loss})
        write_checkpoint(run_dir, step, run_id=run_dir.run_id(), metrics={"loss": loss})
    metrics.close()
    write_weights(run_dir, 4)
    return run_dir


@pytest.fixture
def ckpt(run_command: Command) -> Command:
    return partial(run_command, "ckpt")


def set_metrics(directory: Path, metrics: dict[str, float]) -> None:
    listing = manifest.read_manifest(directory)
    listing.metrics = metrics
    manifest.write_manifest(directory, listing)


def listed(ckpt: Command, run_dir: RunDir, *flags: str) -> tuple[int, dict[str, Any]]:
    code, out, err = ckpt("ls", run_dir.path, "--json", *flags)
    assert err == ""
    return code, json.loads(out)


@pytest.mark.parametrize(("argv", "message"), [
    (["lss"], "unknown subcommand 'lss'. Did you mean 'ls'?"),
    (["ls", "--jsn", "x"], "unknown flag '--jsn'. Did you mean '--json'?"),
    (["ls", "--js"], "unknown flag '--js'."), (["--json", "ls"], "'--json' comes before the subcommand."),
    (["show"], "there is no run below outputs"), (["export", "1"], "required: --to"),
    (["verify", "--how", "half"], "invalid choice: 'half'"), (["ls", "nowhere"], "there is no directory nowhere"),
    (["ls", "."], ". holds no run: it has neither run.json nor checkpoints"),
])  # fmt: skip
@pytest.mark.usefixtures("in_tmp_path")
def test_a_mistake_is_one_message_and_exit_code_2(argv: list[str], message: str, refused: Refused) -> None:
    assert message in refused("ckpt", *argv)


@pytest.mark.parametrize("argv", [["show", "9"], ["verify", "9"], ["export", "9", "--to", "x"]])
def test_a_step_that_is_not_there_lists_those_that_are(argv: list[str], ckpt: Command, run_dir: RunDir) -> None:
    code, _, err = ckpt(argv[0], run_dir.path, *argv[1:])
    assert code == 2 and "step 9 is not in" in err and "1, 2, 3, 4" in err
    for word in ("nowhere", "9" * 200):
        code, _, err = ckpt("show", run_dir.path, word)
        assert code == 2 and f"'{word}' is neither a step nor the directory of a checkpoint, but nothing" in err
    assert "name too long" in ckpt("show", run_dir.path, "9" * 5000)[2]


def test_ls_shows_steps_and_marks_the_best(ckpt: Command, run_dir: RunDir) -> None:
    code, document = listed(ckpt, run_dir)
    assert code == 0 and document["problems"] == []
    assert document["metric"] == "loss"
    keys = "step status kind size_bytes age_s metric best world_size path reason"
    assert set(document["steps"][0]) == set(keys.split())
    steps = document["steps"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert {(line["status"], line["kind"], line["world_size"]) for line in steps} == {("committed", "checkpoint", 1)}
    losses = {int(line["step"]): line["loss"] for line in read_metrics(run_dir.metrics)}
    assert {line["step"]: line["metric"] for line in steps} == pytest.approx(losses)
    best = min(losses, key=lambda step: losses[step])
    assert [line["step"] for line in steps if line["best"]] == [document["best"]] == [best]
    size_on_disk = sum(path.stat().st_size for path in run_dir.checkpoint(2).rglob("*") if path.is_file())
    assert steps[1]["size_bytes"] == size_on_disk
    code, out, _ = ckpt("ls", run_dir.path)
    assert code == 0 and [number for number, line in enumerate(out.splitlines()) if "best" in line] == [best]
    assert "\x1b" not in out and all(line == line.rstrip() for line in out.splitlines())
    (run_dir.configs(1) / "sft.toml").write_text("max_steps =")
    code, damaged = listed(ckpt, run_dir)
    assert code == 1 and len(damaged["steps"]) == 4 and "sft.toml is damaged" in damaged["problems"][0]


def test_the_metric_is_the_one_asked_for_then_the_configured_one(ckpt: Command, run_dir: RunDir) -> None:
    for step, value in ((1, 3.0), (2, 9.0), (3, 1.0), (4, 5.0)):
        set_metrics(run_dir.checkpoint(step), {"loss": value, "reward/mean": value, "x": -value})
    assert listed(ckpt, run_dir)[1]["best"] == 2  # the reward comes before the loss
    assert listed(ckpt, run_dir, "--metric", "loss")[1]["best"] == 3
    assert listed(ckpt, run_dir, "--metric", "min:x")[1]["best"] == 2
    config = run_dir.configs(1) / "sft.toml"
    config.write_text(config.read_text().replace("[ckpt]", '[ckpt]\nkeep_best = "max:x"'))
    document = listed(ckpt, run_dir)[1]
    assert (document["metric"], document["best"]) == ("x", 3)
    code, _, err = ckpt("ls", run_dir.path, "--metric", "val/loss")
    assert code == 2 and "no step has the metric 'val/loss'. They have: loss, reward/mean, x." in err


def test_a_torn_save_is_shown_and_is_no_problem(ckpt: Command, run_dir: RunDir) -> None:
    torn = run_dir.checkpoints / ".tmp-step_5"
    shutil.copytree(run_dir.checkpoint(4), torn)
    code, document = listed(ckpt, run_dir)
    assert code == 0 and [line["status"] for line in document["steps"]] == ["committed"] * 4 + ["torn"]
    set_metrics(torn, {"loss": -1.0})
    assert listed(ckpt, run_dir)[1]["best"] in (1, 2, 3, 4)
    code, out, _ = ckpt("ls", run_dir.path)
    assert code == 0 and "cut off" in out
    code, out, _ = ckpt("verify", run_dir.path, "--json")
    assert code == 0 and len(json.loads(out)["directories"]) == 4


def test_damage_that_sizes_show_is_told_by_ls(ckpt: Command, run_dir: RunDir) -> None:
    (run_dir.checkpoint(1) / "manifest.json").write_bytes(b"")
    (run_dir.checkpoint(2) / "trainer" / ".metadata").unlink()
    data = run_dir.checkpoint(4) / "trainer" / "__0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    code, document = listed(ckpt, run_dir)
    assert code == 1
    assert [line["status"] for line in document["steps"]] == ["damaged", "damaged", "committed", "damaged"]
    assert document["best"] == 3  # a damaged step never is the best
    code, out, err = ckpt("ls", run_dir.path)
    assert (code, err) == (1, "")
    for reason in ("step_1/manifest.json", "step_2/trainer/.metadata is missing", "__0.distcp is damaged"):
        assert reason in out


def test_a_checkpoint_of_another_run_is_named(ckpt: Command, run_dir: RunDir) -> None:
    write_checkpoint(run_dir, 9, run_id="other", metrics={"loss": 0.0})
    code, document = listed(ckpt, run_dir)
    assert code == 1 and document["best"] == 2 and document["steps"][-1]["status"] == "foreign"
    assert "step 9 is foreign: " in document["problems"][0] and "of another run (other)" in document["problems"][0]
    code, out, _ = ckpt("verify", run_dir.path)
    assert code == 1 and "foreign" in out and "4 of 5 OK" in out and "of another run (other)" in out
    code, out, _ = ckpt("verify", run_dir.path, "latest")
    assert code == 0 and "step_4" in out, "the newest step of this run"


def test_verify_finds_one_flipped_bit_and_names_the_file(ckpt: Command, run_dir: RunDir) -> None:
    flip(run_dir.checkpoint(3) / "trainer" / "__0.distcp")
    assert listed(ckpt, run_dir)[0] == 0 and ckpt("verify", run_dir.path, "--how", "size")[0] == 0
    code, out, err = ckpt("verify", run_dir.path)
    assert (code, err) == (1, "")
    assert "step_3/trainer/__0.distcp is damaged" in out and "3 of 4 OK" in out and "MB/s" in out
    assert ckpt("verify", run_dir.path, "3")[0] == 1
    with unreadable(run_dir.checkpoint(2) / "manifest.json"):
        code, out, _ = ckpt("verify", run_dir.path, "2")
    assert code == 1 and "unreadable" in out and "damaged" not in out
    code, out, _ = ckpt("verify", run_dir.path, "1", "latest", "--json")
    document = json.loads(out)
    assert code == 0 and document["problems"] == []
    assert [Path(line["path"]).name for line in document["directories"]] == ["step_1", "step_4"]
    assert document["size_bytes"] == sum(line["size_bytes"] for line in document["directories"]) > 0


def test_checkpoints_alone_will_do_and_a_run_without_any(ckpt: Command, run_dir: RunDir) -> None:
    code, out, _ = ckpt("ls", run_dir.checkpoints, "--json")
    assert code == 0 and len(json.loads(out)["steps"]) == 4
    # A run without checkpoints is no mistake.
    shutil.rmtree(run_dir.checkpoints)
    for command in ("ls", "verify"):
        code, out, _ = ckpt(command, run_dir.path)
        assert code == 0 and "no checkpoints in" in out


@pytest.mark.parametrize("name", ["a[/b]", os.fsdecode(b"b\xff")])
def test_a_path_is_neither_markup_nor_always_utf_8(ckpt: Command, run_dir: RunDir, tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    place.parent.mkdir(exist_ok=True)
    run_dir.path.rename(place)
    assert ckpt("verify", str(place))[0] == 0
    assert json.loads(ckpt("ls", str(place), "--json")[1])["checkpoints"] == str(place / "checkpoints")


def test_no_line_is_cut_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Report({}, ["x" * 500]).print(as_json=False)
    assert capsys.readouterr().out == "x" * 500 + "\n"


def test_sizes_and_ages_are_short() -> None:
    sizes = "0 B, 999 B, 1 kB, 12.3 MB, 2.4 GB, 5 TB, 500.0 TB"
    assert ", ".join(size(value) for value in (0, 999, 1000, 12_345_678, 2.4e9, 5e12, 5e14)) == sizes
    assert [age(value) for value in (-5, 59, 300, 8000, 400_000)] == ["0 s", "59 s", "5 min", "2 h", "5 d"]


def test_what_libraries_print_does_not_come_into_the_report(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")
    with tensor_work("reading"):
        print("python")
        subprocess.run(["echo", "below python"], check=True)
        os.write(1, b"straight\n")
    print("after")
    printed = capfd.readouterr()
    assert printed.out == "before\nafter\n"
    assert sorted(printed.err.splitlines()) == ["below python", "python", "straight"]


def test_nor_does_what_a_library_in_c_leaves_in_its_buffer() -> None:
    code = (
        "import ctypes\nfrom holdfast.view.ckpt_dirs import tensor_work\n"
        "with tensor_work('reading'):\n    ctypes.CDLL(None).printf(b'from C')\nprint('{}')\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{}\n", "from C")


@pytest.mark.parametrize(("error", "code", "said"), [
    (CheckpointError("step 3 is damaged"), 2, "error: step 3 is damaged\n"),
    (OSError(errno.ENOSPC, "No space left on device", "/data/x"), STORAGE_FAILED, "error: the storage failed at"),
    (ZeroDivisionError("a bug"), 1, "Traceback (most recent call last)"),
])  # fmt: skip
def test_an_error_ends_the_command(error: Exception, code: int, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TensorWorkFailed) as caught, tensor_work("reading"):
        raise error
    printed = capfd.readouterr()
    assert caught.value.exit_code == code
    assert printed.out == "" and said in printed.err


def test_ctrl_c_is_no_error_of_the_work() -> None:
    with pytest.raises(KeyboardInterrupt), tensor_work("reading"):
        raise KeyboardInterrupt


def test_older_steps_are_pruned_by_the_rule(run_command: Command, refused: Refused, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    for step, loss in ((2, 0.5), (4, 0.1), (6, 0.3), (8, 0.2), (10, 0.4)):
        write_checkpoint(run_dir, step, metrics={"loss": loss}, run_id=run_dir.run_id())
    write_checkpoint(run_dir, 12, run_id="another")
    (run_dir.checkpoint(2) / "manifest.json").write_text("{")
    aside = run_dir.discarded(2) / "rollouts" / "step_9" / "batch.msgpack"
    aside.parent.mkdir(parents=True)
    aside.write_bytes(b"x" * 10_000)
    words = ("prune", run_dir.path, "--keep", "1", "--keep-best", "loss")
    code, out, _ = run_command("ckpt", *words, "--dry-run")
    assert code == 0 and out.startswith("would remove steps 6, 8: ") and "kept: steps 4, 10" in out
    assert run_dir.checkpoint(6).exists()
    code, out, _ = run_command("ckpt", *words, "--discarded", "--json")
    found = json.loads(out)
    assert (code, found["removed"], found["kept"], found["freed_bytes"] > 10_000) == (0, [6, 8], [4, 10], True)
    there = sorted(path.name for path in run_dir.checkpoints.iterdir())
    assert there == ["step_10", "step_12", "step_2", "step_4"] and not aside.exists(), "damaged and foreign steps stay"
    code, out, _ = run_command("ckpt", "du", run_dir.path)
    assert code == 0 and out.splitlines()[1].startswith("checkpoints") and "ckpt prune RUN --keep N" in out
    code, out, _ = run_command("ckpt", "prune", run_dir.path, "--keep", "4")
    assert code == 0 and out == "removed no step: 0 B; kept: steps 4, 10\n"
    assert "must be a number from 1 on" in refused("ckpt", "prune", run_dir.path, "--keep", "0")
    assert "required: --keep" in refused("ckpt", "prune", run_dir.path)
    assert "no step has the metric 'lost'" in refused("ckpt", *words[:-1], "lost")


def test_the_steps_of_a_run_that_trains_are_not_pruned(refused: Refused, run_dir: RunDir) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(run_dir.path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        said = refused("ckpt", "prune", run_dir.path, "--keep", "1")
        assert "is in use" in said and "--dry-run" in said and "--output-dir" not in said
        holder.kill()
    assert run_dir.committed_steps() == [1, 2, 3, 4]


HOLDER = """
import sys, time
from pathlib import Path
from holdfast.run.run_dir import RunDir
RunDir(Path(sys.argv[1])).lock()
print("held", flush=True)
time.sleep(10**6)
"""
