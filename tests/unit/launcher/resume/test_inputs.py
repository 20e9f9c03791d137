"""What a run computes with beside its settings: a change is said, and batches made with the others are made anew."""

from pathlib import Path

import msgspec
import pytest

from holdfast.config.environments import EnvironmentConfig
from holdfast.config.rl import RlConfig
from holdfast.errors import ConfigError
from holdfast.launcher.resume.config_diff import changed_inputs
from holdfast.orchestrator.evaluation.results import claim_directory
from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.run import checked
from holdfast.run import manifest as content
from holdfast.run.manifest import content_digest, files_named_in, library_versions, read_manifest, write_manifest
from holdfast.run.run_dir import INPUTS_NAME, RunDir
from tests.unit.launcher.resume.test_resume import STATE, add_batch, add_checkpoint, rl, start_rl


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n')
    return path


def run_config(run: RunDir, data: Path, **ckpt: object) -> RlConfig:
    config = rl(run, **ckpt)
    args = {"path": str(data), "levels": [{"more": str(data)}]}
    config.orchestrator.environments = [EnvironmentConfig(id="jsonl", name="mine", args=args)]
    return config


@pytest.fixture
def killed(tmp_path: Path, data: Path) -> RunDir:
    """An RL run with a checkpoint of step 2, whose journal went on to batch 4."""
    run = RunDir(tmp_path / "killed")
    start_rl(run_config(run, data))
    add_checkpoint(run, 2, files=STATE)
    for step in (3, 4):
        add_batch(run, step, version=step - 2)
    return run


def go_on(run: RunDir, data: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[int], list[str]]:
    """Return the batches that are kept, and what is said to have changed."""
    capsys.readouterr()
    assert start_rl(run_config(run, data, resume_step="latest")).resume_step == 2
    said = [line.partition("from here on: ")[2] for line in capsys.readouterr().out.splitlines() if "WARNING" in line]
    return run.published_batches(), said


def test_other_libraries_are_said_until_a_checkpoint_has_them_and_their_batches_are_kept_from_then_on(
    killed: RunDir, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = read_manifest(killed.checkpoint(2))
    versions = {**library_versions(), "torch": "2.1.0"}
    write_manifest(killed.checkpoint(2), msgspec.structs.replace(manifest, libraries=versions))
    noted = killed.configs(1) / "inputs.json"
    noted.write_bytes(checked.encode(checked.decode(noted.read_bytes()) | {"torch": "2.1.0"}))
    changed = [f"torch: 2.1.0 -> {library_versions()['torch']}"]
    assert go_on(killed, data, capsys) == ([], changed)
    add_batch(killed, 3, version=1)
    assert go_on(killed, data, capsys) == ([3], changed)


def test_other_inputs_are_a_rewind_for_trackers(killed: RunDir, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go_on(killed, data, capsys)
    assert killed.rewinds() == []
    data.write_text('{"prompt": "a", "answer": "c"}\n')
    go_on(killed, data, capsys)
    assert killed.rewinds() == [2]


def test_texts_that_are_no_paths_are_taken_for_none(data: Path) -> None:
    args = {"long": "x" * 300, "longer": "é" * 4000, "null": "a\0b", "empty": "", "path": str(data)}
    assert list(files_named_in(args)) == [("args.path", data)]


@pytest.mark.parametrize("name", ["rows", "rows/*.jsonl"])
def test_files_that_come_to_a_directory_of_rows_and_go_from_it_are_changes(name: str, tmp_path: Path) -> None:
    def found() -> dict[str, str]:
        return {key: content_digest(path) for key, path in files_named_in({"path": str(tmp_path / name)})}

    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "rows/README.md").write_text("no rows")
    before = found()
    (tmp_path / "rows/b.jsonl").write_text('{"prompt": "b"}\n')
    after = found()
    key = f"args.path, file {'b.jsonl' if name == 'rows' else tmp_path / 'rows/b.jsonl'}"
    assert changed_inputs(after, before) == [f"{key}: not there -> {after[key]}"]
    assert changed_inputs(before, after) == [f"{key}: {after[key]} -> not there"]
    assert changed_inputs(after, {}) == changed_inputs(after, after) == [], "another setting is told as a setting"


def test_what_another_machine_has_otherwise_is_said_where_the_run_goes_on_from_a_store(
    killed: RunDir, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, empty = f"file://{tmp_path / 'store'}", RunDir(tmp_path / "empty")
    remote = RemoteCheckpoints(store)
    remote.upload(killed.checkpoint(2), 2)
    remote.write_identity(killed)
    data.write_text("another row")
    for told in (1, 0):
        capsys.readouterr()
        assert start_rl(run_config(empty, data, resume_step="auto", dir=store)).resume_step == 2
        assert capsys.readouterr().out.count("WARNING: changes what is computed from here on: ") == 2 * told, told
    empty.remove_run()
    assert not (empty.path / INPUTS_NAME).exists(), "--clean leaves it to no other run"


def test_an_evaluation_with_other_data_is_another_evaluation(tmp_path: Path, data: Path) -> None:
    def identity() -> dict[str, object]:
        return {"files": {key: content_digest(path) for key, path in files_named_in({"path": str(data)})}}

    claim_directory(tmp_path, identity())
    claim_directory(tmp_path, identity())
    data.write_text("other")
    with pytest.raises(ConfigError, match=r"holds another evaluation \(files.args.path: \"\w+\" there"):
        claim_directory(tmp_path, identity())


def test_a_digest_covers_all_parts_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(content, "_BLOCK_BYTES", 10)
    monkeypatch.setattr(content, "_BLOCKS", 4)
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(bytes(1000))
    large.write_bytes(bytes(3010))
    for path, places in ((small, range(1000)), (large, [0, 9, 1000, 2009, 3000, 3009])):
        whole = content_digest(path)
        for place in places:
            changed = bytearray(path.read_bytes())
            changed[place] = 1
            (tmp_path / "changed").write_bytes(changed)
            assert content_digest(tmp_path / "changed") != whole, place
    assert content_digest(large) != content_digest(small)
    (tmp_path / "empty").touch()
    assert content_digest(tmp_path / "empty")
