"""Chats as token ids, for a policy that takes and gives text alone.

Sessions are sequences of ids that only grow. Where nobody knows the ids of the model, the bytes of the transcript
stand for them: messages as JSON, then `GIVEN`; what the policy said as it stands, then `SAID`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.shared.chat.messages import Message, as_dict
from holdfast.shared.chat.template import ChatMessage, ChatTemplate
from holdfast.shared.chat.tokenizer import Tokenizer
from holdfast.shared.errors import ConfigError, DataError

GIVEN = 256
SAID = 257


class Transcript(Tokenizer):
    """A tokenizer of bytes for a server that has one of its own."""

    def __init__(self, name: str) -> None:  # no files behind it: the base has nothing to read
        self.name = name
        self.eos_token_id = SAID

    @property
    def stop_token_ids(self) -> list[int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What ends a turn."""
        return [SAID]

    def is_too_long(self, num_characters: int, *, room: int) -> bool:
        """Whether a text has more than `room` bytes, told by its length."""
        return num_characters > room

    def text_prompt(self, text: str) -> list[int]:
        """Refuse a prompt that is no chat.

        Raises:
            DataError: always.
        """
        raise DataError(f"{self.name} takes chats, and this prompt is plain text: make it a list of messages")

    def prompt(
        self,
        messages: Sequence[Message | ChatMessage],
        *,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a chat so far."""
        if tools or options:
            raise DataError(f"{self.name} is asked without tools and options of a template")
        return [*json.dumps([as_dict(message) for message in messages], sort_keys=True).encode(), GIVEN]

    def continuation(
        self,
        messages: Sequence[Message | ChatMessage],
        *,
        last_token_id: int,
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        """Return the ids of messages that follow a turn of the policy."""
        return self.prompt(messages, tools=tools)

    def rewrites(self, messages: Sequence[Message | ChatMessage], *, tools: Sequence[Any] | None = None) -> bool:
        """Say that turns stay as they were said: what the server makes of them is its own affair."""
        return False

    def template(self, tools: Sequence[Any] | None = None) -> ChatTemplate:
        """Refuse what needs the template itself, which are tools.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"environments with tools write and read calls in the form of the model's template, and that of "
            f"{self.name} is not known: evaluate its weights instead (--model.name, --run)"
        )

    def encode_after(self, text: str) -> list[int]:
        """Refuse text that is no message.

        Raises:
            DataError: always.
        """
        raise DataError(f"{self.name} takes chats: append_text() has no place in one, use append_messages()")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids: of a turn what was said, of messages their JSON."""
        return bytes(one for one in token_ids if one < GIVEN).decode()


def messages_of(token_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Return the chat that the ids of a `Transcript` stand for."""
    messages: list[dict[str, Any]] = []
    start = 0
    for place, one in enumerate(token_ids):
        if one < GIVEN:
            continue
        text = bytes(token_ids[start:place]).decode()
        messages += json.loads(text) if one == GIVEN else [{"role": "assistant", "content": text}]
        start = place + 1
    return messages


def ids_of_answer(text: str) -> list[int]:
    """Return the ids of what the policy said."""
    return [*text.encode(), SAID]
