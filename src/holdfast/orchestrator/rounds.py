"""Makes batches in rounds, so that no engine waits for the slowest answer of a batch (`schedule = "rounds"`).

The clock is tokens. In a round every session in a slot samples `round_tokens` tokens, or ends. Between two rounds, in
an order that depends only on counts, finished groups are collected, a batch is taken, tasks are drawn, and sessions
take the free slots. New weights are served when a batch has been taken. The seed and the tokens decide which version
samples which token, and which groups meet in a batch. Time decides nothing, and a killed run makes the same rounds.

A part is what a session samples of a turn in one round: one request to the engines. The state after a batch holds the
parts of all open groups, and one rename publishes both. After a restart the environments of the open groups run again,
and get the same parts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from holdfast.chat.tokenizer import Tokenizer
from holdfast.errors import ConfigError
from holdfast.orchestrator.batch_maker import BatchMaker, Selection
from holdfast.orchestrator.episodes import Outcome, Problem, Sampler, TurnRequest
from holdfast.orchestrator.generation_log import Answer, prompt_hash
from holdfast.orchestrator.group_players import GroupPlayer, TurnCache
from holdfast.orchestrator.judge_client import guarded
from holdfast.orchestrator.state import OpenGroup, OrchestratorState, RoundsState, TaskSeed, stable_seed
from holdfast.orchestrator.weight_sync import PublishedWeights
from holdfast.protocol.inference import Completion
from holdfast.protocol.rollouts import Dropped, Logprobs, Sampling, TokenIds, VersionSpan, decode_packed, encode_packed

_log = logging.getLogger("orchestrator")

# A group is scored while the next round is played, and collected after it.
_SCORING_ROUNDS = 1

_TELL_AFTER_S = 60.0

# Digest of the prompt, distribution, most tokens, seed: what a part depends on beside the weights.
_PartKey = tuple[str, Sampling, int, int]

_encode = msgspec.msgpack.Encoder(enc_hook=encode_packed).encode
_decode = msgspec.msgpack.Decoder(list[list[Answer]], dec_hook=decode_packed).decode


@dataclass(eq=False)
class _TokenClock:
    """The tokens of one session: in each round from `first` on it may sample as many as the round has.

    Attributes:
        first: -1: it waits for a slot.
        used: tokens that it has sampled.
        is_waiting: for the next round.
        has_ended: also while a group is played once more, because its worker has died.
    """

    first: int
    used: int = 0
    is_waiting: bool = False
    has_ended: bool = False


class _LiveGroup:
    """An open group that is played; the sampler of its sessions."""

    def __init__(self, maker: RoundsMaker, entry: OpenGroup, problem: Problem, parts: dict[_PartKey, Answer]) -> None:
        self.entry = entry
        self.problem = problem
        self.parts = parts
        self.outcome: Outcome | None = None
        self._maker = maker
        self._clocks = [_TokenClock(first) for first in entry.first_rounds]
        self._turns = TurnCache(self)
        self._turns.is_resting = lambda: not self._has_ended and self._is_settled()
        player = GroupPlayer(maker.config, maker.tokenizer, self, maker.workers)
        self._playing = asyncio.create_task(self._play(player))
        self._playing.add_done_callback(self._note_end)

    async def _play(self, player: GroupPlayer) -> Outcome:
        return self.entry.dropped or await player.play(self.problem, self.entry.step, turns=self._turns)

    @property
    def num_running(self) -> int:
        """How many sessions have a slot."""
        if self._has_ended:
            return 0
        return sum(clock.first >= 0 and not clock.has_ended for clock in self._clocks)

    @property
    def _has_ended(self) -> bool:
        return self._playing.done() or all(clock.has_ended for clock in self._clocks)

    def admit(self, number: int, *, first: int) -> int:
        """Give slots to at most `number` sessions that wait, from round `first` on; return how many it took."""
        if self._has_ended:
            return 0
        waiting = [i for i, clock in enumerate(self._clocks) if clock.first < 0][:number]
        for i in waiting:
            self._clocks[i].first = self.entry.first_rounds[i] = first
        return len(waiting)

    async def settle(self) -> bool:
        """Wait until every session has ended or waits for the next round; return whether it had to wait."""
        has_waited = False
        while not self._is_settled():
            has_waited = True
            self._turns.changed.clear()
            await self._wait_for_change()
        if self._playing.done():
            self._playing.result()  # an environment that stops the run
        return has_waited

    async def _wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(_TELL_AFTER_S):
                await self._turns.changed.wait()
        except TimeoutError:
            if not self._maker.sampler.is_asking:
                _log.warning(
                    "round %d waits for environment '%s', task %d: a session has neither sampled nor ended for %.0f s. "
                    "It must not wait for another session, such as for a lock that is held during sample()",
                    self._maker.round,
                    self.problem.name,
                    self.problem.task_id,
                    _TELL_AFTER_S,
                )

    def _is_settled(self) -> bool:
        return self._playing.done() or all(
            clock.has_ended or (i in self._turns.asking and clock.is_waiting and self._is_over(clock))
            for i, clock in enumerate(self._clocks)
        )

    async def collect(self, last_round: int) -> None:
        """Wait for the scores of a group that was played to its end by `last_round`."""
        if self.outcome is None and self._has_ended and self._end_round() <= last_round:
            self.outcome = await self._playing

    def _end_round(self) -> int:
        """Return the round in which the last session ended: from its tokens, since a restart plays it at once."""
        begin = max(self.entry.first_rounds)
        size = self._maker.round_tokens
        rounds = [(clock.used - 1) // size if size and clock.used else 0 for clock in self._clocks]
        return max(
            begin if clock.first < 0 else clock.first + own for clock, own in zip(self._clocks, rounds, strict=True)
        )

    def note_drop(self) -> None:
        """Note in the state that the group was dropped before its sessions had ended.

        Played again, its sessions might get further until then, as far as the rounds allow that were played since."""
        if self._playing.done() and not all(clock.has_ended for clock in self._clocks):
            outcome = self._playing.result()
            assert isinstance(outcome, Dropped)
            self.entry.dropped, self.entry.first_rounds = outcome, [self._end_round()] * len(self._clocks)
            self.parts.clear()

    def _note_end(self, playing: asyncio.Task[Outcome]) -> None:
        error = None if playing.cancelled() else playing.exception()
        if isinstance(error, Exception):
            self._maker.sampler.failure.set(error)  # now, not when the groups before have settled
        self._turns.changed.set()

    async def close(self) -> None:
        """Stop playing."""
        self._playing.cancel()
        await asyncio.gather(self._playing, return_exceptions=True)

    def check(self) -> None:
        self._maker.sampler.check()

    def leave(self, sample_index: int) -> None:
        if 0 <= sample_index < len(self._clocks):  # a worker sends it
            self._clocks[sample_index].has_ended = True

    async def sample(self, turn: TurnRequest) -> Completion:
        clock = self._clocks[turn.sample_index]
        if clock.has_ended:
            self._maker.sampler.failure.set(
                ConfigError(
                    f"environment '{self.problem.name}' samples after run() has ended (in score(), or because it does "
                    "not repeat itself), which 'rounds' does not support: set orchestrator.schedule = 'strict'"
                )
            )
            self.check()
        parts, position, token_ids = list[Completion](), 0, turn.token_ids
        while True:
            most = min(turn.max_tokens - position, await self._granted(clock))
            # A seed for each part: an engine starts its random numbers again with each request.
            seed = stable_seed("part", turn.seed, position) if position else turn.seed
            part = await self._part(replace(turn, token_ids=token_ids, max_tokens=most, seed=seed))
            if position and turn.sampling.stop:
                part = _to_stop(part, token_ids[-position:], turn.sampling.stop, self._maker.tokenizer)
            parts.append(part)
            clock.used += len(part.token_ids)
            position += len(part.token_ids)
            if part.finish_reason != "length" or position >= turn.max_tokens:
                return _joined(parts)
            token_ids = [*token_ids, *part.token_ids]

    async def _granted(self, clock: _TokenClock) -> int:
        """Return how many tokens the session may sample in this round, as soon as there is one."""
        while self._is_over(clock):
            clock.is_waiting = True
            self._turns.changed.set()
            await self._maker.next_round.wait()
            clock.is_waiting = False
        # No more than to the end of a round, also after a restart, when several are open: the parts must be the same.
        size = self._maker.round_tokens
        return size - clock.used % size if size else 2**31

    def _is_over(self, clock: _TokenClock) -> bool:
        """Whether the session has no tokens left in the rounds up to this one."""
        size = self._maker.round_tokens
        return clock.first < 0 or self._maker.round < clock.first + (clock.used // size if size else 0)

    async def _part(self, asked: TurnRequest) -> Completion:
        key = (prompt_hash(asked.token_ids), asked.sampling, asked.max_tokens, asked.seed)
        if (found := self.parts.get(key)) is None:
            part = await self._maker.sampler.sample(asked)
            found = self.parts[key] = Answer(key[0], asked.sampling, asked.max_tokens, [asked.seed], [part])
        else:
            self._maker.num_reused += 1
        return found.completions[0]


def _order(part: Answer) -> tuple[int, int, str]:
    return part.seeds[0], part.max_tokens, part.prompt


def _joined(parts: Sequence[Completion]) -> Completion:
    """Return the parts of one turn as one completion."""
    if len(parts) == 1:
        return parts[0]
    token_ids, logprobs, versions = TokenIds(), Logprobs(), list[VersionSpan]()
    for part in parts:
        start = len(token_ids)
        versions += [span.moved(start) for span in part.versions]
        token_ids.extend(part.token_ids)
        logprobs.extend(part.logprobs)
    return Completion(token_ids, logprobs, parts[-1].finish_reason, versions)


def _to_stop(part: Completion, before: list[int], stop: Sequence[str], tokenizer: Tokenizer) -> Completion:
    """Return a part up to the token that completes a stop text across its beginning, which the engine does not see.
    `before`: tokens of the turn before the part."""
    reach = max(len(text.encode()) for text in stop)  # a token has a byte or more
    for number in range(1, min(len(part.token_ids), reach) + 1):
        text = tokenizer.decode([*before[-reach:], *part.token_ids[:number]], skip_special_tokens=False)
        if any(one in text for one in stop):
            versions = [VersionSpan(one.version, one.start, min(one.end, number), one.seed) for one in part.versions]
            return Completion(
                TokenIds(part.token_ids[:number]),
                Logprobs(part.logprobs[:number]),
                "stop",
                [span for span in versions if span.start < number],
            )
    return part


@dataclass(eq=False)
class RoundsMaker(BatchMaker):
    """Makes one batch after another in rounds; groups stay open between batches.

    With `async_level` 0 a round has no end, and the batches equal the batches of the strict schedule.

    Attributes:
        round: the round that is played, or was played last; -1 before the first.
        next_round: set when the next round begins.
        sampler: of the batch that is made.
    """

    round: int = field(default=-1, init=False)
    next_round: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    sampler: Sampler = field(init=False)
    _open: list[_LiveGroup] = field(default_factory=list, init=False)
    _is_restored: bool = field(default=False, init=False)

    @property
    def round_tokens(self) -> int:
        """The tokens of a round; 0: no end."""
        return self.config.tokens_of_round

    @property
    def most_sessions(self) -> int:
        """How many sessions have a slot at once, at most; the engines themselves hold a round without an end back."""
        most = super().most_sessions
        return most if self.round_tokens else max(most, self.config.problems_per_step * self.config.largest_group)

    async def make(self, step: int, weights: PublishedWeights) -> Selection:
        """Return the groups of batch `step`: the oldest that are done, sampled by `weights` and versions before them.

        Raises EnvironmentFailure if an environment failed and `on_error` is `stop`, or no group is left; InferenceError
        if an engine failed; ConfigError if an environment samples while it scores."""
        state = self.state.copy()
        rounds = state.rounds = state.rounds or RoundsState()
        rounds.digests[weights.version] = weights.digest
        self.sampler = Sampler(self.client, self._open_log(step, weights.digest))
        self.num_reused = 0
        slot_rounds = 0

        async def play() -> list[_LiveGroup]:
            nonlocal slot_rounds
            if not self._is_restored:
                await self._restore(rounds)
            while not (taken := self._next_batch(step)):
                self._admit(state, step, weights.version)
                slot_rounds += sum(group.num_running for group in self._open)
                await self._play_round()
            return taken

        try:
            taken = await guarded(self.sampler.failure.guard(play()))
        except BaseException:
            await self.close()  # first: a request that is cancelled would look like a failure of an environment
            raise
        finally:
            await self.sampler.close()
        self.num_reused += self.sampler.num_reused
        self._open = [group for group in self._open if group not in taken]
        selection = self._finish(step, state, [group.outcome for group in taken if group.outcome is not None])
        versions = {span.version for rollout in selection.rollouts for span in rollout.versions}
        self.digests = {version: rounds.digests[version] for version in sorted(versions - {weights.version})}
        num_rounds = self.round - rounds.round
        self._keep(state, rounds)
        self.metrics = {
            "rounds/played": float(num_rounds),
            "rounds/open_groups": float(len(self._open)),
            "rounds/slots_used": slot_rounds / (num_rounds * self.most_sessions) if num_rounds else 0.0,
        }
        return selection

    async def close(self) -> None:
        """Stop playing the open groups."""
        for group in self._open:
            await group.close()

    async def _restore(self, rounds: RoundsState) -> None:
        """Play the open groups of the state again, up to the last round that was played."""
        self._is_restored, self.round = True, rounds.round
        for entry, parts in zip(rounds.open, _decode(rounds.parts) if rounds.parts else [], strict=True):
            known: dict[_PartKey, Answer] = {
                (one.prompt, one.sampling, one.max_tokens, one.seeds[0]): one for one in parts
            }
            seed = TaskSeed(self.config.seed, entry.environment, entry.index, level=entry.level)
            self._open.append(_LiveGroup(self, entry, self._problem(seed, entry.task_id), known))
        await self._settle()

    def _keep(self, state: OrchestratorState, rounds: RoundsState) -> None:
        """Write what is open into the state."""
        rounds.round = self.round
        for group in self._open:
            group.note_drop()
        rounds.open = [group.entry for group in self._open]
        # Sorted, because engines answer in any order.
        rounds.parts = _encode([sorted(group.parts.values(), key=_order) for group in self._open])
        for name, position in state.environments.items():
            position.open = sorted(entry.task_id for entry in rounds.open if entry.environment == name)
        parts = [part for group in self._open for part in group.parts.values()]
        versions = {span.version for part in parts for one in part.completions for span in one.versions}
        rounds.digests = {version: digest for version, digest in rounds.digests.items() if version in versions}

    def _next_batch(self, step: int) -> list[_LiveGroup]:
        """Return the groups of the next batch, the oldest that are done; empty if a group is missing.

        A dropped group waits for all older groups: failures are quick, and would fill a batch. The trainer waits for
        older groups if they would be too old for the batches after that have a place for them."""
        number, level = self.config.problems_per_step, self.config.async_level
        missing = [place for place, group in enumerate(self._open) if group.outcome is None]
        first = missing[0] if missing else len(self._open)
        done = [*self._open[:first], *(group for group in self._open[first:] if isinstance(group.outcome, list))][
            :number
        ]
        left = [group for group in self._open if group not in done]
        is_late = any(group.entry.version + level < step + place // number for place, group in enumerate(left))
        return [] if len(done) < number or (is_late and done != self._open[:number]) else done

    def _admit(self, state: OrchestratorState, step: int, version: int) -> None:
        """Give free slots to the sessions that wait, and to sessions of new groups as far as their age allows."""
        free = max(0, self.most_sessions - sum(group.num_running for group in self._open))
        for group in self._open:
            free -= group.admit(free, first=self.round + 1)
        # Each batch takes `problems_per_step`, so a group that is drawn now is in batch `version + 1 + async_level` or
        # before.
        most = (version + 2 + self.config.async_level - step) * self.config.problems_per_step
        while free > 0 and len(self._open) < most:
            (problem,) = self._choose_problems(state, 1)
            size = self.config.rollouts_of(problem.settings).group_size
            entry = OpenGroup(
                environment=problem.name,
                index=problem.seed.index,
                level=problem.seed.level,
                task_id=problem.task_id,
                step=step,
                version=version,
                first_rounds=[-1] * size,
            )
            group = _LiveGroup(self, entry, problem, {})
            self._open.append(group)
            free -= group.admit(free, first=self.round + 1)

    async def _play_round(self) -> None:
        self.round += 1
        begun, self.next_round = self.next_round, asyncio.Event()
        begun.set()
        await self._settle()

    async def _settle(self) -> None:
        """Wait for the end of the round, and for the scores that are due."""
        # Once more: the death of a worker plays groups again that had settled.
        while any([await group.settle() for group in self._open]):
            pass
        for group in self._open:
            await group.collect(self.round - _SCORING_ROUNDS)
