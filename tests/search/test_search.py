"""A few draws at night, and each case that was found once: the long form is `python -m tests.search`."""

import contextlib
import itertools
from pathlib import Path

import pytest

from tests.search.__main__ import FOUND
from tests.search.grammar import KILLS, Case, draws, every_pair
from tests.search.runs import Played, Player, Refused

SEED = 20
CASES = 18
"""About three minutes."""


@pytest.mark.timeout(1800)
@pytest.mark.launch
def test_drawn_runs_keep_every_promise(tmp_path: Path) -> None:
    player = Player(tmp_path)
    played: list[Played] = []
    for case in draws(SEED):
        with contextlib.suppress(Refused):  # by the dry run
            played.append(player.play(case))
        if len(played) == CASES:
            break
    assert not [(one.case, str(finding)) for one in played for finding in one.findings]
    assert sum(len(one.hits) for one in played) >= CASES, "most faults must meet work"


@pytest.mark.timeout(900)
@pytest.mark.launch
@pytest.mark.parametrize("path", sorted(FOUND.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_found_once_holds(path: Path, tmp_path: Path) -> None:
    case = Case.read(path.read_text())
    played = Player(tmp_path).play(case)
    assert not played.findings, "\n".join(map(str, played.findings))
    assert len(played.hits) == len(case.faults), "a fault met nothing"


def test_draws_repeat_and_meet_new_pairs() -> None:
    first, again = (list(itertools.islice(draws(1), 200)) for _ in range(2))
    assert first == again != list(itertools.islice(draws(2), 200))
    assert {fault.effect for case in first for fault in case.faults} == {*KILLS}
    met = set().union(*(case.pairs() for case in first))
    assert len(met & every_pair()) > 0.6 * len(every_pair())
    assert Case.read(first[0].write()) == first[0]
