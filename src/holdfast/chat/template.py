"""A chat template, compiled with all that transformers promises to every template.

As `transformers.utils.chat_template_utils`: a sandbox with `tojson`, `raise_exception`, `strftime_now`, loop
controls and `{% generation %}`.
"""

import json
import logging
import os
from collections.abc import Hashable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from holdfast.errors import DataError, nearest
from holdfast.process.child import DATE_ENV

_log = logging.getLogger("holdfast")
_GIVEN = {"messages", "tools", "add_generation_prompt"}

ChatMessage = Mapping[str, Any]


class TemplateRefusal(DataError):
    """A chat does not follow the rules of its template: another template or other variables could write it."""


class _Generation(Extension):
    """The tag `{% generation %}` ... `{% endgeneration %}` around what the assistant says: without effect here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        # A scope, as in transformers: variables that are set within end with it.
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """One compiled template.

    Attributes:
        source: its text.
        variables: what it reads from outside, such as `tools` or `enable_thinking`.
        is_written: whether it writes tools or a key of messages, by their kind, as far as that is known.
    """

    def __init__(self, source: str, *, name: str, special: Mapping[str, str]) -> None:
        """Compile.

        Args:
            name: of the tokenizer, for messages.
            special: special tokens by role, such as `bos_token`.

        Raise DataError if the template is not valid.
        """
        self.source = source
        self.is_written: dict[Hashable, bool] = {}
        self._name = name
        self._special = dict(special)
        environment = _environment(name)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template of '{name}' is not valid: {error}") from None
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        open_turn: bool = False,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a chat.

        Args:
            open_turn: write the beginning of the assistant's next turn as well (the generation prompt).
            options: further variables of the template, such as `enable_thinking`.

        Raise TemplateRefusal if the template refuses the messages.
        """
        given = {
            "documents": None,
            **self._special,
            **(options or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": open_turn,
        }
        try:
            return self._template.render(given)
        except Exception as error:  # noqa: BLE001 (a template fails with whatever its expressions raise)
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateRefusal(
                f"the chat template of '{self._name}' refuses a chat of [{roles}]: {str(error).rstrip('.')}."
            ) from None

    def choices(self, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return variables about thoughts to try beside `options`: each that the template reads, off and on."""
        names = sorted(name for name in self.variables if "think" in name and name not in options)
        return [{name: value} for value in (False, True) for name in names]

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Check that the template reads all these variables. Raise DataError if it does not read one, or one is set by
        other means."""
        for name in options:
            if name in _GIVEN:
                raise DataError(f"chat_template_kwargs must not hold `{name}`: it has a column of its own")
            if name not in self.variables:
                known = sorted(self.variables - _GIVEN - self._special.keys())
                raise DataError(
                    f"chat_template_kwargs holds `{name}`, which the chat template of '{self._name}' does not read."
                    f"{nearest(name, known)} It reads: {', '.join(known) or 'nothing of this kind'}."
                )


def _environment(name: str) -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(
        value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def now(form: str) -> str:
        date = template_date()
        _tell_the_date(name, f"{date:%Y-%m-%d}")
        return date.strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now
    return environment


def template_date() -> datetime:
    """Return the date that chat templates write, in UTC: the date of the run, if any, else now."""
    kept = os.environ.get(DATE_ENV)
    return datetime.fromtimestamp(int(kept), UTC) if kept else datetime.now(UTC)


@lru_cache
def _tell_the_date(name: str, date: str) -> None:
    _log.info("the chat template of '%s' writes a date into the prompts: %s, for the whole run", name, date)


_TOOL_FORMATS = {
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
    '"parameters": ': "llama3_json",
}
"""The form in which a model writes calls of tools, by vLLM's names, for what its chat template shows."""


def tool_format_of(template: str) -> str | None:
    """Return the form of calls in the source of a chat template; None where none is known."""
    return next((name for sign, name in _TOOL_FORMATS.items() if sign in template), None)
