"""Whole chats and texts as token ids, with a mask of the trained tokens.

A chat is rendered once and tokenised once, so its tokens are equal to transformers'
`apply_chat_template(tokenize=True)`. A turn is trained from the end of the prompt that `rl` would feed. The ids of the
messages before it and of the generation prompt must be the first ids of the whole. Else the chat is refused with the
reason. It ends with the token by which the template ends the turn.
"""

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal

from holdfast.chat import written
from holdfast.chat.messages import (
    WEIGHTS,
    check_messages,
    common_length,
    function_of,
    holds,
    is_trained,
    roles_left_out,
    squeezed,
    text_keys,
    texts_of,
    thoughts_of,
)
from holdfast.chat.template import ChatTemplate, TemplateRefusal
from holdfast.chat.tokenizer import Tokenizer
from holdfast.errors import DataError

TrainOn = Literal["all", "last"]
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_READ = frozenset({"role", "content", "tool_calls", *WEIGHTS})
_OF_CALLS = ("function", "name", "arguments")
_NOTHING = ("", [], {})
_EMPTY = "an answer that is trained is empty, so that the model learns to end at once"
_MOST_OF_NOTHING = 32
"""Tokens of an empty turn: its end, white space, and empty thoughts."""


@dataclass(frozen=True)
class Chat:
    """One conversation to train on.

    Attributes:
        messages: as in the data.
        first_trained: messages before this one are never trained.
        tools: of the row, for the template.
        options: further variables of the template.
    """

    messages: Sequence[Any]
    first_trained: int = 0
    tools: list[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Encoded:
    """Token ids, and for each whether it is trained.

    Attributes:
        remarks: warnings about data that is not in the tokens.
        value: a number of the row, such as a label; 0 without one.
    """

    ids: list[int]
    mask: list[bool]
    remarks: tuple[str, ...] = ()
    value: float = 0.0


def encode_text(text: str, tokenizer: Tokenizer) -> Encoded:
    """Return plain text, all trained: BOS where the tokenizer begins a text so, the text, EOS; none is added twice."""
    ids = _ended(tokenizer.text_prompt(text), tokenizer)
    remarks = () if text.strip() else (_EMPTY,)
    return Encoded(ids, [True] * len(ids), (*remarks, *_twice_ended(tokenizer, ids)))


def encode_completion(prompt: str, completion: str, tokenizer: Tokenizer) -> Encoded:
    """Return a prompt and its completion, which is trained with the EOS after it. The prompt has the ids that `rl`
    gives to a prompt that is text. The ids of the completion come from tokenizing both together; if the tokenizer joins
    tokens across the border, from only the completion. Raise DataError if neither gives back the text."""
    prompt_ids = tokenizer.text_prompt(prompt)
    whole_ids = tokenizer.text_prompt(prompt + completion)
    if whole_ids[: len(prompt_ids)] != prompt_ids:
        apart_ids = prompt_ids + tokenizer.encode_after(completion)
        expected, actual = (tokenizer.decode(ids, skip_special_tokens=False) for ids in (whole_ids, apart_ids))
        if expected != actual:
            raise DataError(
                f"the tokenizer joins the end of the prompt ({prompt[-12:]!r}) and the beginning of the completion "
                f"({completion[:12]!r}), so a completion of its own would read {actual[-40:]!r}. Let the prompt end "
                "where a word ends."
            )
        whole_ids = apart_ids
    ids = _ended(whole_ids, tokenizer)
    mask = [False] * len(prompt_ids) + [True] * (len(ids) - len(prompt_ids))
    remarks = () if completion.strip() else (_EMPTY,)
    return Encoded(ids, mask, (*remarks, *_twice_ended(tokenizer, ids[len(prompt_ids) :])))


def _ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    end = tokenizer.eos_token_id
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def _twice_ended(tokenizer: Tokenizer, *trained: Sequence[int]) -> Iterator[str]:
    """Yield a warning if trained tokens have two tokens that end a turn with only white space between them."""
    stops = tokenizer.stop_token_ids
    for ids in trained:
        places = [place for place, token in enumerate(ids) if token in stops]
        for first, second in pairwise(places):
            if not tokenizer.decode(ids[first + 1 : second], skip_special_tokens=False).strip():
                texts = [tokenizer.decode([ids[place]], skip_special_tokens=False) for place in (first, second)]
                yield (
                    f"a trained turn ends twice, with {texts[0]} and {texts[1]}: remove the end token that is written "
                    "in the data, or that the chat template adds"
                )
                return


def encode_chat(chat: Chat, tokenizer: Tokenizer, *, train_on: TrainOn = "all") -> Encoded:
    """Return the chat up to its last trained turn. `train_on`: all turns of the assistant, or the last. Raise
    ConfigError if the tokenizer has no chat template; DataError if the chat cannot be trained. If the chat breaks a
    rule of the template, the error names a change that was tried and works."""
    try:
        return _encoded(chat, tokenizer, train_on)
    except TemplateRefusal as error:
        for changed, advice in _ways_out(chat, tokenizer.template(chat.tools)):
            try:
                _encoded(changed, tokenizer, train_on)
            except DataError:
                continue
            raise DataError(f"{error} {advice}") from None
        raise DataError(f"{error} Or use a chat template without this rule: {written.ANOTHER_TEMPLATE}") from None


def _ways_out(chat: Chat, template: ChatTemplate) -> Iterator[tuple[Chat, str]]:
    """Yield changes of a chat that may follow the rules of its template, with advice to make them."""
    for options in template.choices(chat.options):
        ((name, value),) = options.items()
        setting = f"{{{name} = {'true' if value else 'false'}}}"
        yield (
            replace(chat, options={**chat.options, **options}),
            f"It can be trained with data.chat_template_kwargs = {setting}, or so in the column of the row.",
        )
    messages, system = chat.messages, sum(message["role"] == "system" for message in chat.messages[:1])
    if messages[system]["role"] == "assistant":
        asked = [*messages[:system], {"role": "user", "content": "."}, *messages[system:]]
        yield (
            replace(chat, messages=asked, first_trained=chat.first_trained + (chat.first_trained > system)),
            "It can be trained with a message of the user before the first message of the assistant.",
        )
    joined, first_trained = list[Any](), chat.first_trained
    for number, message in enumerate(messages):
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1] = {**joined[-1], "content": "\n".join([*texts_of(joined[-1]), *texts_of(message)])}
            first_trained -= number < chat.first_trained
        else:
            joined.append(message)
    if len(joined) < len(messages):
        yield (
            replace(chat, messages=joined, first_trained=first_trained),
            "It can be trained with messages of one role after another joined.",
        )
    if system:
        yield (
            replace(chat, messages=messages[1:], first_trained=max(0, chat.first_trained - 1)),
            "It can be trained with the text of the system message moved into the first message of the user.",
        )


def _encoded(chat: Chat, tokenizer: Tokenizer, train_on: TrainOn) -> Encoded:
    template = tokenizer.template(chat.tools)
    template.check_options(chat.options)
    messages = check_messages(chat.messages)
    turns = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and number >= chat.first_trained
    ]
    if not turns:
        roles = ", ".join(dict.fromkeys(f"`{message['role']}`" for message in messages)) or "none"
        raise DataError(
            f"there is no assistant message to train on: the roles are {roles}. Give answers the role `assistant`."
        )
    trained = _chosen(messages, turns)
    last = (trained or turns)[-1] + 1
    rendering = _Rendering(chat, tokenizer.forms(chat.tools).adapt(messages[:last]), tokenizer, template)
    mask = [False] * len(rendering.ids)
    for number in trained if train_on == "all" else trained[-1:]:
        start, end = rendering.turn(number)
        mask[start:end] = [True] * (end - start)
    return Encoded(rendering.ids, mask, rendering.remarks(mask))


def _chosen(messages: Sequence[Mapping[str, Any]], turns: list[int]) -> list[int]:
    """Return the turns that the messages themselves do not except from training. Raise DataError if a message that is
    not one of the turns asks to be trained."""
    excepted = set[int]()
    for number, message in enumerate(messages):
        wanted = is_trained(message, number + 1) if len(message) > 2 else None
        if wanted is False:
            excepted.add(number)
        elif wanted and number not in turns:
            key = next(key for key in WEIGHTS if message.get(key))
            raise DataError(
                f"{_nth(number)} has the role `{message['role']}` and `{key}`: {message[key]!r}, but only answers of "
                "the assistant after the prompt are trained. Remove that key."
            )
    return [number for number in turns if number not in excepted]


class _Rendering:
    """A chat as text and as tokens."""

    def __init__(
        self, chat: Chat, messages: list[dict[str, Any]], tokenizer: Tokenizer, template: ChatTemplate
    ) -> None:
        self._chat = chat
        self._messages = messages
        self._tokenizer = tokenizer
        self._template = template
        self.text = template.render(messages, **self._given)
        self._encoding = tokenizer.encode_with_places(self.text)
        self.ids: list[int] = self._encoding.ids
        self._refuse_ignored()

    @cached_property
    def _ends_of_tokens(self) -> list[int]:
        """The end of each token's characters. `Encoding.offsets` is a new list each time."""
        return [end for _, end in self._encoding.offsets]

    @property
    def _given(self) -> dict[str, Any]:
        chat = self._chat
        return {"tools": chat.tools, "options": chat.options}

    def _render(self, number: int, *, open_turn: bool) -> str:
        return self._template.render(self._messages[:number], open_turn=open_turn, **self._given)

    def turn(self, number: int) -> tuple[int, int]:
        """Return the first token that is trained of the turn that is message `number`, and the one after the last."""
        before = self._render(number, open_turn=True)
        start = self._prompt_length(number, before)
        if number == len(self._messages) - 1:
            end_text, end = len(self.text), len(self.ids)
        else:
            end_text = len(before) + self._length_of_answer(number, before)
            ends = self._ends_of_tokens
            end = start
            while end < len(ends) and ends[end] <= end_text:
                end += 1
        self._refuse_missing(number, len(before), end_text)
        return start, end

    def _prompt_length(self, number: int, before: str) -> int:
        """Return how many of the tokens are the prompt of message `number`."""
        if not self.text.startswith(before):
            raise TemplateRefusal(self._why_not_beginning(number, before))
        start, place = self._last_border(len(before))
        last_ids = self._tokenizer.encode(before[start:])
        if self.ids[place : place + len(last_ids)] != last_ids:
            raise TemplateRefusal(
                f"{_nth(number)}: the tokenizer joins the end of its prompt ({before[-16:]!r}) and the beginning of "
                f"the answer ({self.text[len(before) : len(before) + 16]!r}) to other tokens than the prompt has by "
                "itself, so what the model is prompted with cannot be told from what it says. Change the white space "
                "at that place in the data or in the chat template."
            )
        return place + len(last_ids)

    def _last_border(self, end: int) -> tuple[int, int]:
        """Return the character and the place of the last border token before character `end`: text before it and after
        it is tokenised independently."""
        place = self._encoding.char_to_token(end - 1) if end else None
        while place is not None and place >= 0:
            content = self._tokenizer.border_tokens.get(self.ids[place])
            chars = self._encoding.token_to_chars(place) if content is not None else None
            if chars is not None:
                start, stop = chars
                if stop <= end and self.text[start:stop] == content:  # and no byte that falls back on such a token
                    return start, place
            place -= 1
        return 0, 0

    def _why_not_beginning(self, number: int, before: str) -> str:
        closed = self._render(number, open_turn=False)
        common = common_length(self.text, before)
        opened = before[common_length(closed, before) :]
        if opened and common >= len(before) - len(opened):
            line = before[before.rfind("\n", 0, common) + 1 :]
            return (
                f"{_nth(number)}: the generation prompt of the chat template ends with {line[-40:]!r}, which the "
                f"answer as the template renders it does not have (it continues with "
                f"{self.text[common : common + 16]!r}). The row may need its thoughts, or the template another "
                "generation prompt." + (f" {self._remedy(number)}" if number < len(self._messages) - 1 else "")
            )
        return f"{_nth(number)}: {self._what_changes(before)}. {self._remedy(number)}"

    def _remedy(self, number: int) -> str:
        if number < len(self._messages) - 1:
            return "Set data.train_on = last to train the last turn alone, or use another template."
        return "Use another template, or prompt and completion columns as text."

    def _what_changes(self, before: str) -> str:
        common = common_length(self.text, before)
        return (
            "the chat template changes earlier turns once others follow "
            f"(at {before[max(0, common - 12) : common + 12]!r})"
        )

    def _length_of_answer(self, number: int, before: str) -> int:
        """Return how many characters after `before` an earlier turn takes, its end included. A template may end the
        last turn in another way, or write empty thoughts before it only. It must not drop anything that the turn
        says."""
        after = self._render(number + 1, open_turn=False)
        rest = self.text[len(before) :]
        if after.startswith(before):
            answer = after[len(before) :]
            # Text that may be missing at the end of an earlier turn: white space, and tokens that end a text.
            end = self._end_of_words(answer)
            for skipped in range(end + 1):
                if rest[:1] != answer[skipped : skipped + 1]:
                    continue
                common = common_length(answer[skipped:], rest)
                if skipped + common >= end and (not skipped or self._says_nothing(number, answer[:skipped])):
                    return common
        if thoughts_of(self._messages[number]) or "</think>" in "".join(texts_of(self._messages[number])):
            raise DataError(
                f"{_nth(number)}: the chat template takes the thoughts out of earlier turns, so what the assistant "
                f"said there is no longer in the chat. {self._remedy(number)}"
            )
        raise DataError(f"{_nth(number)}: {self._what_changes(after)}. {self._remedy(number)}")

    def _end_of_words(self, answer: str) -> int:
        """Return where an answer ends, without white space and tokens that end a turn or a text."""
        stops = [self._tokenizer.decode([stop], skip_special_tokens=False) for stop in self._tokenizer.stop_token_ids]
        closing = "|".join([r"\s", *(re.escape(stop) for stop in stops if stop)])
        while match := re.search(rf"(?:{closing})\Z", answer):
            answer = answer[: match.start()]
        return len(answer)

    def _says_nothing(self, number: int, text: str) -> bool:
        """Whether `text`, which an earlier turn lacks, holds nothing of the message."""
        said = [*texts_of(self._messages[number]), *thoughts_of(self._messages[number])]
        return not any(squeezed(part) and squeezed(part) in squeezed(text) for part in said) and not any(
            character.isalnum() for character in re.sub(r"</?\w+>", "", text)
        )

    def _refuse_missing(self, number: int, start: int, end: int) -> None:
        """Refuse a trained turn of which the template leaves something out."""
        message = self._messages[number]
        kept = squeezed(self.text[start:end])
        said = [*texts_of(message), *thoughts_of(message)]
        if not holds(kept, said):  # the generation prompt may have written the beginning of the answer
            closed = self._render(number, open_turn=False)
            opened = common_length(closed, self.text[:start])
            kept = squeezed(self.text[opened:end])
        if not holds(kept, said):
            raise DataError(
                f"{_nth(number)}: the chat template leaves out part of what the assistant says there"
                + (" (thoughts, it seems)" if thoughts_of(message) or "</think>" in "".join(texts_of(message)) else "")
                + f", so it would not be trained. {self._remedy(number)}"
            )

    def _refuse_ignored(self) -> None:
        """Refuse a chat with tools or calls that the template does not write."""
        chat, template, adapt = self._chat, self._template, self._tokenizer.forms(self._chat.tools).adapt
        if chat.tools and not self._is_tools_written(chat.tools):
            raise DataError(
                f"the row has `tools`, which the chat template of '{self._tokenizer.name}' does not write. Remove the "
                f"column. Or: {written.USE_TOOLS}"
            )

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            return template.render(adapt(map(dict, messages)), **self._given)

        written.check_calls_written(self._messages, render, self.text, name=self._tokenizer.name)

    def _is_tools_written(self, tools: list[Any]) -> bool:
        """Whether the template writes the names of the tools, which it does for all tools of one shape or for none."""
        shape = (self._messages[0]["role"], *(tuple(tool) for tool in tools))
        return self._known(shape, lambda: written.is_tools_written(tools, self._with_tools, self.text))

    def _with_tools(self, tools: list[Any]) -> str:
        return self._template.render(self._messages, tools=tools, options=self._chat.options)

    def _known(self, kind: Hashable, find: Callable[[], bool]) -> bool:
        """Return whether the template writes values of a kind, which is found out once."""
        known = self._template.is_written
        if kind not in known:
            known[kind] = find()
        return known[kind]

    def _unread(self) -> list[str]:
        """Return the keys of messages, tool calls, text parts and tools whose values are in no token, in words."""
        found = dict[str, None]()
        for number, message in enumerate(self._messages):
            if len(message) > 2:
                unread = [key for key in message if key not in _READ and not self._is_key_written(number, key)]
                found |= dict.fromkeys(f"messages have `{key}`" for key in unread)
                for key in self._unread_of_calls(number):
                    found[f"tool calls have `{key}`"] = None
        for message in self._chat.messages[: len(self._messages)]:
            if len(parts := message.get("content") or "") and not isinstance(parts, str):
                more = [key for part in parts for key in part if part[key] is not None and key not in text_keys(part)]
                found |= dict.fromkeys(f"text parts have `{key}`" for key in more)
        for key in self._unread_of_tools():
            found[f"tools have `{key}`"] = None
        return [f"{one}, which the chat template does not read" for one in found]

    def _place(self, number: int) -> tuple[Hashable, ...]:
        """Return what the effect of a key of message `number` may depend on."""
        chat, message, later = self._chat, self._messages[number], self._messages[number + 1 :]
        before = self._messages[number - 1] if number else {}
        ids = {call.get("id") for one in self._messages[:number] for call in one.get("tool_calls") or []}
        answered = {one.get("tool_call_id") for one in later}
        return (
            *(message["role"], before.get("role"), not later, any(one["role"] == "user" for one in later)),
            *(frozenset(message), type(message["content"]), bool(chat.tools), *sorted(chat.options)),
            message.get("tool_call_id") in ids,
            tuple(call.get("id") in answered for call in message.get("tool_calls") or []),
        )

    def _is_value_written(
        self, kind: tuple[Hashable, ...], number: int, value: Any, put: Callable[[Any], dict[str, Any]]
    ) -> bool:
        """Whether the template writes a value of message `number`; `put` returns that message with another value."""

        def render(message: dict[str, Any]) -> str:
            changed = [*self._messages[:number], message, *self._messages[number + 1 :]]
            return self._template.render(changed, **self._given)

        return self._known(
            (*kind, type(value), *self._place(number)), lambda: written.is_value_written(value, put, render, self.text)
        )

    def _is_key_written(self, number: int, key: str) -> bool:
        message = self._messages[number]
        value = message[key]
        return value in _NOTHING or self._is_value_written((key,), number, value, lambda other: {**message, key: other})

    def _unread_of_calls(self, number: int) -> list[str]:
        """Return the keys of tool calls, beside names and arguments, that the template does not write."""
        message = self._messages[number]
        found, calls = list[str](), message.get("tool_calls") or []

        def put(at: int, level: str | None, key: str, other: Any) -> dict[str, Any]:
            call = calls[at]
            changed = {**call, key: other} if level is None else {**call, level: {**call[level], key: other}}
            return {**message, "tool_calls": [*calls[:at], changed, *calls[at + 1 :]]}

        for at, call in enumerate(calls):
            for level, inner in ((None, call), ("function", function_of(call))):
                for key, value in inner.items():
                    if key in _OF_CALLS or value in ("function", *_NOTHING):
                        continue
                    if not self._is_value_written((level, key, at), number, value, partial(put, at, level, key)):
                        found.append(key)
        return found

    def _unread_of_tools(self) -> list[str]:
        """Return the keys of tools, beside their names, that the template does not write."""
        found, tools = list[str](), self._chat.tools or []
        for at, tool in enumerate(tools):
            for kind, key, value, put in written.values_of_tool(tool):
                replaced = partial(_replaced, tools, at, put)
                find = partial(written.is_value_written, value, replaced, self._with_tools, self.text)
                if not self._known(("tool", *kind, self._messages[0]["role"]), find):
                    found.append(key)
        return found

    def remarks(self, mask: Sequence[bool]) -> tuple[str, ...]:
        """Return what the messages hold and the template does not write, in words, and if a turn has no end."""
        found = self._unread()
        if len(self._messages) < len(self._chat.messages):
            found.append("messages after the last trained answer are left out")
        unknown = sorted({message["role"] for message in self._messages} - _ROLES)
        found += [
            f"messages have the role `{role}`, which is not one of {', '.join(sorted(_ROLES))}" for role in unknown
        ]
        roles = roles_left_out(self._messages, self.text)
        found += [f"the chat template leaves out what messages of role `{role}` say" for role in roles]
        answers = [text for one in self._messages if one["role"] == "assistant" for text in texts_of(one)]
        if not holds(squeezed(self.text), answers):
            found.append("the chat template leaves out part of what answers say that are not trained")
        trained = self._trained(mask)
        if any(self._is_empty(ids) for ids in trained):
            found.append(_EMPTY)
        # Phi-3's own template ends each turn twice: only ends that the data bring are told.
        if any(end in answer for answer in answers for end in self._tokenizer.stop_texts):
            found += _twice_ended(self._tokenizer, *trained)
        stops = {*self._tokenizer.stop_token_ids}
        if any(stops.isdisjoint(ids) for ids in trained):
            found.append("a trained turn has no token that ends a turn, so that the model does not learn to stop there")
        return tuple(found)

    def _trained(self, mask: Sequence[bool]) -> list[list[int]]:
        found, trained_to = list[list[int]](), 0
        while True in mask[trained_to:]:
            start = mask.index(True, trained_to)
            trained_to = mask.index(False, start) if False in mask[start:] else len(mask)
            found.append(self.ids[start:trained_to])
        return found

    def _is_empty(self, ids: Sequence[int]) -> bool:
        """Whether trained tokens say nothing: only a turn's end, white space and empty thoughts."""
        if len(ids) > _MOST_OF_NOTHING:
            return False
        stops = self._tokenizer.stop_token_ids
        said = self._tokenizer.decode([one for one in ids if one not in stops], skip_special_tokens=False)
        return not squeezed(re.sub(r"</?think\w*>", "", said))


def _replaced(tools: list[Any], at: int, put: Callable[[Any], Any], value: Any) -> list[Any]:
    return [*tools[:at], put(value), *tools[at + 1 :]]


def _nth(number: int) -> str:
    return f"message {number + 1}"


def options_of(value: object) -> dict[str, Any]:
    """Return a column of variables for the template as a map, without nulls. Raise DataError if it is not a map."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"`chat_template_kwargs` must be an object, got {value!r:.80}")
    return {key: entry for key, entry in value.items() if entry is not None}
