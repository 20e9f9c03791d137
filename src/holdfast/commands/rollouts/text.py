"""The text of rollouts: which tokens belong together, and what they say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.commands.track.settings import read_settings
from holdfast.shared.files.run_dir import RunDir
from holdfast.shared.wire.rollouts import Rollout

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE = "tokenizer.json"


@dataclass(frozen=True)
class TextOf:
    """Decodes token ids, or cannot, for a `reason`."""

    tokenizer: Tokenizer | None
    reason: str = ""

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of `token_ids` with special tokens; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=False)


def text_of(run_dir: RunDir) -> TextOf:
    """Return the tokenizer of a run: that of the model in its newest configuration, else of its newest checkpoint."""
    names = [str(path) for path in _directories(run_dir)]
    for name in names:
        file = Path(name) / _FILE
        if not file.is_file():
            continue
        from tokenizers import Tokenizer

        try:
            return TextOf(Tokenizer.from_file(str(file)))
        except Exception as error:  # noqa: BLE001 - the library raises nothing more specific
            return TextOf(None, f"{file} cannot be read: {error}")
    return TextOf(None, f"there is no {_FILE} in {' or '.join(names) or 'any model of the run'}")


def _directories(run_dir: RunDir) -> list[Path]:
    configs = run_dir.configs(run_dir.next_attempt() - 1)
    found = []
    for path in (configs / "orchestrator.toml", configs / "trainer.toml"):
        model = read_settings(path).get("model", {}) if path.exists() else {}
        found += [Path(model[key]) for key in ("tokenizer", "name") if model.get(key)]
    found += [run_dir.checkpoint(step) / "model" for step in reversed(run_dir.committed_steps())]
    return list(dict.fromkeys(found))


def stretches(rollout: Rollout, branch: slice) -> list[tuple[bool, list[int]]]:
    """Return the turns of a branch: whether the policy sampled them, and their ids."""
    pairs = zip(rollout.loss_mask[branch], rollout.token_ids[branch], strict=True)
    turns = itertools.groupby(pairs, lambda pair: bool(pair[0]))
    return [(sampled, [token for _, token in turn]) for sampled, turn in turns]
