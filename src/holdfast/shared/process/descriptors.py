"""How many files and connections this process may have open, and whether that is enough."""

from __future__ import annotations

import resource

from holdfast.shared.errors import ConfigError

# Logs, the journal, libraries, and what environments open for themselves.
_OTHERS = 128
_OF_A_SERVER = 65_536


def allow_connections(number: int, *, key: str) -> None:
    """Raise the soft limit of open files so far that `number` connections fit beside everything else.

    Args:
        key: dotted key of the setting that decides how many there are, for errors.

    Raises:
        ConfigError: the hard limit does not allow it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _OTHERS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            f"{number} connections at once ({key}) need {wanted} open files, and this process may have {hard} "
            f"(ulimit -Hn). Lower {key} to {max(1, hard - _OTHERS)} or raise the limit."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def allow_many_connections() -> None:
    """Raise the soft limit of open files as far as a server may need it, which does not know how many clients come."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OF_A_SERVER if hard == resource.RLIM_INFINITY else min(hard, _OF_A_SERVER)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
