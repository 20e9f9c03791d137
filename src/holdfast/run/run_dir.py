"""The run directory: every path of a run (docs/files.md lists them), and which process may touch it."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import RunDirError
from holdfast.protocol.inference import Owner
from holdfast.protocol.transfer import OFFER_NAME
from holdfast.run import atomic, checked, lock
from holdfast.run.checkpoints import REFERENCE_NAME, Entry, list_entries
from holdfast.run.manifest import is_committed, read_manifest

JUDGEMENTS_NAME = "judgements.log"
INPUTS_NAME = "inputs.json"
EARLY_END_NAME = "early_end.json"
DISCARDED = "discarded"
SUMMARY_NAME = "summary.json"
"""The last file of an evaluation."""
STEP_NAME = re.compile(r"step_(\d+)$")
_OF_STEP = re.compile(r"((ema_)?step_\d+|generations_\d+\.log)$")
_ATTEMPT = re.compile(r"attempt_(\d+)$")


def number_of(path: Path) -> int:
    """Return the step in the name of a step directory or a generation log."""
    return int(path.stem.rsplit("_", 1)[1])


def older_versions(step: int, async_level: int) -> range:
    """Return the versions before the version of `step` that sample batches after it: batch N is sampled by version
    max(0, N - 1 - async_level)."""
    return range(max(0, step - async_level), step)


def numbered_paths(parent: Path) -> list[Path]:
    """Return every step directory and generation log in `parent`, in the order of steps."""
    if not parent.is_dir():
        return []
    return sorted((path for path in parent.iterdir() if _OF_STEP.match(path.name)), key=number_of)


def profile_name(first: int, last: int) -> str:
    """Return the name, among the logs of an attempt, of the profile of the steps `first` to `last`."""
    return f"profile_steps_{first}_to_{last}"


# In the order of their removal: without checkpoints and batches nothing looks like a run that can be resumed.
OF_RUN = (
    "checkpoints",
    "rollouts",
    "weights",
    "evaluations",
    "metrics.jsonl",
    "tensorboard",
    "tracking",
    REFERENCE_NAME,
    JUDGEMENTS_NAME,
    INPUTS_NAME,
    EARLY_END_NAME,
    "configs",
    "logs",
    "beats",
    DISCARDED,
    "run.json",
)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        atomic.remove_directory(path)
    else:
        path.unlink(missing_ok=True)


def _reason(error: OSError) -> str:
    if isinstance(error, FileExistsError):
        return "it is a file"
    if isinstance(error, NotADirectoryError):
        return "it lies below a file"
    return error.strerror or str(error)


def _numbered(parent: Path, pattern: re.Pattern[str]) -> list[int]:
    if not parent.is_dir():
        return []
    matches = (pattern.match(path.name) for path in parent.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


class RunDir:
    """Paths of one run. Creating the object touches nothing on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.checkpoints = self.path / "checkpoints"
        self.rollouts = self.path / "rollouts"
        self.weights = self.path / "weights"
        self.evaluations = self.path / "evaluations"
        self.metrics = self.path / "metrics.jsonl"
        self.judgements = self.path / JUDGEMENTS_NAME
        self.tracking = self.path / "tracking"
        self._removal = self.path / "removal.mark"

    def checkpoint(self, step: int) -> Path:
        """Directory of the checkpoint after `step`."""
        return self.checkpoints / f"step_{step}"

    def batch(self, step: int) -> Path:
        """Directory of the batch that `step` trains on."""
        return self.rollouts / f"step_{step}"

    def generations(self, step: int) -> Path:
        """Log of the finished generations of the batch of `step`, while it is being made."""
        return self.rollouts / f"generations_{step}.log"

    def weights_of(self, version: int) -> Path:
        """Directory of the published weights of policy `version`."""
        return self.weights / f"step_{version}"

    @property
    def offer(self) -> Path:
        """The offer of the trainer that lives, if it sends weights by itself; see `holdfast.protocol.transfer`."""
        return self.weights / OFFER_NAME

    def evaluation(self, version: int) -> Path:
        """Directory of the evaluation of policy `version`."""
        return self.evaluations / f"step_{version}"

    def is_evaluated(self, version: int) -> bool:
        """Whether the evaluation of policy `version` has come to its end."""
        return (self.evaluation(version) / SUMMARY_NAME).exists()

    @property
    def given_up(self) -> Path:
        """Exists while the attempt continues without evaluations: nobody waits for a checkpoint."""
        return self.evaluations / "given_up"

    def give_up_evaluations(self) -> None:
        """Have nobody wait for evaluations, until the next attempt. Raise OSError if the storage does not take it."""
        self.evaluations.mkdir(exist_ok=True)
        self.given_up.touch()

    def early_end(self) -> int | None:
        """The step at which the run ends before its last step, once that is decided, or None. Raise RunDirError if
        `early_end.json` is damaged."""
        path = self.path / EARLY_END_NAME
        try:
            return int(checked.decode(path.read_bytes())["step"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise RunDirError(f"{path} is damaged ({error}): remove the file, and the run decides again") from None

    def ended_by(self) -> str:
        """The section of the settings that ended the run early, `stop` or `hooks`; empty if none did."""
        if self.early_end() is None:
            return ""
        return checked.decode((self.path / EARLY_END_NAME).read_bytes()).get("by", "stop")

    def has_ended_early(self, *, saves: bool) -> bool:
        """Whether the trainer has come to the early end of the run. `saves`: whether it saves that step."""
        step = self.early_end()
        return step is not None and is_committed(self.checkpoint(step) if saves else self.weights_of(step))

    def note_early_end(self, step: int | None, *, by: str = "stop") -> None:
        """Note at which step the run ends early, and by which section of the settings; None: at its last step."""
        if step is None:
            (self.path / EARLY_END_NAME).unlink(missing_ok=True)
        else:
            atomic.write_file(self.path / EARLY_END_NAME, checked.encode({"step": step, "by": by}))

    def configs(self, attempt: int) -> Path:
        """Directory of the resolved configuration of one attempt."""
        return self.path / "configs" / f"attempt_{attempt}"

    def logs(self, attempt: int) -> Path:
        """Directory of the logs of one attempt."""
        return self.path / "logs" / f"attempt_{attempt}"

    def newest_logs(self) -> Path:
        """Directory of the logs of the newest attempt; before any, of the first."""
        return self.logs(max(1, self.next_attempt() - 1))

    def profiles(self) -> list[Path]:
        """The directories of the profiles of the newest attempt that has any, each with a trace of each rank. Raise
        OSError if a directory cannot be read."""
        found = self.logged("profile_steps_*/rank_*.json.gz")
        return sorted({path.parent for attempt, path in found if attempt == found[-1][0]})

    def logged(self, pattern: str) -> list[tuple[int, Path]]:
        """The logs that match `pattern`, with the numbers of their attempts, ascending. Raise OSError if a directory
        cannot be read."""
        found: list[tuple[int, Path]] = []
        for attempt in _numbered(self.path / "logs", _ATTEMPT):
            with contextlib.suppress(FileNotFoundError):  # a resume has just removed an old attempt
                found += [(attempt, path) for path in sorted(self.logs(attempt).glob(pattern))]
        return found

    def discarded(self, attempt: int) -> Path:
        """The directory of files that attempt `attempt` set aside."""
        return self.path / DISCARDED / f"attempt_{attempt}"

    def discarded_elsewhere(self, path: Path, attempt: int) -> Path:
        """The place of `path` that attempt `attempt` set aside, if its parent is a link to another filesystem."""
        return path.parent / DISCARDED / f"attempt_{attempt}" / path.name

    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return (self.path / "run.json").exists()

    def has_work(self) -> bool:
        """Whether the directory holds a trained step, a checkpoint, weights, or anything that was generated. Raise
        OSError if a file cannot be read."""
        has_metrics = self.metrics.exists() and self.metrics.stat().st_size > 0
        return has_metrics or any(
            numbered_paths(parent) for parent in (self.checkpoints, self.rollouts, self.weights, self.evaluations)
        )

    def run_id(self) -> str:
        """The id of the run that this directory holds."""
        return self.identity()["run_id"]

    def identity(self) -> dict[str, Any]:
        """Return what `run.json` says. Raise RunDirError if it is damaged; OSError if it cannot be read."""
        path = self.path / "run.json"
        try:
            identity = checked.decode(path.read_bytes())
            if not isinstance(identity["run_id"], str):
                raise ValueError("its run_id is not text")
        except (ValueError, KeyError, TypeError) as error:
            raise RunDirError(
                f"{path} is damaged: {error!r}. Bring it back from a copy, or write "
                '{"run_id": "ID", "created_unix_s": SECONDS} into it: the manifest.json of its checkpoints names the '
                "same run_id. The seconds are those of the first start, whose date chat templates may write."
            ) from None
        return identity

    def run_ids(self) -> set[str] | None:
        """The runs whose checkpoints belong here: this run, the run that it was forked from, and training loops of the
        user, which have no id. None if run.json is missing or damaged. Raise OSError if it cannot be read."""
        try:
            identity = self.identity()
        except (RunDirError, FileNotFoundError, NotADirectoryError):
            return None
        return {"", *ids_of(identity)}

    def created_unix_s(self) -> int | None:
        """When the run, or the run that it forks, was first started; None if unknown."""
        try:
            return self.identity().get("created_unix_s")
        except FileNotFoundError:
            return None

    def forked_from(self) -> str | None:
        """The checkpoint of another run that this run started from, or None."""
        try:
            return self.identity().get("forked_from", {}).get("path")
        except FileNotFoundError:
            return None

    def origin(self) -> str | None:
        """The run and the step that this one was forked from, `<run id>:<step>`, or None."""
        identity = self.identity()
        fork = identity.get("forked_from")
        copied = next(reversed(identity.get("copied_from", [])), None)
        return copied or (f"{fork['run_id']}:{fork['step']}" if fork else None)

    def rewinds(self) -> list[int]:
        """The steps from which the run was deliberately trained again, discarding the later ones."""
        return self.identity().get("rewinds", [])

    def note_rewind(self, step: int, *, by_attempt: int) -> None:
        """Note that attempt `by_attempt` trains again from `step`. Called before anything moves; a repeated start after
        a failure has the same attempt number."""
        path = self.path / "run.json"
        identity = self.identity()
        earlier = identity.get("rewinds", [])
        if identity.get("rewound_by_attempt") == by_attempt:
            earlier = earlier[:-1]
        identity |= {"rewinds": [*earlier, step], "rewound_by_attempt": by_attempt}
        atomic.write_file(path, checked.encode(identity))

    def is_copy(self) -> bool:
        """Whether the run is copied here: its original directory still holds the run, and is not this directory."""
        identity = self.identity()
        host, _, place = identity.get("directory", "").partition(":")
        original = RunDir(Path(place))
        if host != socket.gethostname() or original.path == self.path or not original.holds_run():
            return False
        return not original.path.samefile(self.path) and original.run_id() == identity["run_id"]

    def note_place(self) -> str | None:
        """Note where the run is. A copy becomes a run of its own, which has the checkpoints, too; return its origin."""
        identity, place, is_copy = self.identity(), directory_name(self), self.is_copy()
        before = identity.get("directory")
        if is_copy:
            copied = [*identity.get("copied_from", []), identity["run_id"]]
            identity |= {"run_id": uuid.uuid4().hex, "copied_from": copied}
        if before != place:
            atomic.write_file(self.path / "run.json", checked.encode(identity | {"directory": place}))
        return before if is_copy else None

    def entries(self) -> list[Entry]:
        """Steps with a checkpoint, ascending, whole or not; unfinished saves are left out."""
        return [entry for entry in list_entries(self.checkpoints, self.run_ids()) if entry.status != "torn"]

    def committed_steps(self) -> list[int]:
        """Steps with a committed checkpoint, ascending. Raise ReadError if a manifest cannot be read."""
        entries = self.entries()
        for entry in entries:
            if entry.status == "unreadable":
                read_manifest(entry.path)  # raises, or it can be read by now
        return [entry.step for entry in entries if entry.status in ("committed", "unreadable")]

    def steps_there(self) -> list[int]:
        """Steps with a checkpoint of this run, except damaged ones, ascending; steps that cannot be read now count."""
        return [entry.step for entry in self.entries() if entry.status not in ("damaged", "foreign")]

    def published_batches(self) -> list[int]:
        """Steps whose batch is published, ascending."""
        return _numbered(self.rollouts, STEP_NAME)

    def published_weights(self) -> list[int]:
        """Policy versions whose weights are published, ascending."""
        return _numbered(self.weights, STEP_NAME)

    def next_attempt(self) -> int:
        """The number of the attempt that starts now, from 1."""
        return max(_numbered(self.path / "configs", _ATTEMPT), default=0) + 1

    def noted_inputs(self) -> Path | None:
        """The file in which the newest attempt noted its inputs; before the first, the file of another machine. Nothing
        where none has noted any."""
        attempts = reversed(_numbered(self.path / "configs", _ATTEMPT))
        places = [*(self.configs(attempt) for attempt in attempts), self.path]
        return next((path for place in places if (path := place / INPUTS_NAME).exists()), None)

    def lock(self, *, instead: str = ", or choose another directory with --output-dir") -> None:
        """Take the directory for this process; the kernel frees it when the process ends. Raise RunDirError if another
        process holds it, or it cannot be written. `instead`: what the command of the user offers, for the error."""
        holder = self._take("run.lock")
        if holder is not None:
            raise RunDirError(f"{self.path} is in use by another run ({holder}). Wait for it, stop it{instead}.")

    def lock_orchestrator(self, *, over_exec: bool = False) -> None:
        """Take the orchestrator lock for this process and its children. `over_exec`: this process becomes the
        orchestrator. Raise RunDirError if another process holds it."""
        holder = self._take("orchestrator.lock", over_exec=over_exec)
        if holder is not None:
            raise RunDirError(
                f"{self.path} has an orchestrator already ({holder}): an `rl`, or one that was started by hand. Two "
                "would write each batch over the other's: stop it, or choose another directory with --output-dir."
            )

    def _take(self, name: str, *, over_exec: bool = False) -> lock.Holder | None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return lock.take(self.path / name, over_exec=over_exec)
        except OSError as error:
            raise RunDirError(
                f"{self.path} cannot be a run directory: {_reason(error)}. Choose another with --output-dir."
            ) from None

    def has_orchestrator(self) -> bool:
        """Whether an orchestrator lives here."""
        return lock.is_held(self.path / "orchestrator.lock")

    def is_own(self) -> bool:
        """Whether this process holds the directory."""
        return lock.is_own(self.path / "run.lock")

    def is_under_way(self) -> bool:
        """Whether a launcher that lives holds the directory."""
        return lock.is_held(self.path / "run.lock")

    def require_writable(self) -> None:
        """Refuse a directory that cannot be written now, rather than at the first save. Raise RunDirError with the
        directory and the reason."""
        for directory in (self.path, self.checkpoints, self.rollouts, self.weights):
            if not directory.exists():
                continue
            probe = atomic.temporary_sibling(directory / "probe")
            try:
                probe.touch()
                probe.unlink(missing_ok=True)  # a start beside this one may clear it away
            except OSError as error:
                if not directory.exists():  # a start of another node removes the run that was there
                    continue
                raise RunDirError(
                    f"{directory} cannot be written: {error.strerror}. Mend that, or choose another directory with "
                    "--output-dir."
                ) from error

    def create(
        self,
        *,
        forked_from: dict[str, str | int] | None = None,
        created_unix_s: int | None = None,
        run_id: str | None = None,
    ) -> None:
        """Mark the directory as holding a run; a directory of a run keeps its id.

        Args:
            forked_from: `run_id`, `step` and `path` of the checkpoint of another run that it begins with.
            created_unix_s: when that run was first started: its prompts may have that date.
            run_id: the run of the checkpoint that is there, if the directory has lost its id.
        """
        path = self.path / "run.json"
        identity = self.identity() if path.exists() else {}
        # The file that is there wins: checkpoints and servers know the run by its first id.
        identity = {"run_id": run_id or uuid.uuid4().hex, "created_unix_s": int(time.time())} | identity
        identity["directory"] = directory_name(self)
        identity.pop("forked_from", None)  # of a fork that was killed before it was copied
        if forked_from is not None:
            identity["forked_from"] = forked_from
        if created_unix_s is not None:
            identity["created_unix_s"] = created_unix_s
        atomic.write_file(path, checked.encode(identity))

    def is_being_removed(self) -> bool:
        """Whether a removal of the run was interrupted here."""
        return self._removal.exists()

    def remove_run(self) -> None:
        """Remove everything that a run made here; other files stay. A mark is written first. While it exists, every
        start removes the rest first. Raise OSError if the storage fails."""
        atomic.write_file(self._removal, b"")
        for name in OF_RUN:
            path = self.path / name
            try:
                is_disk = path.is_symlink() and path.is_dir()  # a user made the link, not the run
                if not is_disk:
                    _remove(path)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                is_disk = True  # it is a mount, which cannot be renamed
            for child in list(path.iterdir()) if is_disk else ():
                _remove(child)
        atomic.clear_leftovers(self.path)  # of a removal that was interrupted before
        atomic.fsync_directory(self.path)
        self._removal.unlink()
        atomic.fsync_directory(self.path)

    def remove_weights_after(self, step: int) -> None:
        """Remove the published weights of versions after `step`."""
        for version in self.published_weights():
            if version > step:
                # By rename: an engine must find the whole directory or nothing.
                atomic.remove_directory(self.weights_of(version))

    def remove_old_attempts(self, last: int) -> None:
        """Remove logs, settings and what was set aside of the attempts up to `last`."""
        set_aside_in = (self.path, self.checkpoints, self.rollouts, self.weights, self.evaluations)
        for parent in (self.path / "logs", self.path / "configs", *(parent / DISCARDED for parent in set_aside_in)):
            atomic.clear_leftovers(parent)
            for number in _numbered(parent, _ATTEMPT):
                if number <= last:
                    atomic.remove_directory(parent / f"attempt_{number}")

    def set_aside_directories(self) -> list[Path]:
        """Directories of files that attempts have set aside."""
        parents = (self.path, self.checkpoints, self.rollouts, self.weights, self.evaluations)
        return [path for parent in parents if (path := parent / DISCARDED).is_dir()]

    def remove(self, *directories: Path) -> None:
        """Remove directories of this run, such as steps; each is removed whole or is still there."""
        for directory in directories:
            atomic.remove_directory(directory)

    def prune_batches(self, step: int) -> None:
        """Remove the batches up to and including `step`, which no checkpoint needs any more."""
        for old in self.published_batches():
            if old <= step:
                atomic.remove_directory(self.batch(old))

    def clear_leftovers(self, *, of_batches: bool = True) -> list[Path]:
        """Remove the temporary names that interrupted writers left, and return what was removed. `of_batches`: also
        where batches are made; False: their writer lives."""
        parents = [self.path, self.checkpoints, self.weights, self.evaluations]
        parents += [self.rollouts] if of_batches else []
        parents += [self.logs(attempt) for attempt in _numbered(self.path / "logs", _ATTEMPT)]
        parents += [self.configs(attempt) for attempt in _numbered(self.path / "configs", _ATTEMPT)]
        return [path for parent in parents for path in atomic.clear_leftovers(parent)]


def ids_of(identity: Mapping[str, Any]) -> set[str]:
    """Return the runs whose checkpoints belong to the run of `run.json`: also its parent, and what was copied."""
    found = {identity.get("run_id"), identity.get("forked_from", {}).get("run_id"), *identity.get("copied_from", [])}
    return {run_id for run_id in found if run_id}


def owner_of(run_dir: RunDir) -> Owner:
    """Return the run in `run_dir` as the owner of servers."""
    return Owner(run_dir.run_id(), directory_name(run_dir))


def directory_name(run_dir: RunDir) -> str:
    """Return what people, and other machines, call the directory of a run."""
    return f"{socket.gethostname()}:{run_dir.path}"
