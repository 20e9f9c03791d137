"""The example's model, data and environment: what a command cannot do without, and has no default for."""

from pathlib import Path
from typing import Any

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "reverse_text"
MODEL = str(_EXAMPLE / "model")
DATA = str(_EXAMPLE / "sft.jsonl")
PAIRS = str(_EXAMPLE / "preferences.jsonl")
ENVIRONMENT = "reverse_text"
ENVIRONMENTS: list[dict[str, Any]] = [{"id": ENVIRONMENT}]
_OF_A_HUB = "somebody/rows"  # which a dry run does not read
_ENVIRONMENTS_JSON = '[{"id": "reverse_text"}]'

TOY: dict[str, tuple[str, ...]] = {
    "sft": ("--model.name", MODEL, "--data.name", _OF_A_HUB, "--max-steps", "100"),
    "dpo": ("--model.name", MODEL, "--data.name", _OF_A_HUB, "--max-steps", "100"),
    "reward-model": ("--model.name", MODEL, "--data.name", _OF_A_HUB, "--max-steps", "100"),
    "rl": ("--model.name", MODEL, "--orchestrator.environments", _ENVIRONMENTS_JSON),
    "trainer": ("--model.name", MODEL),
    "orchestrator": ("--model.name", MODEL, "--environments", _ENVIRONMENTS_JSON),
    "inference": ("--model.name", MODEL),
}
"""By command, the flags that name them, and a number of steps."""
