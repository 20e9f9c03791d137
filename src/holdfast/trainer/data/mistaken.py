"""Refuses rows that are meant for another program, or need another name, with the way out."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors import DataError
from holdfast.run.rows import Row
from holdfast.trainer.data.formats import Format, has_format


def refuse_mistaken(row: Row, formats: tuple[Format, ...], *, name: str) -> None:
    """Raise DataError if the first row of data is in a known form that `formats` do not have."""
    columns = {column for column, value in row.items() if value is not None}
    takes_pairs = any({"chosen", "rejected"} <= set(form.needed) for form in formats)
    if {"chosen", "rejected"} <= columns:
        if not takes_pairs and not has_format(row, formats):
            raise DataError(
                f"data.name = '{name}' holds pairs (`chosen` and `rejected`), which `dpo` and `reward-model` train. "
                "Use one of them, or write rows of `prompt` and `completion`, with the chosen answer."
            )
        sides = [row["chosen"], row["rejected"]]
        if takes_pairs and "conversations" in columns and all(isinstance(side, Mapping) for side in sides):
            raise DataError(
                f"data.name = '{name}' holds pairs of LLaMA-Factory. Write `conversations` as `prompt`, a list of "
                "{role, content} (`human` is the role `user`, `gpt` is `assistant`), and `chosen` and `rejected` each "
                "as a list of one such message."
            )
    elif {"instruction", "context"} <= columns and not takes_pairs and not {"messages", "text"} & columns:
        raise DataError(
            f"data.name = '{name}' holds rows with `instruction` and `context`, as Dolly has them, and no token would "
            "come of `context`. Rename `context` to `input`, and `response`, if it is there, to `output`."
        )
