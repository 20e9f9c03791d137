"""Sessions whose policy says what a test gives it."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from holdfast.chat.tokenizer import Tokenizer
from holdfast.orchestrator.env.interface import Session
from holdfast.protocol.inference import Completion
from holdfast.protocol.rollouts import Logprobs, TokenIds, VersionSpan

Asked = list[tuple[list[int], int, int]]


def scripted_session(
    tokenizer: Tokenizer, prompt: Sequence[int], turns: Sequence[list[int]], *, asked: Asked | None = None,
    before: Callable[[int], Awaitable[object]] | None = None, **settings: Any,
) -> Session:  # fmt: skip
    """Return a session that samples `turns`, cut to what is allowed; turn N is of version N, with log-probs -1 - N.
    `asked`: gets the tokens, the number and the room of each turn. `before`: is awaited ahead of each turn, with its
    number."""

    async def sample_turn(token_ids: list[int], turn: int, most: int) -> Completion:
        if before is not None:
            await before(turn)
        if asked is not None:
            asked.append((token_ids, turn, most))
        sampled = turns[turn][:most]
        reason = "stop" if sampled == turns[turn] and sampled[-1] in tokenizer.stop_token_ids else "length"
        spans = [VersionSpan(turn, 0, len(sampled))]
        return Completion(TokenIds(sampled), Logprobs([-1.0 - turn] * len(sampled)), reason, spans)

    limits: dict[str, Any] = {"seq_len": 20_000, "max_tokens": 500} | settings
    return Session(prompt, tokenizer=tokenizer, sample_turn=sample_turn, **limits)
