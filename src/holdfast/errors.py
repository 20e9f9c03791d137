"""The exceptions of the project with their exit codes, and functions that make foreign text fit for a log.

    HoldfastError               anything a user can be told in one message
    ├── ConfigError             a key, type or value that cannot be used           exit 2
    ├── DataError               a dataset, sample or model directory at fault      exit 2
    │   ├── PromptTooLong       the prompt of a task leaves no room for an answer  its group is dropped [1]
    │   ├── TemplateRefusal     a chat template refuses a chat                     exit 2
    │   └── HistoryRewritten    a template rewrites turns, and no branch can begin exit 3, as of the environment
    ├── RunDirError             the output directory is in use or holds a run      exit 2
    ├── CheckpointError         a checkpoint is missing, damaged or does not fit   exit 2
    │   └── StorageError        an object store failed or cannot be reached        exit 2
    ├── ReadError               a file is there and cannot be read: no damage      exit 2, mostly 5
    ├── EnvironmentFailure      an environment raised or broke its contract        exit 3
    │   ├── CallTimeout         a call of an environment took longer than it may   its group is dropped [1]
    │   ├── JudgeFailure        a judge gave no reply that can be read             its group is dropped [1]
    │   └── WorkerCrashed       the process that played a group died of it         its group is dropped [1]
    ├── ProcessKilled           a process that plays was killed from outside       its group is played again
    │   └── GroupKilled         a process that plays a group was killed            the group is played again
    ├── JudgeDenied             a judge knows neither key nor model                exit 3
    ├── InferenceError          the inference server refused, failed or vanished   exit 3
    │   ├── EngineLost          a server was away or failed for longer than it may exit 3
    │   └── WaitedInVain        another process of the run made nothing in time    exit 6
    ├── TrainingError           the numbers went wrong (NaN loss)                  exit 3
    ├── RankLost                another rank of the trainer ended                  exit 1
    ├── NodeLost                another node did not come, or come back, in time   exit 3
    ├── TrackerFailed           a tracker, or the way to it, failed                exit 3 of `track`; a run continues
    ├── RunFailed               a run that Python started ended with an error      as its command
    ├── Stopped                 a signal asked to stop; the step is saved          exit 128 + signal
    ├── SaveError               a checkpoint could not be written                  exit 3
    │   └── GraceOver           not within the time that a stop leaves             exit 3
    └── ProcessDied             a child process ended before its time              exit 1, or the 2, 3 or 5 of the child

    [1]                     with `on_error = "drop"`; else exit 3, and 2 for a prompt
    2                       fix the input; nothing was trained, unless a prompt of a later task is too long
    3                       the run was going
    4 (`NOT_SAVED`)         a signal stopped the run, and its save failed
    5 (`STORAGE_FAILED`)    whatever the class: the run was going and could not write or read its files
    6 (`STUCK`)             a process made no progress; `rl` starts it again
    75                      of the inference server: its engine died; `rl` restarts it

Every message says what failed, the value received, what is allowed and what to do. Text of others (servers,
environments) loses its control characters and its excess length before it goes into a log.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Iterator

MOST_CHARACTERS = 500
_MOST_SHOWN = 80


def text_of(value: object) -> str:
    """Return `str(value)`, or the name of its error: classes of others may raise in it."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return f"(its __str__ raised {type(error).__name__})"


def shown(value: object) -> str:
    """Return `repr(value)` cut, or the name of its error: classes of others may raise in it."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - also of an int of thousands of digits
        text = f"(its __repr__ raised {type(error).__name__})"
    text = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} …"
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: object, *, most: int = MOST_CHARACTERS) -> str:
    r"""Return `text` cut, with everything escaped that a terminal would act on or a file could not hold.

    A line break becomes `\n`: a log has one line for one message, and nobody else writes lines into it. `most`:
    characters that are kept."""
    text = text_of(text)
    kept = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text[:most]
    )
    return kept if len(text) <= most else f"{kept} … ({len(text)} characters)"


_SECRETS = {
    "key", "keys", "apikey", "token", "secret", "secrets", "cookie", "password", "passwd", "credential", "credentials",
    "authorization", "auth", "pwd", "signature", "sig",
}  # fmt: skip
# User and password of a URL, and the values of its query.
_CREDENTIALS = re.compile(r"//[^/\s\"']*@")
_IN_QUERY = re.compile(r"([?&]([^?&=\s\"']+)=)[^&#\s\"']+")


def is_secret(name: str) -> bool:
    """Whether the last word of a name means a secret: `api_key` and `HF_TOKEN`, not `admin_token_env` (a variable)."""
    return re.split(r"[._\-]", name.lower())[-1] in _SECRETS


def masked(text: str) -> str:
    """Return `text` with `***` for the user and password of a URL, and for values of a query with the name of a
    secret."""
    text = _CREDENTIALS.sub("//***@", text)
    return _IN_QUERY.sub(lambda found: f"{found[1]}***" if is_secret(found[2]) else found[0], text)


NOT_SAVED = 4
STORAGE_FAILED = 5
STUCK = 6
MOST_KILLED = 20
"""Times in a row that the processes which play for an environment may be killed from outside."""
GO_ON_OR_BEGIN_AGAIN = "continue with --ckpt.resume-step latest, or start again with --clean if there is no checkpoint"
"""Advice of a process that does not know what was saved."""
# Words of other programs.
_ELSEWHERE = {"info": "show", "rm": "prune", "--n": "--limit", "--head": "--limit", "--output": "--to"}
_STORAGE_ERRNOS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS),
    *(errno.ESTALE, errno.EREMOTEIO),  # of network filesystems
}
# Network filesystems and FUSE give these as well, and a process that has too many files open; so do sockets.
_SHARED_ERRNOS = {*(errno.EMFILE, errno.ENFILE), *(errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN)}
_NETWORK_LIBRARIES = {"aiohttp", "botocore", "httpcore", "httpx", "huggingface_hub", "requests", "urllib3"}
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")


class HoldfastError(Exception):
    """Base class of all errors that holdfast shows as one message, without a traceback. `exit_code`: if this error has
    another one than its class."""

    exit_code = 3

    def __init__(self, *message: object, exit_code: int | None = None) -> None:
        super().__init__(*message)
        if exit_code is not None:
            self.exit_code = exit_code


class ConfigError(HoldfastError):
    """A configuration key, type or value cannot be used."""

    exit_code = 2


class DataError(HoldfastError):
    """A dataset, a sample or a model directory cannot be used."""

    exit_code = 2


class RunDirError(HoldfastError):
    """The output directory is in use or already holds a run."""

    exit_code = 2


class CheckpointError(HoldfastError):
    """A checkpoint is missing, damaged or does not fit this run."""

    exit_code = 2


class ProcessKilled(HoldfastError):
    """Something outside the run killed a process of an environment, so the answer is not at fault.

    An environment may raise it for its own process. The group is then played again, without sampling again."""


class StorageError(CheckpointError):
    """An object store failed: unreachable, refused, full. `may_pass`: whether the same call may succeed later, when
    nobody has changed anything here."""

    may_pass = False


class ReadError(HoldfastError):
    """A file exists and could not be read; it may be whole."""

    exit_code = 2

    @classmethod
    def of(cls, path: object, error: OSError) -> ReadError:
        """Return what to raise `from` the `error` of reading `path`."""
        return cls(f"{path} cannot be read: {error.strerror or error}")


class EnvironmentFailure(HoldfastError):
    """An environment raised or broke its contract."""


class InferenceError(HoldfastError):
    """The inference server refused a request, failed or went away."""


class TrainingError(HoldfastError):
    """Training cannot continue: the numbers went wrong."""


class WaitedInVain(InferenceError):
    """Another process of the run made nothing in time, and was not being restarted."""

    exit_code = STUCK


class SaveError(HoldfastError):
    """A checkpoint could not be written. Checkpoints committed earlier are whole."""


class RankLost(HoldfastError):
    """Another rank of the trainer ended or cannot be reached."""

    exit_code = 1


class NodeLost(HoldfastError):
    """Another node of the run did not join, or join again, in time."""


class Stopped(HoldfastError):
    """A signal asked the run to stop, and its current step is saved."""


class ProcessDied(HoldfastError):
    """One of the processes of a run ended before its time."""


def is_storage_failure(error: BaseException | None) -> bool:
    """Whether a storage that is full, broken, read-only or away is at fault, or caused the error at fault. A network
    that failed a server or an environment is not a failure of the storage."""
    numbers = _STORAGE_ERRNOS | _SHARED_ERRNOS
    for one in causes(error):
        if isinstance(one, InferenceError | EnvironmentFailure) or _library_of(one) in _NETWORK_LIBRARIES:
            numbers = _STORAGE_ERRNOS
        if isinstance(one, OSError):
            number = one.errno
        else:  # safetensors and tokenizers put the number into the message
            match = _RUST_ERRNO.search(text_of(one))
            number = int(match[1]) if match else None
        if number in numbers or (isinstance(one, HoldfastError) and one.exit_code == STORAGE_FAILED):
            return True
    return False


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its chain of causes; tolerates loops (`raise error from error`)."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _library_of(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the allowed word that means the same or is most like `word`, or an empty
    string."""
    known = list(allowed)
    match = [_ELSEWHERE[word]] if _ELSEWHERE.get(word) in known else difflib.get_close_matches(word, known, 1, 0.6)
    return f" Did you mean '{match[0]}'?" if match else ""
