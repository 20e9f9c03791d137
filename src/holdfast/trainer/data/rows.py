"""Reads the rows of a dataset, and recognises their format: chats, prompt and completion, ShareGPT, Alpaca, pairs.

JSON files are read directly: `datasets` would give all rows the same keys, also inside of messages and tools, and fill
them with null. docs/data.md describes the formats for users.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import mmap
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from holdfast.chat.masking import Chat, Encoded, TrainOn, encode_chat, encode_completion, encode_text, options_of
from holdfast.chat.messages import check_tools, common_length, squeezed
from holdfast.chat.tokenizer import Tokenizer
from holdfast.config.training import SftDataConfig
from holdfast.errors import DataError, nearest
from holdfast.run.inputs import check_data_path

if TYPE_CHECKING:
    import datasets


Row = Mapping[str, Any]
_log = logging.getLogger("trainer")
_MOST_NAMED = 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_BREAK, _BLANK = ord("\n"), ord(" ")
_BLOCK_BYTES = 1 << 26


@dataclass(frozen=True)
class Sample:
    """One sequence to train on; or several, one behind the other, which a loss sees as one.

    Attributes:
        token_ids: int32 array of length L.
        loss_mask: bool array of length L: which tokens are trained. The first is never trained,
            since nothing predicts it.
        per_token: further float32 arrays of length L that follow the tokens, such as advantages.
        value: a number that its row says of it, such as the margin of a pair; 0 where it says none.
        starts: where its sequences begin. No token sees those of another, and the first of each is never trained.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    per_token: dict[str, np.ndarray] = field(default_factory=dict)
    value: float = 0.0
    starts: tuple[int, ...] = (0,)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each of its sequences."""
        return [end - start for start, end in pairwise([*self.starts, len(self.token_ids)])]

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted and trained."""
        return int(self.loss_mask[1:].sum())

    @property
    def prompt_length(self) -> int:
        """Tokens before the first target, which other samples may share; 0 if its first sequence has no target."""
        first = self.targets[:1]
        return int(first[0]) if len(first) and first[0] < self.lengths[0] else 0

    @property
    def shared_prompt(self) -> bytes:
        """Those tokens, to compare with those of other samples; empty where there are none."""
        return self.token_ids[: self.prompt_length].tobytes()

    @cached_property
    def stems(self) -> tuple[int, ...]:
        """For each of its sequences, how many first tokens it has in common with the one before; never all of them."""
        found = [0]
        for before, tokens in pairwise(np.split(self.token_ids, self.starts[1:])):
            most = min(len(before), len(tokens) - 1)
            differs = np.flatnonzero(before[:most] != tokens[:most])
            found.append(int(differs[0]) if len(differs) else most)
        return tuple(found)

    def cut(self, length: int) -> Sample:
        """Return its first `length` tokens."""
        per_token = {name: values[:length] for name, values in self.per_token.items()}
        starts = tuple(start for start in self.starts if start < max(1, length))
        return Sample(self.token_ids[:length], self.loss_mask[:length], per_token, self.value, starts)

    @property
    def targets(self) -> np.ndarray:
        """Places of the tokens that are predicted and trained."""
        return np.flatnonzero(self.loss_mask[1:]) + 1


class BadRows(msgspec.Struct, frozen=True):
    """Rows that cannot be used: how many, and what is wrong with the first, each text with the row's number."""

    count: int = 0
    first: tuple[str, ...] = ()

    def __add__(self, other: BadRows) -> BadRows:
        return BadRows(self.count + other.count, (*self.first, *other.first)[:_MOST_NAMED])

    def settle(self, config: SftDataConfig, rows: int) -> None:
        """Warn of what is left out, if there is any.

        Raises:
            DataError: it is not to be left out, or nothing else is there.
        """
        if not self.count:
            return
        named = self.first[0]
        if self.count > 1:
            left = [f"and {self.count - len(self.first):,} more"] if self.count > len(self.first) else []
            named = "\n         ".join([f"{self.count:,} of {rows:,} rows cannot be used:", *self.first, *left])
        if config.on_bad_row == "drop" and self.count < rows:
            shown = named if self.count > 1 else f"1 of {rows:,} rows cannot be used: {named}"
            _log.warning("%s, left out: %s", config.name, shown)
            return
        raise DataError(f"{config.name}, {named}\n       data.on_bad_row = 'drop' leaves such rows out.")


class Rows(Protocol):
    """The rows of a dataset, which have numbers from one; in a file of lines, that of the line."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def take(self, start: int, stop: int) -> Iterator[tuple[int, Row | DataError]]:
        """Yield (number, row) of the rows at places `start` to `stop`.

        In the place of a row that is no JSON object comes the error, whose message begins with its number.
        """
        ...


class LineRows:
    """One JSON object per line; empty lines do not count."""

    def __init__(self, content: bytes | mmap.mmap, *, begin: int = 0) -> None:
        """Args: content: of the file, from `begin`; of a mapped one nothing but the places of lines is in memory."""
        self._content = content
        bytes_N = np.frombuffer(content, dtype=np.uint8)
        blocks = range(begin, len(bytes_N), _BLOCK_BYTES)
        breaks = [np.flatnonzero(bytes_N[at : at + _BLOCK_BYTES] == _LINE_BREAK) + at for at in blocks]
        ends = np.concatenate([np.zeros(0, dtype=np.int64), *breaks, [len(bytes_N)]])
        starts = np.concatenate([[begin], ends[:-1] + 1])
        has_row = starts < ends
        # A line that begins with white space may hold nothing else.
        for line in np.flatnonzero(has_row)[bytes_N[starts[has_row]] <= _BLANK]:
            has_row[line] = not content[starts[line] : ends[line]].isspace()
        self._numbers = np.flatnonzero(has_row) + 1
        self._starts, self._ends = starts[has_row], ends[has_row]

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, start: int, stop: int) -> Iterator[tuple[int, Row | DataError]]:
        own = slice(start, stop)
        lines = zip(self._numbers[own].tolist(), self._starts[own], self._ends[own], strict=True)
        for number, first, end in lines:
            yield number, self._row(number, self._content[first:end])

    def _row(self, number: int, line: bytes) -> Row | DataError:
        try:
            return _checked(json.loads(line), number)
        except UnicodeDecodeError as error:
            return DataError(
                f"row {number} is not UTF-8: {error.reason} {hex(error.object[error.start])} at byte {error.start} "
                "of the line. Convert the file, as with `iconv -f LATIN1 -t UTF-8`."
            )
        except ValueError as error:
            what: object = error
            if isinstance(error, json.JSONDecodeError):
                what = f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
            return DataError(
                f"row {number} is not JSON: {what}. Each line must be one whole object, or the whole file a list "
                "of them, [{...}, ...]: mend the line, or remove it."
            )


class ListRows:
    """A JSON array of objects."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, start: int, stop: int) -> Iterator[tuple[int, Row | DataError]]:
        for number, row in enumerate(self._rows[start:stop], start=start + 1):
            yield number, _checked(row, number)


class TableRows:
    """A table, in which null stands for what a row does not have."""

    def __init__(self, table: datasets.Dataset) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def take(self, start: int, stop: int) -> Iterator[tuple[int, Row | DataError]]:
        columns = self._table[start:stop]
        names = list(columns)
        for number, values in enumerate(zip(*columns.values(), strict=True), start=start + 1):
            yield number, {name: _without_nulls(value) for name, value in zip(names, values, strict=True)}


def _checked(row: object, number: int) -> Row | DataError:
    if not isinstance(row, Mapping):
        return DataError(f"row {number} is {type(row).__name__}, expected an object with columns")
    return row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None or key == "content"}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value


def read_rows(name: str, *, split: str) -> Rows:
    """Return the rows of the dataset `name`.

    Args:
        split: which, where there are several.

    Raises:
        DataError: it is missing, unreadable or empty.
    """
    path = Path(name)
    check_data_path(name, key="data.name")
    if path.is_file() and path.suffix.lower() != ".parquet":
        rows = _read_json(path, name)
    else:
        rows = TableRows(_read_table(path, name, split))
    if not len(rows):
        raise DataError(f"data.name = '{name}' holds no rows")
    return rows


def hub_fingerprint(name: str, *, split: str) -> str:
    """Return what tells one revision of a hub's dataset from another: `datasets` derives it from the commit.

    Raises:
        DataError: the dataset is missing, unreadable or empty.
    """
    return _read_table(Path(name), name, split)._fingerprint  # it has no other name


def _read_json(path: Path, name: str) -> Rows:
    try:
        if path.suffix.lower() == ".gz":
            content = gzip.decompress(path.read_bytes())
        elif path.stat().st_size:
            with path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        else:  # nothing cannot be mapped
            content = b""
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"data.name = '{name}' could not be read: {error}") from None
    begin = len(_BYTE_ORDER_MARK) if content[: len(_BYTE_ORDER_MARK)] == _BYTE_ORDER_MARK else 0
    if not content[begin : begin + 1024].lstrip().startswith(b"["):
        return LineRows(content, begin=begin)
    try:
        return ListRows(json.loads(content[begin:]))
    except ValueError as error:
        raise DataError(f"data.name = '{name}' is no JSON array: {error}") from None


def _read_table(path: Path, name: str, split: str) -> datasets.Dataset:
    import datasets
    import datasets.exceptions

    datasets.disable_progress_bars()
    try:
        if path.is_file():
            import pyarrow.parquet

            if not pyarrow.parquet.read_metadata(path).num_rows:
                raise DataError(f"data.name = '{name}' holds no rows")  # datasets: `BatchSize must be greater than 0`
            table: Any = datasets.load_dataset("parquet", data_files=str(path), split="train")
            return table
        if (path / "dataset_dict.json").is_file():
            splits: Any = datasets.load_from_disk(str(path))
            if split not in splits:
                raise DataError(
                    f"data.split = '{split}': '{name}' has the splits {sorted(map(str, splits))}."
                    f"{nearest(split, map(str, splits))}"
                )
            return splits[split]
        if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            return datasets.load_from_disk(str(path))  # type: ignore[return-value]  # one split
        return datasets.load_dataset(name, split=split)  # type: ignore[return-value]
    except StopIteration:  # what datasets makes of an empty file
        raise DataError(f"data.name = '{name}' holds no rows") from None
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        raise DataError(f"data.name = '{name}' could not be read: {cause}") from None


SAMPLE_SHAPES = (
    "`messages`; or `prompt` and `completion`; or `conversations` (ShareGPT); or `instruction` and `output` (Alpaca); "
    "or `text`"
)
PAIR_SHAPES = (
    "`prompt`, `chosen` and `rejected` (all text or all lists of messages), or `chosen` and `rejected` that begin with "
    "the same prompt"
)
ANSWER_SHAPES = (
    "`prompt`, `completion` and `label` (true for a good answer, false for a bad one), or those of pairs: "
    + PAIR_SHAPES
)
RATED_PAIR_SHAPES = f"{PAIR_SHAPES}; and, for loss.odpo_alpha, `margin`, a number"
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_FOR_CHATS = ("tools", "documents", "chat_template_kwargs")


@dataclass(frozen=True)
class PromptCompletion:
    """A prompt and what follows it, as text."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """Text that is trained whole."""

    text: str


Example = Chat | PromptCompletion | Text


@dataclass(frozen=True)
class Format:
    """One way to write rows.

    Attributes:
        name: in words.
        needed, optional: the columns that are read.
        examples: makes the examples of a row: one for a sample, two for a pair.
        value: reads the number that a row says of them.
    """

    name: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    examples: Callable[[Row, Tokenizer], list[Example]]
    value: Callable[[Row], float] = lambda _: 0.0

    def unused(self, row: Row) -> list[str]:
        """Return the columns of `row` that are not read."""
        return sorted(set(row) - {*self.needed, *self.optional})


def has_format(row: Row, formats: tuple[Format, ...]) -> bool:
    """Whether `row` has the columns of any of the formats."""
    columns = {column for column, value in row.items() if value is not None}
    return any(columns.issuperset(candidate.needed) for candidate in formats)


def find_format(row: Row, formats: tuple[Format, ...], *, name: str, shapes: str) -> Format:
    """Return the first format whose columns `row` has.

    Raises:
        DataError: there is none.
    """
    for candidate in formats:
        if has_format(row, (candidate,)):
            return candidate
    raise DataError(f"data.name = '{name}' has the columns {sorted(row)}; rows need {shapes}. Rename the columns.")


def encode_example(example: Example, tokenizer: Tokenizer, *, train_on: TrainOn) -> Encoded:
    """Return the tokens of one example.

    Raises:
        ConfigError, DataError: it cannot be trained; says why.
    """
    if isinstance(example, Chat):
        return encode_chat(example, tokenizer, train_on=train_on)
    if isinstance(example, PromptCompletion):
        return encode_completion(example.prompt, example.completion, tokenizer)
    return encode_text(example.text, tokenizer)


def _chat(row: Row, messages: object, *, first_trained: int = 0) -> Chat:
    if not isinstance(messages, list):
        raise DataError(f"expected a list of messages, got {messages!r:.80}")
    documents = row.get("documents") or None
    if documents is not None and not isinstance(documents, list):
        raise DataError(f"`documents` must be a list of objects, got {documents!r:.80}")
    return Chat(
        messages,
        first_trained=first_trained,
        tools=check_tools(row.get("tools")),
        documents=documents,
        options=options_of(row.get("chat_template_kwargs")),
    )


def _refuse_for_text(row: Row) -> None:
    for column in _FOR_CHATS:
        if row.get(column):
            raise DataError(f"`{column}` goes with messages; this row is text")


def _from_messages(row: Row, _: Tokenizer) -> list[Example]:
    if row.get("messages") is None:
        there = ", ".join(f"`{name}`" for name, value in row.items() if value is not None)
        raise DataError(f"it has no `messages`; it has {there or 'nothing else'}")
    return [_chat(row, row["messages"])]


def _answered(row: Row, prompt: object, answer: object, *, columns: str) -> Example:
    if isinstance(prompt, str) and isinstance(answer, str):
        _refuse_for_text(row)
        return PromptCompletion(prompt, answer)
    if isinstance(prompt, list) and isinstance(answer, list):
        if prompt and answer[: len(prompt)] == prompt:
            raise DataError("the answer begins with the messages of `prompt`, which would come twice: drop that column")
        return _chat(row, prompt + answer, first_trained=len(prompt))
    kinds = " and ".join(_kind(value) for value in (prompt, answer))
    raise DataError(f"rows need {columns} (both text or both lists of messages), got {kinds}")


def _kind(value: object) -> str:
    """Return what a value is, in the words of JSON."""
    kinds = {str: "text", list: "a list", dict: "an object", bool: "true or false", int: "a number", float: "a number"}
    return "nothing" if value is None else kinds.get(type(value), type(value).__name__)


def _from_completion(row: Row, _: Tokenizer) -> list[Example]:
    return [_answered(row, row.get("prompt"), row.get("completion"), columns="`prompt` and `completion`")]


def _from_share_gpt(row: Row, _: Tokenizer) -> list[Example]:
    turns = row.get("conversations")
    if not isinstance(turns, list):
        raise DataError(f"`conversations` must be a list, got {turns!r:.80}")
    messages = [_share_gpt_message(turn, number) for number, turn in enumerate(turns, start=1)]
    return [_chat(row, _with_system(row, messages))]


def _share_gpt_message(turn: object, number: int) -> dict[str, Any]:
    if isinstance(turn, Mapping) and "role" in turn:
        return dict(turn)
    if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
        raise DataError(f"message {number}: a turn needs `from` and `value`, got {turn!r:.120}")
    said_by, value = turn["from"], turn["value"]
    if not isinstance(said_by, str) or said_by not in _ROLES:
        raise DataError(f"message {number}: `from` is {said_by!r}; known are {', '.join(_ROLES)}")
    rest = {key: entry for key, entry in turn.items() if key not in ("from", "value")}
    if said_by == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": _called(value, number), **rest}
    return {"role": _ROLES[said_by], "content": value, **rest}


def _called(value: object, number: int) -> list[dict[str, Any]]:
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"message {number}: the value of a function_call is not JSON: {error}") from None
    return [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]


def _with_system(row: Row, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not row.get("system"):
        return messages
    return [{"role": "system", "content": row["system"]}, *messages]


def _from_alpaca(row: Row, tokenizer: Tokenizer) -> list[Example]:
    values = {name: row.get(name) or "" for name in ("instruction", "input", "output", "system")}
    for name, value in values.items():
        if not isinstance(value, str):
            raise DataError(f"`{name}` must be text, got {value!r:.80}")
    history = row.get("history") or []
    if tokenizer.has_template:
        question = "\n".join(filter(None, [values["instruction"], values["input"]]))
        messages: list[dict[str, Any]] = []
        for turn in history:
            if not isinstance(turn, list) or len(turn) != 2:
                raise DataError(f"`history` must be a list of [instruction, output], got {turn!r:.80}")
            messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": values["output"]}]
        return [_chat(row, _with_system(row, messages))]
    _refuse_for_text(row)
    for name in ("system", "history"):
        if row.get(name):
            raise DataError(f"`{name}` needs a chat template, which this tokenizer does not have")
    return [PromptCompletion(_alpaca_prompt(values["instruction"], values["input"]), values["output"])]


def _alpaca_prompt(instruction: str, context: str) -> str:
    """Return the prompt of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca, train.py)."""
    if context:
        return (
            "Below is an instruction that describes a task, paired with an input that provides further context. Write "
            "a response that appropriately completes the request.\n\n"
            f"### Instruction:\n{instruction}\n\n### Input:\n{context}\n\n### Response:"
        )
    return (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{instruction}\n\n### Response:"
    )


def _from_text(row: Row, _: Tokenizer) -> list[Example]:
    if not isinstance(row.get("text"), str):
        raise DataError(f"`text` must be text, got {row.get('text')!r:.80}")
    _refuse_for_text(row)
    return [Text(row["text"])]


def _from_preferences(row: Row, _: Tokenizer) -> list[Example]:
    prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
    if isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(prompt, list):
        shared = _common_messages(chosen, rejected)
        _check_implicit_prompt(prompt, chosen[:shared])
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    elif isinstance(chosen, str) and isinstance(rejected, str) and prompt is None:
        shared = _common_text(chosen, rejected)
        if not shared:
            raise DataError(
                f"rows need {PAIR_SHAPES}; `chosen` and `rejected` of this one begin differently, so there is no prompt"
            )
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if {type(value) for value in (prompt, chosen, rejected)} not in ({str}, {list}):
        raise DataError(f"rows need {PAIR_SHAPES}")
    return [_answered(row, prompt, answer, columns=PAIR_SHAPES) for answer in (chosen, rejected)]


def _label(row: Row) -> float:
    label = row.get("label")
    if not isinstance(label, bool):
        raise DataError(f"`label` must be true (a good answer) or false (a bad one), got {label!r:.80}")
    return float(label)


def _margin(row: Row) -> float:
    margin = row.get("margin")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(f"`margin` must be a number in every row, since the first row has one, got {margin!r:.80}")
    return float(margin)


def _check_implicit_prompt(prompt: object, shared: list[Any]) -> None:
    """Refuse conversations that do not begin alike, or not with what `prompt`, if there, says as text.

    Raises:
        DataError: they do not.
    """
    if not shared:
        raise DataError(
            f"rows need {PAIR_SHAPES}; `chosen` and `rejected` of this one begin with different messages, so there is "
            "no prompt in them. Write `prompt` as a list of messages."
        )
    said = "".join(str(message.get("content")) for message in shared if isinstance(message, Mapping))
    if prompt is not None and squeezed(str(prompt)) not in squeezed(said):
        raise DataError(
            f"`prompt` is {prompt!r:.80}, which none of the messages says that `chosen` and `rejected` begin with, so "
            "it would be left out. Write it as a list of messages, or drop the column."
        )


def _common_messages(chosen: list[Any], rejected: list[Any]) -> int:
    """Return how many messages two conversations share; the last of either is an answer and never shared."""
    most = min(len(chosen), len(rejected)) - 1
    return next((place for place in range(most) if chosen[place] != rejected[place]), max(0, most))


def _common_text(chosen: str, rejected: str) -> int:
    """Return how long the prompt is that two texts begin with: to the last end of a word before they differ."""
    shared = chosen[: common_length(chosen, rejected)]
    words = shared.rstrip() if shared != shared.rstrip() else shared[: -len(shared.split()[-1])] if shared else ""
    return len(words.rstrip())


SAMPLE_FORMATS = (
    Format("chats (`messages`)", ("messages",), _FOR_CHATS, _from_messages),
    Format("ShareGPT (`conversations`)", ("conversations",), (*_FOR_CHATS, "system"), _from_share_gpt),
    Format("prompts and completions", ("prompt", "completion"), _FOR_CHATS, _from_completion),
    Format(
        "Alpaca (`instruction`, `input`, `output`)",
        ("instruction", "output"),
        (*_FOR_CHATS, "input", "system", "history"),
        _from_alpaca,
    ),
    Format("plain text (`text`), all of it trained", ("text",), _FOR_CHATS, _from_text),
)
PAIR_FORMATS = (Format("pairs", ("chosen", "rejected"), (*_FOR_CHATS, "prompt"), _from_preferences),)
ANSWER_FORMATS = (
    Format("labelled answers", ("prompt", "completion", "label"), _FOR_CHATS, _from_completion, value=_label),
    *PAIR_FORMATS,
)
RATED_PAIR_FORMATS = (
    Format(
        "pairs with margins",
        ("chosen", "rejected", "margin"),
        (*_FOR_CHATS, "prompt"),
        _from_preferences,
        value=_margin,
    ),
)
