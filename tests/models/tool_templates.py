"""Chat templates with tools as models publish them: those that come with TRL, and Mistral's."""

from importlib.util import find_spec
from pathlib import Path

from tests.models.chat_templates import HERMES, template

# Of Mistral-7B-Instruct-v0.3.
MISTRAL_V3 = template("mistral v0.3")


def _of_trl(name: str) -> str:
    """Return a template that TRL ships, without importing it."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def tool_templates() -> dict[str, str]:
    names = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_nothink", "llama3_1", "deepseek_r1_distill", "gemma")
    return {name: _of_trl(name) for name in names} | {"hermes": HERMES, "mistral_v3": MISTRAL_V3}
