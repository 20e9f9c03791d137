"""What a server that speaks OpenAI's chat protocol says to a request."""

from __future__ import annotations

import msgspec


class ChatCall(msgspec.Struct, frozen=True):
    """A call of a tool, as the server has read it from what its model wrote.

    Attributes:
        name: of the tool.
        arguments: JSON, as the model wrote it.
    """

    name: str
    arguments: str = "{}"


class ChatReply(msgspec.Struct, frozen=True):
    """The one choice of a chat completion.

    Attributes:
        text: what was said; empty where nothing was.
        finish_reason: why it ended.
        calls: tools that were called.
    """

    text: str
    finish_reason: str
    calls: tuple[ChatCall, ...] = ()
