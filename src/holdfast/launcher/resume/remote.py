"""Resume from an object store: fetches checkpoints, and sets superseded ones aside there."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Literal

from holdfast.errors import CheckpointError, RunDirError, StorageError
from holdfast.launcher.resume.resume_step import set_aside
from holdfast.remote.checkpoints import RemoteCheckpoints
from holdfast.run import atomic, checked, manifest
from holdfast.run.checkpoints import newest_intact
from holdfast.run.manifest import Verification
from holdfast.run.run_dir import RunDir, ids_of, older_versions


def fetch(
    url: str,
    run_dir: RunDir,
    wanted: int | Literal["latest", "auto"] | None,
    *,
    how: Verification = "full",
    older_weights: int = 0,
    say: Callable[[str], None] = print,
) -> int | None:
    """Bring the checkpoint that a resume wants onto this machine; return its step, None if nothing was needed. Raise
    ConfigError if the URL cannot be used, or its driver is not installed. Raise RunDirError if `url` holds another run,
    or this machine cannot store the checkpoint. Raise CheckpointError if the step is nowhere, or damaged. Raise
    StorageError if the store cannot be used. Raise ReadError if a checkpoint here cannot be read; nothing replaces it.

    Called before the step to resume from is resolved. An empty directory becomes the directory of the run at `url`.

    Args:
        wanted: `ckpt.resume_step`. `latest` and `auto` take the newest intact remote step that is newer than
            the newest intact one here; a number is taken if this machine does not have it intact.
        how: how checkpoints here are checked. A download is checked fully.
        older_weights: for RL runs, how many versions before the step's version make the next batches.
        say: gets what is copied, and which steps were skipped and why.
    """
    remote = RemoteCheckpoints(url)
    steps = remote.steps()
    _refuse_another_run(remote, steps, run_dir, wanted)
    if wanted is None:
        return None

    def bring(step: int) -> None:
        started, place = time.monotonic(), run_dir.checkpoint(step)
        run_dir.clear_leftovers(of_batches=False)  # of a download that was killed: there may be no room for two

        def bring_rest(listing: manifest.Manifest) -> None:
            # The checkpoint comes last: a start after a kill takes it for all.
            _adopt(remote, run_dir, listing.run_id, say)
            _fetch_weights(remote, run_dir, older_versions(step, older_weights), say)
            if place.exists():  # damaged: parts of it may be needed
                set_aside(run_dir, place, run_dir.next_attempt())

        remote.download(step, place, before=bring_rest)
        say(f"copied the checkpoint of step {step} from {remote.url} in {time.monotonic() - started:.1f} s")

    if wanted in ("latest", "auto", -1):
        if not run_dir.holds_run():
            _refuse_newer_of_another_run(remote, steps)
        return _fetch_newest(remote, steps, run_dir, how, bring, say)
    return _fetch_one(remote, steps, run_dir, int(wanted), how, bring)


def set_aside_remote_after(url: str, step: int, run_dir: RunDir) -> None:
    """Set the remote steps after `step` aside, and print it: the run makes them again."""
    remote = RemoteCheckpoints(url)
    if later := remote.set_aside_after(step):
        if run_dir.holds_run():
            remote.write_identity(run_dir)
        steps = ", ".join(f"step_{number}" for number in later)
        print(f"moved aside at {url}, because it is later than step {step}: {steps}")


def _refuse_another_run(remote: RemoteCheckpoints, steps: list[int], run_dir: RunDir, wanted: int | str | None) -> None:
    there = f"{remote.url} holds the checkpoints of steps {', '.join(map(str, steps))}"
    choose = "Choose another place with --ckpt.dir"
    if steps and wanted is None:
        raise RunDirError(f"{there} of an earlier run. {choose}, or continue from them with --ckpt.resume-step latest.")
    if run_dir.holds_run():
        own, ours = f"run {run_dir.run_id()}", run_dir.run_ids() or ()
    else:  # it may hold a step that was imported or copied there
        own, ours = "a checkpoint of another run", {one.manifest.run_id for one in run_dir.entries() if one.manifest}
        if not ours:
            return
    for _, run_id in _run_ids(remote, steps):
        if run_id not in ours:
            raise RunDirError(f"{there} of run {run_id}, {run_dir.path} holds {own}. {choose}.")
        return


def _run_ids(remote: RemoteCheckpoints, steps: list[int]) -> Iterator[tuple[int, str]]:
    """Yield the steps at the store whose manifests are whole, the newest first, with the ids of their runs."""
    for step in reversed(steps):
        try:
            yield step, remote.read_manifest(step).run_id
        except StorageError:
            raise
        except CheckpointError:
            continue


def _refuse_newer_of_another_run(remote: RemoteCheckpoints, steps: list[int]) -> None:
    """Refuse a step of another run after steps of the run whose identity is at the store."""
    try:
        identity = checked.decode(remote.read_identity()["run.json"])
    except (KeyError, ValueError):
        return
    ours, newer = ids_of(identity), ""
    for step, run_id in _run_ids(remote, steps):
        if run_id in ours:
            break
        newer = newer or f"{remote.url}/step_{step} is a checkpoint of another run ({run_id})"
    else:
        return
    if newer:
        raise RunDirError(
            f"{newer}, after steps of run {run_id}. Move it away, or name a step: --ckpt.resume-step {step}."
        )


def _is_intact(run_dir: RunDir, step: int, how: Verification) -> bool:
    try:
        manifest.verify(run_dir.checkpoint(step), how=how, step=step)
    except CheckpointError:
        return False
    return True


def _fetch_one(
    remote: RemoteCheckpoints,
    steps: list[int],
    run_dir: RunDir,
    wanted: int,
    how: Verification,
    bring: Callable[[int], None],
) -> int | None:
    here = run_dir.steps_there()
    if wanted in steps:
        if _is_intact(run_dir, wanted, how):
            return None
    elif run_dir.checkpoint(wanted).exists():
        return None  # `resolve_resume_step` checks it
    else:
        raise CheckpointError(
            f"ckpt.resume_step = {wanted} is neither in {run_dir.checkpoints} (committed steps: {_listed(here)}) "
            f"nor at {remote.url} (committed steps: {_listed(steps)})."
        )
    try:
        bring(wanted)
    except StorageError:
        raise
    except CheckpointError as error:
        raise CheckpointError(
            f"ckpt.resume_step = {wanted}: {error}. Choose another step; {remote.url} has {_listed(steps)}."
        ) from None
    return wanted


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _fetch_newest(
    remote: RemoteCheckpoints,
    steps: list[int],
    run_dir: RunDir,
    how: Verification,
    bring: Callable[[int], None],
    say: Callable[[str], None],
) -> int | None:
    here = next((step for step in reversed(run_dir.steps_there()) if _is_intact(run_dir, step, how)), None)
    newest, damaged = newest_intact(
        [step for step in steps if here is None or step > here],
        bring,
        say=lambda text: say(f"WARNING: {text}"),
        what="remote checkpoint",
        passing=(StorageError,),
    )
    if newest is None and damaged and here is None:
        raise CheckpointError(f"every checkpoint at {remote.url} is damaged: {'; '.join(damaged)}")
    return newest


def _adopt(remote: RemoteCheckpoints, run_dir: RunDir, run_id: str, say: Callable[[str], None]) -> None:
    """Give an empty directory the identity of the run of the checkpoint."""
    if run_dir.holds_run():
        return
    files = remote.read_identity()
    identity: dict[str, Any]
    try:
        identity = checked.decode(files["run.json"]) if files else {}
    except ValueError:
        identity = {"run_id": "a damaged file"} if run_id else {}
    theirs = identity.get("run_id")
    if not (run_id or theirs):
        return
    # A fork holds a step of its first run, and an imported step has no run.
    if run_id and run_id not in ids_of(identity):
        if theirs is not None:
            say(f"WARNING: {remote.url}/run is left out: it is of {theirs}, the checkpoint is of run {run_id}")
        identity, files = {"run_id": run_id, "created_unix_s": int(time.time())}, {}
    identity.pop("rewound_by_attempt", None)  # attempts count from 1 here
    identity.pop("directory", None)
    files["run.json"] = checked.encode(identity)
    # run.json last: it makes this the directory of a run.
    for name in sorted(files, key="run.json".__eq__):
        path = run_dir.path / name
        if name.startswith("tracking/"):
            with suppress(ValueError):  # damaged: the tracker says so
                files[name] = checked.encode(checked.decode(files[name]) | {"alerted": {}})
        atomic.make_directory(path.parent)
        atomic.write_file(path, files[name])


def _fetch_weights(remote: RemoteCheckpoints, run_dir: RunDir, versions: range, say: Callable[[str], None]) -> None:
    for version in versions:
        if run_dir.weights_of(version).exists():
            continue
        try:
            if remote.download_weights(version, run_dir.weights_of(version)):
                say(f"copied the weights of version {version} from {remote.url}")
        except StorageError:
            raise
        except CheckpointError as error:
            say(f"WARNING: continuing without the weights of version {version}: {error}")
