"""Compares the tokens of the tokenizer that transformers loads with the tokens of the model's own tokenizer.json.

Transformers builds some tokenizers again by the class that tokenizer_config.json names (such as LlamaTokenizer),
whatever tokenizer.json says of normalizing and splitting text. If the class does not fit the file, white space or other
text is lost, or words and numbers become tokens that the model was not pretrained on.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.chat.tokenizer import Tokenizer, tokenizer_files
from holdfast.errors import DataError, printable

PROBES = (
    "The dog's 12345 apples",
    "two  blanks\n\n\tand   lines\r\nend \n",
    "naïve cafe\u0301 東京 😀 ﬁ мир",
    "DON'T I'll WE'RE x=1.5; 1,000,000",
    "def f(x):\n    if x >= 10:\n\t\treturn x['a'] + 1  # é\n",
)
_BEFORE = ("  two blanks", "\n line")  # which some tokenizers change at the beginning of a text
_MOST_CHARACTERS, _MOST_TEXTS, _MOST_SPECIAL, _MOST_SHOWN = 2000, 100, 40, 60
_FILE_AS_IS = "PreTrainedTokenizerFast"


def differences(loaded: Tokenizer, original: Tokenizer, texts: Iterable[str] = ()) -> Iterator[str]:
    """Yield texts, such as `PROBES`, that the two encode or decode differently."""
    both = re.compile("|".join(map(re.escape, {*loaded.added_tokens, *original.added_tokens} - {""})) or "(?!)")
    # Around added tokens other tokenizers may differ, see `differences_at_borders`.
    pieces = (piece.lstrip()[:_MOST_CHARACTERS] for text in (*PROBES, *texts) for piece in both.split(text))
    for text in (*pieces, *sorted(original.added_tokens)):
        yield from _difference(loaded, original, text)


def differences_at_borders(loaded: Tokenizer, original: Tokenizer, special: Iterable[str]) -> Iterator[str]:
    """Yield texts that begin with white space, or that have a `special` token, and that the two encode differently."""
    for text in (*_BEFORE, *(f"A{token} b" for token in sorted(filter(str.strip, special))[:_MOST_SPECIAL])):
        yield from _difference(loaded, original, text)
    if loaded.text_prompt("a") != original.text_prompt("a"):
        yield "it puts other tokens before a text"


def _difference(loaded: Tokenizer, original: Tokenizer, text: str) -> Iterator[str]:
    theirs, ours = loaded.encode(text), original.encode(text)
    back, expected = loaded.decode(theirs, skip_special_tokens=False), original.decode(ours, skip_special_tokens=False)
    if back != expected:
        differs = (place for place, (one, other) in enumerate(zip(back, expected, strict=False)) if one != other)
        start = max(0, next(differs, 0) - _MOST_SHOWN // 2)
        shown = (f"'{printable(one[start:], most=_MOST_SHOWN)}'" for one in (back, expected))
        yield f"a text reads {' instead of '.join(shown)}"
    elif theirs != ours:
        yield f"it makes other tokens of '{printable(text, most=_MOST_SHOWN)}'"


def texts_of_rows(rows: Iterable[object]) -> list[str]:
    """Return the first texts in rows of data, as far as they are Unicode."""
    found: list[str] = []
    rest = list(rows)[::-1]
    while rest and len(found) < _MOST_TEXTS:
        value = rest.pop()
        if isinstance(value, str):
            found.append(value[:_MOST_CHARACTERS].encode("utf-8", "ignore").decode())
        elif isinstance(value, Mapping):
            rest += [*value.values()][::-1]
        elif isinstance(value, list):
            rest += value[::-1]
    return found


def way_out(name: str, load: Callable[[str], Tokenizer], differing: Callable[[Tokenizer], list[str]]) -> str:
    """Return what to do about the tokenizer `name`, after a try of it.

    Args:
        load: loads a tokenizer as transformers does.
        differing: returns the texts for which a tokenizer still differs.
    """
    with tempfile.TemporaryDirectory() as directory:
        described: dict[str, Any] = {}
        for file, path in tokenizer_files(name).items():
            (Path(directory) / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, Path(directory) / file)
            described = json.loads(path.read_bytes()) if file == "tokenizer_config.json" else described
        changed = described | {"tokenizer_class": _FILE_AS_IS}
        (Path(directory) / "tokenizer_config.json").write_text(json.dumps(changed), encoding="utf-8")
        try:
            is_cured = not differing(load(directory))
        except DataError:
            is_cured = False
    named = described.get("tokenizer_class")
    cause = f"names the class {named}" if named else "names no class"
    if is_cured:
        return (
            f"Its tokenizer_config.json {cause}, and transformers builds the tokenizer by a class that does not fit "
            f'tokenizer.json. Copy the tokenizer to another directory, write "tokenizer_class": "{_FILE_AS_IS}" into '
            "tokenizer_config.json there, and set model.tokenizer to that directory: this was tried, and gives the "
            "tokens of tokenizer.json."
        )
    return (
        f'Its tokenizer_config.json {cause}. With "tokenizer_class": "{_FILE_AS_IS}" the tokenizer still differs. Get '
        "the files of the tokenizer again from where the model comes from, and set model.tokenizer to their directory."
    )
