"""Text of others, servers and environments, made fit for a log: no control characters, and not too long."""

from __future__ import annotations

MOST_CHARACTERS = 500


def printable(text: object) -> str:
    r"""Return `text` cut, with everything escaped that a terminal would act on or a file could not hold.

    A line break becomes `\n`: a log has one line for one message, and nobody else writes lines into it.
    """
    text = str(text)
    kept = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text[:MOST_CHARACTERS]
    )
    return kept if len(text) <= MOST_CHARACTERS else f"{kept} … ({len(text)} characters)"
