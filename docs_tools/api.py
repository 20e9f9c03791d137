"""The page of the Python API: every name of `holdfast.__all__` with its signature and docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from pydantic import BaseModel

import holdfast
from docs_tools.listing import Setting, default_of, kind, texts_of
from docs_tools.options import linked, table_of

GROUPS = {
    "Runs": ["sft", "dpo", "reward_model", "rl", "evaluate", "open_run", "Run", "Rows", "RunFailed"],
    "Environments": ["Environment", "Task", "TaskSeed", "Message", "Session", "SessionFull", "Score", "ProcessKilled"],
    "Harnesses": ["HarnessEnvironment", "Endpoint"],
    "Judges": ["Judge", "JudgeConfig", "Judgement", "judging"],
    "Losses and advantages": ["PolicyLossInput", "PolicyLossConfig", "build_policy_loss", "ScoredRollout", "grpo"],
    "Checkpoints": [
        *("Checkpointer", "Retention", "BestMetric", "save_state", "load_state_with_optimizer"),
        *("load_weights_only", "module_tensors"),
    ],
    "Tokens and metrics": ["Tokenizer", "load_tokenizer", "Completion", "TokenIds", "Logprobs", "read_metrics"],
    "Experiment trackers": ["Tracker", "TrackedRun"],
    "Hooks": ["Hook", "HookReply", "StepView"],
    "Errors": ["HoldfastError", "ConfigError", "DataError", "CheckpointError", "SaveError", "ReadError", "RankLost"],
}
"""Heading -> the names below it."""

GIVEN = {"Session", "Tokenizer", "Endpoint", "Run", "RunFailed"}
"""Classes whose objects holdfast makes: their constructors are not shown."""

INTERNAL = {
    "Session": {"at_end", "leave", "end"},
    "TaskSeed": {"fresh"},
    "HarnessEnvironment": {"run"},
    "Judge": {"request", "read"},
    "Retention": {"of", "superseded"},
    "Tokenizer": {
        *("border_tokens", "identity", "template", "forms", "is_too_long", "encode_with_places", "encode_after"),
        *("render", "rewrites", "continuation", "around_assistant"),
    },
}
"""Class -> members that only holdfast uses."""

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$")
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*)$")
_LONGEST = 100


class _Written(str):
    """An annotation or default, shown as the source has it."""

    __repr__ = str.__str__


def page() -> str:
    """Return the Markdown of the page."""
    lines = [
        "# Python API",
        "",
        "Import these names from the package: `from holdfast import Environment, Score`. Each name is loaded when it",
        "is first used, and only names that handle tensors import torch. Other modules may change without notice.",
        "",
    ]
    for heading, names in GROUPS.items():
        lines += [f"## {heading}", ""]
        for name in names:
            lines += _entry(name, getattr(holdfast, name))
    return "\n".join(lines) + "\n"


def _entry(name: str, value: Any) -> Iterator[str]:
    yield from (f"### {name}", "", "```python", signature(name, value), "```", "")
    yield from _prose(inspect.getdoc(value) or "")
    if not inspect.isclass(value):
        return
    if issubclass(value, BaseModel):
        texts = texts_of(value)
        fields = [(key, kind(info), default_of(info) or "unset") for key, info in value.model_fields.items()]
        yield from [*table_of([Setting(*field, text=texts[field[0]], is_free=None) for field in fields]), ""]
        return
    for member, found in vars(value).items():
        inner = _function_of(found)
        if inner is None or member.startswith("_") or member in INTERNAL.get(name, ()) or not inner.__doc__:
            continue
        is_method = not isinstance(found, property | cached_property)
        yield from (f"#### {name}.{member}", "")
        if is_method:
            yield from ("```python", signature(member, inner, is_method=not isinstance(found, staticmethod)), "```", "")
        yield from _prose(inspect.cleandoc(inner.__doc__))


def _function_of(found: Any) -> Callable[..., Any] | None:
    """Return the function behind a member of a class; None if it is a plain value."""
    if isinstance(found, property):
        return found.fget
    if isinstance(found, cached_property):
        return found.func
    if isinstance(found, classmethod | staticmethod):
        return found.__func__
    return found if inspect.isfunction(found) else None


def signature(name: str, value: Any, *, is_method: bool = False) -> str:
    """Return how `value` is called, on one line if that is short."""
    if inspect.isclass(value) and issubclass(value, BaseModel | BaseException):
        return f"class {name}({value.__mro__[1].__name__})"
    found = inspect.signature(value)
    parameters = [] if name in GIVEN else [_plain(one) for one in list(found.parameters.values())[is_method:]]
    word = "class " if inspect.isclass(value) else "async def " if inspect.iscoroutinefunction(value) else "def "
    tail = "" if inspect.isclass(value) else f" -> {found.return_annotation}"
    call = "" if name in GIVEN else str(inspect.Signature(parameters))
    if len(word + name + call + tail) > _LONGEST:
        parts = [str(one) for one in parameters]
        stars = [number for number, one in enumerate(parameters) if one.kind is one.KEYWORD_ONLY]
        if stars:
            parts.insert(stars[0], "*")
        call = "(\n" + "".join(f"    {part},\n" for part in parts) + ")"
    return f"{word}{name}{call}{tail}"


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter whose annotation has no quotes, and whose default has no address of memory."""
    annotation, value = parameter.annotation, parameter.default
    if isinstance(annotation, str):
        annotation = _Written(annotation)
    if value is not parameter.empty and re.match(r"<|functools|.* at 0x", repr(value)):
        value = _Written("...")
    return parameter.replace(annotation=annotation, default=value)


def _prose(text: str) -> Iterator[str]:
    """Give a docstring as Markdown: its sections `Args:` and so on become lists."""
    for line in linked(text).splitlines():
        if match := _SECTION.match(line):
            yield from (f"**{match[1]}**", "")
        elif match := _ENTRY.match(line):
            yield f"- `{match[1]}`: {match[2]}"
        else:
            yield f"  {line.strip()}" if line.startswith("    ") else line
    yield ""
