"""The form in which a model writes calls of tools, by vLLM's names, as its chat template shows it."""

from __future__ import annotations

_SIGNS = {
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
    '"parameters": ': "llama3_json",
}


def tool_format_of(template: str) -> str | None:
    """Return the form of calls in the source of a chat template; None where none is known."""
    return next((name for sign, name in _SIGNS.items() if sign in template), None)
