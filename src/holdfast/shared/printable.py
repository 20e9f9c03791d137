"""Text of others, servers and environments, made fit for a log: no control characters, and not too long."""

from __future__ import annotations

MOST_CHARACTERS = 500
_MOST_SHOWN = 80


def text_of(value: object) -> str:
    """Return `str(value)`, or that there is none: classes of others may raise in it."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return f"(its __str__ raised {type(error).__name__})"


def shown(value: object) -> str:
    """Return `repr(value)` cut, or that there is none: classes of others may raise in it."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - also of an int of thousands of digits
        text = f"(its __repr__ raised {type(error).__name__})"
    text = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} …"
    return text.encode("utf-8", "backslashreplace").decode()


def printable(text: object, *, most: int = MOST_CHARACTERS) -> str:
    r"""Return `text` cut, with everything escaped that a terminal would act on or a file could not hold.

    A line break becomes `\n`: a log has one line for one message, and nobody else writes lines into it.

    Args:
        most: characters that are kept.
    """
    text = text_of(text)
    kept = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text[:most]
    )
    return kept if len(text) <= most else f"{kept} … ({len(text)} characters)"
