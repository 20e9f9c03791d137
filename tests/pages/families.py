"""The page docs/models.md: what the tests of all families found, in their table and in `families_in_rl.json`."""

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.trainer.model.packing_check import Layout
from tests.conftest import ROOT
from tests.models.families import Family

IN_RL = Path(__file__).parents[1] / "models" / "families_in_rl.json"
PAGE = ROOT / "docs" / "models.md"
_HEAD = """\
| family | rows | `rl` |
|---|---|---|
"""
_PADDED = {
    "its tokens meet outside of attention, in a convolution, a recurrence or the like": "a",
    "its layers do not use transformers' attention interface": "b",
    "its layers do not tell attention where the samples of a row are": "c",
    "its attention changes the mask that it is given": "d",
    "what its tokens see depends on more than a sliding window": "e",
}
"""Why a model gets one sample a row -> the letter that the page explains."""
_MOST = 80
_USUAL = re.compile(r"(?<=\n### With packed rows, in `rl`\n\n).*?(?=\n\n)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    family: Family
    layout: Layout | None = None  # of the model; None if it is refused
    refusal: str = ""  # the reason, in words

    def cells(self, in_rl: str) -> list[str]:
        if self.layout is None:
            return [self.family.name, f"refused: {self.refusal}", "refused"]
        rows = "packed" if self.layout.packs else f"padded ({_PADDED[self.layout.reason]})"
        return [self.family.name, rows, _short(in_rl)]


def _short(in_rl: str) -> str:
    """Return the outcome of `rl` without words that every such line has, cut to `_MOST` characters."""
    text = in_rl.replace(": rl ends before its first step", "").replace("the engine did not start: ", "")
    text = text.replace("ValueError: ", "").replace("Value error, ", "").replace(" (its log is above)", "")
    if len(text) <= _MOST or "mismatch_kl" in text:  # whose reason was found by hand
        return text
    return f"{text[:_MOST].rsplit(' ', 1)[0].removesuffix(' ...')} ..."


def page(rows: Mapping[str, Row]) -> str:
    """Return the page with the count and the table of these rows, by family."""
    in_rl: dict[str, str] = json.loads(IN_RL.read_text())
    text, head, _ = PAGE.read_text().partition(_HEAD)
    assert head and " kinds are in it." in text, "docs/models.md has lost the head of its table, or its count"
    text = re.sub(r"\d+( kinds are in it\.)", rf"{len(rows)}\1", text)
    cells = {name: rows[name].cells(in_rl.get(name, "")) for name in sorted(rows)}
    usual = [name for name, others in cells.items() if others[1:] == ["packed", "yes"]]
    text, num_lists = _USUAL.subn(textwrap.fill(", ".join(usual), 120, break_on_hyphens=False), text)
    assert num_lists == 1, "docs/models.md has lost its list"
    return text + head + "".join([f"| {' | '.join(cells[name])} |\n" for name in cells if name not in usual])
