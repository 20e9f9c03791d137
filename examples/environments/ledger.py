"""Look accounts up with a tool, and answer what they hold together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holdfast import ConfigError, Environment, Message, Score, Session, Task, TaskSeed

_NAMES = (
    "rent", "food", "travel", "books", "power", "water", "phone", "garden", "music", "tools", "gifts", "sports",
    "repairs", "clothes", "savings", "school",
)  # fmt: skip
_LOOKED_UP_SHARE = 0.2
"""What looking up all that was asked for is worth; the right sum is worth the rest."""
_LARGEST = 10**9
_NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Books(Task):
    """A task with the ledger that its tool reads, and the accounts that it asks for."""

    ledger: Mapping[str, int] = field(default_factory=dict)
    asked: tuple[str, ...] = ()


class Ledger(Environment):
    """Reward: 0.8 for the right sum, 0.2 times the share of its accounts looked up, less what wrong calls cost."""

    def __init__(
        self,
        num_asked: int = 2,
        max_amount: int = 99,
        call_cost: float = 0.1,
        prompt: str = "What do the accounts {accounts} hold together? Answer with the number alone.",
    ) -> None:
        """Check the arguments.

        Args:
            num_asked: accounts that have to be looked up.
            max_amount: most that one holds.
            call_cost: what every wrong call costs: one that fails, or looks up what was not asked for, or again.
            prompt: the user's message, with {accounts} in it.

        Raises:
            ConfigError: they do not fit together.
        """
        if not 1 <= num_asked <= len(_NAMES):
            raise ConfigError(f"ledger: num_asked = {num_asked}; allowed are whole numbers from 1 to {len(_NAMES)}")
        if not 1 <= max_amount <= _LARGEST:
            raise ConfigError(f"ledger: max_amount = {max_amount}; allowed are whole numbers from 1 to {_LARGEST}")
        if not 0.0 <= call_cost <= 1.0:
            raise ConfigError(f"ledger: call_cost = {call_cost}; allowed are numbers from 0 to 1")
        self._num_asked = num_asked
        self._max_amount = max_amount
        self._call_cost = call_cost
        self._prompt = prompt

    def look_up(self, session: Session, account: str) -> int:
        """Look up what an account holds.

        Args:
            account: its name.
        """
        assert isinstance(session.task, Books)
        calls: list[str] = session.state.setdefault("looked_up", [])
        if account not in session.task.ledger:
            raise KeyError(f"there is no account {account!r}")
        calls.append(account)
        return session.task.ledger[account]

    tools = (look_up,)

    def make_task(self, seed: TaskSeed) -> Books:
        """Return a ledger of all accounts, and some of them to add up."""
        random = seed.random()
        ledger = {name: random.randint(0, self._max_amount) for name in _NAMES}
        asked = random.sample(_NAMES, self._num_asked)
        prompt = self._prompt.replace("{accounts}", ", ".join(asked))
        total = sum(ledger[name] for name in asked)
        return Books(prompt=[Message("user", prompt)], answer=str(total), ledger=ledger, asked=tuple(asked))

    async def score(self, task: Task, sessions: Sequence[Session]) -> list[Score]:
        """Score each session for itself, by the last number of its last turn."""
        assert isinstance(task, Books)
        return [self._score(task, session) for session in sessions]

    def _score(self, task: Books, session: Session) -> Score:
        looked_up: list[str] = session.state.get("looked_up", [])
        useful = len(set(looked_up) & set(task.asked))
        failed = sum(count for name, count in session.tool_counts.items() if name.startswith("failed/"))
        wrong = failed + len(looked_up) - useful
        found = _NUMBER.findall(session.completion)
        is_right = bool(found) and found[-1] == task.answer
        reward = (1 - _LOOKED_UP_SHARE) * is_right + _LOOKED_UP_SHARE * useful / len(task.asked)
        return Score(reward - self._call_cost * wrong, {"exact": float(is_right), "wrong_calls": float(wrong)})
