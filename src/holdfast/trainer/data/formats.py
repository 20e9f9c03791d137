"""The formats of rows, and the tokens of a row: chats, prompt and completion, ShareGPT, Alpaca, text, pairs.

docs/data.md describes them for users. To add one: its function here, and its line in a table at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.chat.masking import Chat, Encoded, TrainOn, encode_chat, encode_completion, encode_text, options_of
from holdfast.chat.messages import (
    THOUGHTS,
    WEIGHTS,
    bare,
    called,
    check_tools,
    common_length,
    parse_json,
    squeezed,
    with_system,
)
from holdfast.chat.tokenizer import Tokenizer
from holdfast.config.data import SftDataConfig
from holdfast.errors import DataError
from holdfast.trainer.data.rows import Row

_PAIR_SHAPE = (
    "`prompt`, `chosen` and `rejected` (all text or all lists of messages), or `chosen` and `rejected` that begin with "
    "the same prompt"
)
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
_FOR_CHATS = ("tools", "functions", "chat_template_kwargs", "system")


@dataclass(frozen=True)
class Format:
    """One way to write rows.

    Attributes:
        name: in words.
        shape: the columns that rows need, in words.
        needed, optional: the columns that are read.
        sides: makes the tokens of a row: of a sample, or of both sides of a pair.
        value: reads the number that a row says of them.
    """

    name: str
    shape: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    sides: Callable[[Row, Tokenizer, TrainOn], list[Encoded]]
    value: Callable[[Row], float] = lambda _: 0.0

    def unused(self, row: Row) -> list[str]:
        """Return the columns of `row` that are not read."""
        return sorted(set(row) - {*self.needed, *self.optional})

    def encode(self, row: Row, tokenizer: Tokenizer, config: SftDataConfig) -> list[Encoded]:
        """Return the tokens of a row. Raise ConfigError or DataError if it cannot be trained, or is too long where that
        is an error; says why."""
        if config.chat_template_kwargs:
            own = options_of(row.get("chat_template_kwargs"))
            row = {**row, "chat_template_kwargs": {**config.chat_template_kwargs, **own}}
        sides = [replace(side, value=self.value(row)) for side in self.sides(row, tokenizer, config.train_on)]
        is_answer = len(sides) == 1 and "label" not in self.needed
        if is_answer and row.get("label") is False:
            raise DataError(
                "`label` is false, which says that the answer is bad. Leave out such rows, or train all rows by `dpo` "
                "with loss.type = 'kto'."
            )
        obeyed = {"label"} if is_answer and row.get("label") is True else set[str]()
        for key in WEIGHTS:
            # The others of the names stand for numbers of another kind, too, such as the loss of a row.
            kind = bool | int | float if key.endswith("weight") else bool
            if not isinstance(weight := row.get(key), kind):
                continue
            if weight != 1:
                way = "Remove the column" if weight else "Leave out such rows"
                raise DataError(f"`{key}` is {weight!r:.80}: weights of rows are not supported. {way}.")
            obeyed.add(key)
        if unused := [column for column in self.unused(row) if row[column] is not None and column not in obeyed]:
            said = tuple(f"the column `{column}` is not read" for column in unused)
            sides[0] = replace(sides[0], remarks=(*sides[0].remarks, *said))
        longest = max(len(side.ids) for side in sides)
        if config.too_long == "error" and longest > config.seq_len:
            what = "the sample" if len(sides) == 1 else "a side of the pair"
            raise DataError(
                f"{what} has {longest} tokens, data.seq_len is {config.seq_len}. Raise data.seq_len, or set "
                "data.too_long to drop or truncate."
            )
        return sides


def has_format(row: Row, formats: tuple[Format, ...]) -> bool:
    """Whether `row` has the columns of any of the formats."""
    columns = {column for column, value in row.items() if value is not None}
    return any(columns.issuperset(candidate.needed) for candidate in formats)


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


def find_format(row: Row, formats: tuple[Format, ...], *, name: str) -> Format:
    """Return the first format whose columns `row` has. Raise DataError if there is none."""
    for candidate in formats:
        if has_format(row, (candidate,)):
            return candidate
    first = formats[0].shape  # of pairs with margins, which begins as pairs do
    shapes = "; or ".join([first, *(form.shape for form in formats[1:] if not first.startswith(form.shape))])
    way = "Train them with `sft`, or rename the columns" if has_format(row, SAMPLE_FORMATS) else "Rename the columns"
    raise DataError(f"data.name = '{name}' has the columns {sorted(row)}; rows need {shapes}. {way}.")


def _chat(row: Row, messages: object, tokenizer: Tokenizer, train_on: TrainOn, *, first_trained: int = 0) -> Encoded:
    if not isinstance(messages, list):
        raise DataError(f"expected a list of messages, got {messages!r:.80}")
    chat = Chat(
        messages,
        first_trained=first_trained,
        tools=check_tools(_tools(row)),
        options=options_of(row.get("chat_template_kwargs")),
    )
    return encode_chat(chat, tokenizer, train_on=train_on)


def _tools(row: Row) -> object:
    """Return the tools of a row, which OpenAI's older format names `functions`."""
    functions = row.get("functions")
    if not functions:
        return row.get("tools")
    if row.get("tools"):
        raise DataError("the row has `tools` and `functions`. Remove one of the columns.")
    functions = parse_json(functions, "`functions`") if isinstance(functions, str) else functions
    if not isinstance(functions, list):
        raise DataError(f"`functions` must be a list of JSON objects, got {functions!r:.80}")
    return [{"type": "function", "function": function} for function in functions]


def _refuse_for_text(row: Row, text: str = "") -> None:
    for column in _FOR_CHATS:
        if row.get(column) and not (column == "system" and str(row[column]) in text):
            raise DataError(f"`{column}` goes with messages; this row is text")


def _from_messages(row: Row, tokenizer: Tokenizer, train_on: TrainOn) -> list[Encoded]:
    _refuse_absent(row, "messages")
    return [_chat(row, with_system(row.get("system"), row["messages"]), tokenizer, train_on)]


def _refuse_absent(row: Row, name: str) -> None:
    if row.get(name) is None:
        there = ", ".join(f"`{name}`" for name, value in row.items() if value is not None)
        raise DataError(f"it has no `{name}`; it has {there or 'nothing else'}")


def _answered(
    row: Row, prompt: object, answer: object, tokenizer: Tokenizer, train_on: TrainOn, *, columns: str
) -> Encoded:
    if isinstance(prompt, str) and isinstance(answer, str):
        _refuse_for_text(row, prompt)
        return encode_completion(prompt, answer, tokenizer)
    if isinstance(prompt, list) and isinstance(answer, list):
        if prompt and bare(answer[: len(prompt)]) == bare(prompt):
            raise DataError("the answer begins with the messages of `prompt`, which would come twice: drop that column")
        last, first = (
            ends[0].get("role") if ends and isinstance(ends[0], Mapping) else None for ends in (prompt[-1:], answer)
        )
        if last == first == "assistant":
            raise DataError(
                "the prompt ends with a message of the assistant, and the answer begins with another. Join them into "
                "one message of the answer."
            )
        messages = with_system(row.get("system"), prompt + answer)
        return _chat(row, messages, tokenizer, train_on, first_trained=len(messages) - len(answer))
    kinds = " and ".join(_kind(value) for value in (prompt, answer))
    raise DataError(f"rows need {columns} (both text or both lists of messages), got {kinds}")


def _kind(value: object) -> str:
    """Return what a value is, in the words of JSON."""
    kinds = {str: "text", list: "a list", dict: "an object", bool: "true or false", int: "a number", float: "a number"}
    return "nothing" if value is None else kinds.get(type(value), type(value).__name__)


def _from_completion(row: Row, tokenizer: Tokenizer, train_on: TrainOn) -> list[Encoded]:
    prompt, completion = row.get("prompt"), row.get("completion")
    return [_answered(row, prompt, completion, tokenizer, train_on, columns="`prompt` and `completion`")]


def _from_share_gpt(row: Row, tokenizer: Tokenizer, train_on: TrainOn) -> list[Encoded]:
    turns = row.get("conversations")
    if not isinstance(turns, list):
        raise DataError(f"`conversations` must be a list, got {turns!r:.80}")
    messages = [_share_gpt_message(turn, number) for number, turn in enumerate(turns, start=1)]
    return [_chat(row, with_system(row.get("system"), messages), tokenizer, train_on)]


def _share_gpt_message(turn: object, number: int) -> dict[str, Any]:
    turn = {key: entry for key, entry in turn.items() if entry is not None} if isinstance(turn, Mapping) else turn
    if isinstance(turn, dict) and "role" in turn:
        return turn
    if not isinstance(turn, dict) or "from" not in turn or turn.keys().isdisjoint(("value", "tool_calls", *THOUGHTS)):
        raise DataError(f"message {number}: a turn needs `from` and `value`, got {turn!r:.120}")
    said_by, value = turn["from"], turn.get("value")
    if not isinstance(said_by, str) or said_by not in _ROLES:
        raise DataError(f"message {number}: `from` is {said_by!r}; known are {', '.join(_ROLES)}")
    rest = {key: entry for key, entry in turn.items() if key not in ("from", "value")}
    if said_by == "function_call":
        calls = [{"type": "function", "function": call} for call in called(value, number)]
        return {"role": "assistant", "content": "", "tool_calls": calls, **rest}
    return {"role": _ROLES[said_by], "content": value, **rest}


def _from_alpaca(row: Row, tokenizer: Tokenizer, train_on: TrainOn) -> list[Encoded]:
    for name in ("instruction", "output"):
        _refuse_absent(row, name)
    values = {name: "" if row.get(name) is None else row[name] for name in ("instruction", "input", "output", "system")}
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
        return [_chat(row, with_system(row.get("system"), messages), tokenizer, train_on)]
    for name in ("system", "history"):
        if row.get(name):
            raise DataError(f"`{name}` needs a chat template, which this tokenizer does not have")
    _refuse_for_text(row)
    prompt = _alpaca_prompt(values["instruction"], values["input"])
    return [encode_completion(prompt, values["output"], tokenizer)]


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


def _from_text(row: Row, tokenizer: Tokenizer, _: TrainOn) -> list[Encoded]:
    if not isinstance(row.get("text"), str):
        raise DataError(f"`text` must be text, got {row.get('text')!r:.80}")
    _refuse_for_text(row, row["text"])
    return [encode_text(row["text"], tokenizer)]


def _from_preferences(row: Row, tokenizer: Tokenizer, train_on: TrainOn) -> list[Encoded]:
    prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
    if isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(prompt, list):
        shared = _common_messages(chosen, rejected)
        _check_implicit_prompt(prompt, chosen[:shared])
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    elif isinstance(chosen, str) and isinstance(rejected, str) and prompt is None:
        shared = _common_text(chosen, rejected)
        if not shared:
            raise DataError(
                f"rows need {_PAIR_SHAPE}; `chosen` and `rejected` of this one begin differently, so there is no prompt"
            )
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if {type(value) for value in (prompt, chosen, rejected)} not in ({str}, {list}):
        raise DataError(f"rows need {_PAIR_SHAPE}")
    answers = (chosen, rejected)
    return [_answered(row, prompt, answer, tokenizer, train_on, columns=_PAIR_SHAPE) for answer in answers]


def _label(row: Row) -> float:
    label = row.get("label")
    if not isinstance(label, bool):
        raise DataError(f"`label` must be true (a good answer) or false (a bad one), got {label!r:.80}")
    return float(label)


def _margin(row: Row) -> float:
    margin = row.get("margin")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= sys.float_info.max:
        raise DataError(f"`margin` must be a number in every row, since the first row has one, got {margin!r:.80}")
    return float(margin)


def _check_implicit_prompt(prompt: object, shared: list[Any]) -> None:
    """Refuse conversations that do not begin alike, or not with the text of `prompt`, if there is one. Raise DataError
    if they do not."""
    if not shared:
        raise DataError(
            f"rows need {_PAIR_SHAPE}; `chosen` and `rejected` of this one begin with different messages, so there is "
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
    return next((place for place in range(most) if bare(chosen[place]) != bare(rejected[place])), max(0, most))


def _common_text(chosen: str, rejected: str) -> int:
    """Return how long the prompt is that two texts begin with: to the last end of a word before they differ."""
    shared = chosen[: common_length(chosen, rejected)]
    words = shared.rstrip() if shared != shared.rstrip() else shared[: -len(shared.split()[-1])] if shared else ""
    return len(words.rstrip())


SAMPLE_FORMATS = (
    Format("chats (`messages`)", "`messages`", ("messages",), _FOR_CHATS, _from_messages),
    Format("ShareGPT (`conversations`)", "`conversations` (ShareGPT)", ("conversations",), _FOR_CHATS, _from_share_gpt),
    Format(
        "prompts and completions", "`prompt` and `completion`", ("prompt", "completion"), _FOR_CHATS, _from_completion
    ),
    Format(
        "Alpaca (`instruction`, `input`, `output`)",
        "`instruction` and `output` (Alpaca)",
        ("instruction", "output"),
        (*_FOR_CHATS, "input", "history"),
        _from_alpaca,
    ),
    Format("plain text (`text`), all of it trained", "`text`", ("text",), _FOR_CHATS, _from_text),
)
PAIR_FORMATS = (Format("pairs", _PAIR_SHAPE, ("chosen", "rejected"), (*_FOR_CHATS, "prompt"), _from_preferences),)
ANSWER_FORMATS = (
    Format(
        "labelled answers",
        "`prompt`, `completion` and `label` (true for a good answer, false for a bad one)",
        ("prompt", "completion", "label"),
        _FOR_CHATS,
        _from_completion,
        value=_label,
    ),
    *PAIR_FORMATS,
)
RATED_PAIR_FORMATS = (
    Format(
        "pairs with margins",
        f"{_PAIR_SHAPE}; and, for loss.odpo_alpha, `margin`, a number",
        ("chosen", "rejected", "margin"),
        (*_FOR_CHATS, "prompt"),
        _from_preferences,
        value=_margin,
    ),
)
