"""Damage to a real checkpoint of `sft`, at hundreds of random places: always noticed by all who may want the step, with
the file's name."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import CheckpointError, ReadError
from holdfast.launcher.resume.resume_step import resolve_resume_step
from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.run.manifest import MANIFEST_NAME, FileEntry, decode_manifest, encode_manifest, read_manifest, verify
from holdfast.run.run_dir import RunDir
from holdfast.trainer.mesh import Mesh
from tests.conftest import ModelFactory
from tests.faults.run_states import checkpoint_state
from tests.unit.trainer.programs.in_process import train

STEPS = (1, 2, 3)
NEWEST, OTHER = 3, 2
SEED = 20250
EDGE_BYTES = 512
POSITIONS = {"flipped bit": 170, "truncated": 60, "appended": 40, "wrong checksum": 20, "wrong size": 10, "mixed": 20}
"""Random positions of each kind of damage. Together they are the promise of 300: do not thin them out."""

Damaged = dict[int, Path]
"""Step -> the file that is wrong in it."""
Damage = Callable[[RunDir, Path, random.Random], AbstractContextManager[Damaged]]
"""Damages one file of the newest step as long as the context lasts."""


@pytest.fixture(scope="module")
def settings(tiny_model: ModelFactory, sft_data: Path) -> dict[str, Any]:
    """Settings of a run with dropout, so that its generators move."""
    data = {"name": str(sft_data), "batch_size": 8, "micro_batch_size": 2, "seq_len": 32}
    return {"model": {"name": str(tiny_model(attention_dropout=0.3))}, "data": data, "ckpt": {"interval": 1}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any], mesh: Mesh) -> RunDir:
    """Return the directory of a run of three committed steps."""
    assert mesh.world_size == 1
    return train("sft", tmp_path_factory.mktemp("damage") / "run", settings, until=NEWEST)


@pytest.fixture
def run_dir(saved: RunDir) -> Iterator[RunDir]:
    """Return the run's directory, intact before the test and after it."""
    intact(saved)
    yield saved
    intact(saved)


def intact(run_dir: RunDir) -> None:
    for step in STEPS:
        assert verify(run_dir.checkpoint(step), how="full", step=step).step == step
    assert resolve_resume_step(run_dir, "latest") == NEWEST


def files_of(run_dir: RunDir, step: int = NEWEST) -> list[Path]:
    directory = run_dir.checkpoint(step)
    return [*(directory / name for name in sorted(read_manifest(directory).files)), directory / MANIFEST_NAME]


@contextmanager
def rewritten(path: Path, content: bytes) -> Iterator[None]:
    before = path.read_bytes()
    assert before != content
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


@contextmanager
def exchanged(first: Path, second: Path) -> Iterator[None]:
    aside = first.with_name("aside")

    def exchange() -> None:
        first.rename(aside)
        second.rename(first)
        aside.rename(second)

    exchange()
    try:
        yield
    finally:
        exchange()


def position(size: int, generator: random.Random) -> int:
    """Return an offset; every other one in the first or last bytes, where headers and directories lie."""
    if size <= EDGE_BYTES or generator.random() < 0.5:
        return generator.randrange(size)
    edge = generator.randrange(EDGE_BYTES)
    return edge if generator.random() < 0.5 else size - 1 - edge


@contextmanager
def flipped_bit(run_dir: RunDir, path: Path, generator: random.Random) -> Iterator[Damaged]:
    content = bytearray(path.read_bytes())
    content[position(len(content), generator)] ^= 1 << generator.randrange(8)
    with rewritten(path, bytes(content)):
        yield {NEWEST: path}


@contextmanager
def truncated(run_dir: RunDir, path: Path, generator: random.Random) -> Iterator[Damaged]:
    content = path.read_bytes()
    with rewritten(path, content[: position(len(content), generator)]):
        yield {NEWEST: path}


@contextmanager
def appended(run_dir: RunDir, path: Path, generator: random.Random) -> Iterator[Damaged]:
    content = path.read_bytes()
    more = generator.choice([b"\n", b"\0", b" ", content, generator.randbytes(generator.randint(1, 4096))])
    with rewritten(path, content + more):
        yield {NEWEST: path}


@contextmanager
def forged(run_dir: RunDir, path: Path, change: Callable[[FileEntry], FileEntry]) -> Iterator[Damaged]:
    """Enter something wrong about one file; the manifest itself is consistent."""
    directory = run_dir.checkpoint(NEWEST)
    listing, name = read_manifest(directory), str(path.relative_to(directory))
    files = listing.files | {name: change(listing.files[name])}
    with rewritten(directory / MANIFEST_NAME, encode_manifest(msgspec.structs.replace(listing, files=files))):
        yield {NEWEST: path}


def wrong_checksum(run_dir: RunDir, path: Path, generator: random.Random) -> AbstractContextManager[Damaged]:
    digit = generator.randrange(32)

    def change(entry: FileEntry) -> FileEntry:
        digits = list(entry.xxh3_128)
        digits[digit] = "0" if digits[digit] != "0" else "1"
        return msgspec.structs.replace(entry, xxh3_128="".join(digits))

    return forged(run_dir, path, change)


def wrong_size(run_dir: RunDir, path: Path, generator: random.Random) -> AbstractContextManager[Damaged]:
    more = generator.choice([-1, 1, 1 << 32])
    return forged(run_dir, path, lambda entry: msgspec.structs.replace(entry, size_bytes=entry.size_bytes + more))


@contextmanager
def mixed(run_dir: RunDir, path: Path, generator: random.Random) -> Iterator[Damaged]:
    """Put a stretch of another file of any step into one file, its size unchanged."""
    content = path.read_bytes()
    while True:
        other = generator.choice(files_of(run_dir, generator.choice(STEPS))).read_bytes()
        offset = position(len(content), generator)
        length = min(generator.randint(1, 4096), len(other), len(content) - offset)
        start = generator.randrange(len(other) - length + 1)
        changed = content[:offset] + other[start : start + length] + content[offset + length :]
        if changed != content:
            break
    assert len(changed) == len(content)
    with rewritten(path, changed):
        yield {NEWEST: path}


ANY_FILE: dict[str, Damage] = {"flipped bit": flipped_bit, "truncated": truncated, "appended": appended}
LISTED_FILE: dict[str, Damage] = {"wrong checksum": wrong_checksum, "wrong size": wrong_size, "mixed": mixed}
"""Of files that the manifest lists."""
DAMAGES = ANY_FILE | LISTED_FILE


@contextmanager
def damage(kind: str, run_dir: RunDir, generator: random.Random, *, turn: int) -> Iterator[Damaged]:
    """Damage one file; a series of turns goes through all of them."""
    files = files_of(run_dir) if kind in ANY_FILE else files_of(run_dir)[:-1]
    with DAMAGES[kind](run_dir, files[turn % len(files)], generator) as damaged:
        yield damaged


def noticed(run_dir: RunDir, damaged: Damaged) -> None:
    """Ask everybody who may want a step; those that are damaged are refused, naming the file."""
    for step, path in damaged.items():
        with pytest.raises(CheckpointError) as caught:
            verify(run_dir.checkpoint(step), how="full", step=step)
        assert str(path) in str(caught.value) and caught.value.exit_code == 2
        with pytest.raises(CheckpointError) as caught:
            resolve_resume_step(run_dir, step)
        assert str(path) in str(caught.value), "the load path says less than verify"
        assert f"resume_step = {step}" in str(caught.value) and caught.value.exit_code == 2
    intact_step = max(step for step in STEPS if step not in damaged)
    said: list[str] = []
    assert resolve_resume_step(run_dir, "latest", say=said.append) == intact_step
    skipped = {step: path for step, path in damaged.items() if step > intact_step}
    assert len(said) == len(skipped)
    for step, path in skipped.items():
        assert any(f"skipping the checkpoint of step {step}" in line and str(path) in line for line in said)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_at_random_positions_is_noticed(run_dir: RunDir, kind: str) -> None:
    generator = random.Random(f"{SEED} {kind}")
    cases: list[Path] = []
    while len(cases) < POSITIONS[kind]:
        with damage(kind, run_dir, generator, turn=len(cases)) as damaged:
            noticed(run_dir, damaged)
            cases += damaged.values()
    assert len(cases) == POSITIONS[kind]
    if kind in ANY_FILE:
        assert set(cases) == set(files_of(run_dir)), "some file was never damaged: draw more positions"


def test_every_bit_of_the_manifest_and_every_length_of_a_cut_one_count(run_dir: RunDir) -> None:
    content = (run_dir.checkpoint(NEWEST) / MANIFEST_NAME).read_bytes()
    for bit in range(len(content) * 8):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError, match="^the manifest "):
            decode_manifest(bytes(changed), "the manifest")
    for length in range(len(content)):
        with pytest.raises(CheckpointError, match="^the manifest is damaged"):
            decode_manifest(content[:length], "the manifest")


def test_every_file_can_be_missing(run_dir: RunDir) -> None:
    for path in files_of(run_dir):
        aside = run_dir.path / "aside"
        path.rename(aside)
        try:
            noticed(run_dir, {NEWEST: path})
        finally:
            aside.rename(path)


def test_every_file_of_two_steps_can_be_exchanged(run_dir: RunDir) -> None:
    """Files that are equal in both steps do no harm; the others are found in both."""
    differing = 0
    for newer, older in zip(files_of(run_dir), files_of(run_dir, OTHER), strict=True):
        assert newer.name == older.name
        if newer.read_bytes() != older.read_bytes():
            with exchanged(newer, older):
                noticed(run_dir, {NEWEST: newer, OTHER: older})
            differing += 1
    assert differing >= 5, "shard, random state, metadata, progress and manifest"


def test_whole_steps_can_be_exchanged(run_dir: RunDir) -> None:
    newer, older = run_dir.checkpoint(NEWEST), run_dir.checkpoint(OTHER)
    with exchanged(newer, older):
        noticed(run_dir, {NEWEST: newer / MANIFEST_NAME, OTHER: older / MANIFEST_NAME})
        verify(newer)  # each is whole: only the name says which step it should be


@contextmanager
def without_privileges() -> Iterator[None]:
    """Be nobody for a while, if root: root may read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_every_file_can_be_unreadable(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    # Relative paths: nobody may not walk through root's temporary directories, only on from here.
    monkeypatch.chdir(run_dir.checkpoint(NEWEST))
    for path in files_of(run_dir):
        mode, name = path.stat().st_mode, str(path.relative_to(run_dir.checkpoint(NEWEST)))
        path.chmod(0)
        try:
            with without_privileges(), pytest.raises(ReadError) as caught:
                verify(Path())
        finally:
            path.chmod(mode)
        assert str(caught.value) == f"{name} cannot be read: Permission denied"


@pytest.mark.clock
@pytest.mark.parametrize("turn", range(2))
def test_no_damage_in_a_store_is_believed_on_an_empty_machine(
    run_dir: RunDir, settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], turn: int
) -> None:
    """Of each object: the run goes on from the older step, says so, and ends with the bits of an undisturbed one."""
    uploaded, generator = tmp_path / "uploaded", random.Random(f"{SEED} {turn}")
    remote = RemoteCheckpoints(f"file://{uploaded}")
    for step in (OTHER, NEWEST):
        remote.upload(run_dir.checkpoint(step), step)
    remote.write_identity(run_dir)
    undisturbed = checkpoint_state(train("sft", tmp_path / "run", settings, until=NEWEST + 1).checkpoint(NEWEST + 1))
    objects = sorted(path.relative_to(uploaded) for path in uploaded.rglob("*") if path.is_file())
    assert {path.parts[0] for path in objects} == {"run", f"step_{OTHER}", f"step_{NEWEST}"}
    for number, place in enumerate(objects):
        case = tmp_path / str(number)
        store = Path(shutil.copytree(uploaded, case / "store"))
        content = bytearray((store / place).read_bytes())
        content[position(len(content), generator)] ^= 1 << generator.randrange(8)
        (store / place).write_bytes(content[: len(content) * 2 // 3] if turn else content)
        capsys.readouterr()
        ckpt = {"ckpt": {"interval": 1, "dir": f"file://{store}"}}
        here = train("sft", case / "run", settings | ckpt, until=NEWEST + 1, resume="latest")
        said = capsys.readouterr().out
        brought = OTHER if place.parts[0] == f"step_{NEWEST}" else NEWEST
        assert f"copied the checkpoint of step {brought} from" in said, (place, said)
        assert checkpoint_state(here.checkpoint(NEWEST + 1)) == undisturbed, place
        assert here.run_id() == run_dir.run_id(), place
        if brought == OTHER or (place.name == "run.json" and turn):
            assert str(place.parent) in said, (place, said)
