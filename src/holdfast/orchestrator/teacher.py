"""A teacher for distillation: a fixed model on its own inference servers. Nothing is ever pushed to these servers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from holdfast.config.orchestrator import OrchestratorConfig
from holdfast.errors import CheckpointError, InferenceError
from holdfast.orchestrator.client.client import Affinity, InferenceClient
from holdfast.orchestrator.client.http import load_vocab_size
from holdfast.orchestrator.client.pool import Engine
from holdfast.orchestrator.generation_log import GenerationLog
from holdfast.orchestrator.tasks import phase
from holdfast.process import events
from holdfast.protocol.inference import Completion, GenerateRequest, ServedWeights
from holdfast.protocol.rollouts import PLAIN_SAMPLING, Logprobs, Rollout, TokenIds


async def adopt_served_weights(client: InferenceClient, *, key: str) -> str:
    """Return the digest of the weights that all servers serve, and refuse others from now on.

    Raises InferenceError if a server of the section `key` has no weights, or two have different weights."""
    found: dict[Engine, ServedWeights] = {}

    async def look(engine: Engine) -> None:
        found[engine] = await engine.served()

    while not found:
        await client.pool.wait_for_any()
        await client.pool.attend(look)
    first, expected = next((engine, served.digest) for engine, served in found.items())
    for engine, served in found.items():
        if expected is None or served.version is None or served.digest is None:
            raise InferenceError(f"{engine.url} has no weights. Start it with --model.load auto.")
        if served.digest != expected:
            raise InferenceError(
                f"{engine.url} serves weights with digest {served.digest}, {first.url} with digest "
                f"{expected}: all servers of {key}.urls must serve the same"
            )
    assert expected is not None

    async def check_unchanged(engine: Engine) -> None:
        served = await engine.served()
        if served.digest != expected:
            raise InferenceError(
                f"{engine.url} came back with other weights: digest {served.digest}, was {expected}. "
                "Does a run push weights to it? A teacher must not be trained."
            )

    client.expect(version=None, restore=check_unchanged)
    return expected


# Mark log-probabilities of the teacher in the log of generations.
_JUDGEMENT_TOKENS, _JUDGEMENT_SEED = 0, 0


@dataclass(frozen=True)
class Teacher:
    """A model with fixed weights of the digest `digest`."""

    client: InferenceClient
    digest: str

    async def add_logprobs(self, rollout: Rollout, log: GenerationLog, *, affinity: Affinity) -> None:
        """Fill in the `reference_logprobs` of a finished rollout, from `log` or the servers.

        Raises InferenceError if a server failed, or serves other weights."""
        # One branch after the other: the servers have cached the start of the next one.
        judged = Logprobs()
        for branch in rollout.branches:
            judged.extend(await self._judged(rollout.token_ids[branch].tolist(), log, affinity=affinity))
        pairs = zip(judged, rollout.loss_mask, strict=True)
        # 0 for tokens that were not sampled, as in `logprobs`.
        rollout.reference_logprobs = Logprobs([value if sampled else 0.0 for value, sampled in pairs])

    async def _judged(self, token_ids: list[int], log: GenerationLog, *, affinity: Affinity) -> Logprobs:
        found = log.find(token_ids, sampling=PLAIN_SAMPLING, max_tokens=_JUDGEMENT_TOKENS, seed=_JUDGEMENT_SEED)
        if found is None:
            found = Completion(TokenIds(), await self._ask(token_ids, affinity=affinity), "judged", [])
            log.append(
                token_ids,
                sampling=PLAIN_SAMPLING,
                max_tokens=_JUDGEMENT_TOKENS,
                seeds=[_JUDGEMENT_SEED],
                completions=[found],
            )
        return found.logprobs

    async def _ask(self, token_ids: list[int], *, affinity: Affinity) -> Logprobs:
        # An engine samples at least one token.
        request = GenerateRequest(
            token_ids=token_ids,
            seeds=[0],
            max_tokens=1,
            stop_token_ids=[],
            weights_digest=self.digest,
            prompt_logprobs=True,
        )
        (choice,) = await self.client.generate(request, affinity=affinity)
        given = choice.prompt_logprobs or []
        if len(given) != len(token_ids) - 1:
            raise InferenceError(
                f"the teacher gave {len(given)} log-probabilities for {len(token_ids)} tokens; expected one for each "
                "but the first"
            )
        # Nothing predicts the first token.
        return Logprobs([0.0, *given])


@asynccontextmanager
async def connect_teacher(config: OrchestratorConfig, *, digest: str) -> AsyncIterator[Teacher | None]:
    """Wait for the teacher's servers and give the teacher; None if the run has none.

    Raises InferenceError if a server does not answer, or serves another model or none; ConfigError if a server's
    longest session is too short; CheckpointError if the batches so far have a teacher of another `digest` (empty before
    the first batch)."""
    if config.teacher is None:
        yield None
        return
    events.report("waiting for the teacher", urls=",".join(config.teacher.urls))
    # The policy must have the tokens that a teacher samples.
    vocab_size = load_vocab_size(config.model.name) if config.is_sampled_by_teacher else None
    async with InferenceClient(config.teacher, key="teacher", vocab_size=vocab_size) as client:
        # A request for log-probabilities samples one token after the session.
        room = config.seq_len + (config.teacher.mode == "logprobs")
        with phase("waiting for the teacher"):
            await client.wait_until_ready(model=config.teacher.model, seq_len=room)
            served = await adopt_served_weights(client, key="teacher")
        if digest not in ("", served):
            raise CheckpointError(
                f"the teacher '{config.teacher.model}' has weights with digest {served}; the batches so far "
                f"were made with digest {digest}. Serve the same teacher again, or start a new run."
            )
        yield Teacher(client, digest=served)
