"""The log of the engines' answers for the batch in progress: a killed orchestrator asks for nothing twice.

`rollouts/generations_N.log` has one record per answer: see `holdfast.run.record_log` for the frame, and docs/files.md
for a program that reads it. Records are msgpack maps of `Header` and `Answer`. The key of an answer is everything that
a sampled token depends on (digest of the weights, prompt, seed, distribution, limits). After a restart the environments
run again, and get the same answers.

An answer counts when it is in the page cache, so a killed process loses nothing. After a power cut the last answers may
be sampled again with the same seeds; nothing durable depends on them.
"""

import logging
from array import array
from collections.abc import Sequence

import msgspec
import xxhash

from holdfast.errors import RunDirError
from holdfast.orchestrator.client.http import fault_of_logprobs, problem_of
from holdfast.protocol.inference import Completion
from holdfast.protocol.rollouts import Sampling, decode_packed, encode_packed
from holdfast.run.record_log import RecordLog, read_records, whole_bytes
from holdfast.run.run_dir import RunDir

_log = logging.getLogger("orchestrator")

_FORMAT = 6


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """First record: weights and settings with which all answers of the log were sampled."""

    format: int
    step: int
    weights_digest: str
    stop_token_ids: list[int]
    teacher_digest: str = ""


class Answer(msgspec.Struct):
    """One answer of an engine, or the log-probabilities of a teacher.

    Attributes:
        prompt: xxh3-128 of the prompt's ids as little-endian int64, in hexadecimal.
        max_tokens: of the request; 0 for a teacher, whose completion has only the `logprobs` of the prompt.
        completions: one per seed.
    """

    prompt: str
    sampling: Sampling
    max_tokens: int
    seeds: list[int]
    completions: list[Completion]


decode_answer = msgspec.msgpack.Decoder(Answer, dec_hook=decode_packed).decode
"""Returns the answer in a record of a log, any but the first. Raises msgspec.DecodeError."""


class GenerationLog:
    """Append-only log of finished generations of one batch, indexed in memory.

    Raises RunDirError if the file cannot be read or written."""

    def __init__(
        self,
        run_dir: RunDir,
        step: int,
        *,
        weights_digest: str,
        stop_token_ids: list[int],
        teacher_digest: str = "",
        vocab_size: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self.path = run_dir.generations(step)
        self.header = Header(_FORMAT, step, weights_digest, stop_token_ids, teacher_digest)
        self._found: dict[tuple[str, Sampling, int, int], Completion] = {}
        self._encoder = msgspec.msgpack.Encoder(enc_hook=encode_packed)
        try:
            valid_bytes = self._load()
            self._records = RecordLog(self.path, valid_bytes=valid_bytes)
        except OSError as error:
            raise self._unwritable(error) from error
        if valid_bytes == 0:
            try:
                self._append(self.header)
            except RunDirError:
                self._records.close()
                raise
        if self._found:
            _log.info("batch %d: %d finished generations are there already", step, len(self._found))

    def find(self, token_ids: Sequence[int], *, sampling: Sampling, max_tokens: int, seed: int) -> Completion | None:
        """Return what was sampled for this request, or None."""
        return self._found.get((prompt_hash(token_ids), sampling, max_tokens, seed)) if self._found else None

    def append(
        self,
        token_ids: Sequence[int],
        *,
        sampling: Sampling,
        max_tokens: int,
        seeds: Sequence[int],
        completions: Sequence[Completion],
    ) -> None:
        """Keep an answer. Raises RunDirError if it cannot be written."""
        self._append(Answer(prompt_hash(token_ids), sampling, max_tokens, list(seeds), list(completions)))

    def close(self) -> None:
        """Close the file; a thread makes the rest of it durable."""
        self._records.close()

    def _append(self, record: Header | Answer) -> None:
        try:
            self._records.append(self._encoder.encode(record))
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> RunDirError:
        return RunDirError(
            f"generations of batch {self.header.step} cannot be kept in {self.path}: {error.strerror or error}. "
            "Mend that and start again: the run continues after what is there."
        )

    def _load(self) -> int:
        """Index the records of the file; return where they end, 0 for a log of other weights."""
        if not self.path.exists():
            return 0
        payloads, damages = read_records(self.path)
        for damage in damages:
            _log.warning("%s: %s; what it held is sampled again", self.path, damage)
        if not payloads:
            return 0
        if payloads[0] != self._encoder.encode(self.header):
            _log.warning("%s has no header, or one of other weights or settings: its batch is sampled again", self.path)
            return 0
        problems = [problem for payload in payloads[1:] if (problem := self._index(payload)) is not None]
        if problems:
            _log.warning(
                f"{self.path}: {len(problems)} of {len(payloads) - 1} answers cannot be right and are asked for again; "
                f"the first: {problems[0]}"
            )
        # Damage in the middle stays: a cut would lose the answers after it.
        return whole_bytes(self.path, damages)

    def _index(self, payload: bytes) -> str | None:
        """Index the answer in a record, or return why it cannot be one: an older version may have checked less."""
        try:
            answer = decode_answer(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return str(error)
        if len(answer.seeds) != len(answer.completions):
            return f"{len(answer.completions)} completions for {len(answer.seeds)} seeds"
        for completion in answer.completions:
            if (problem := self._problem(completion, answer)) is not None:
                return problem
        for seed, completion in zip(answer.seeds, answer.completions, strict=True):
            self._found[answer.prompt, answer.sampling, answer.max_tokens, seed] = completion
        return None

    def _problem(self, completion: Completion, answer: Answer) -> str | None:
        if answer.max_tokens == 0:
            return fault_of_logprobs("logprobs", completion.logprobs)
        return problem_of(
            completion,
            max_tokens=answer.max_tokens,
            stop_token_ids=self.header.stop_token_ids,
            has_stop_texts=bool(answer.sampling.stop),
            vocab_size=self._vocab_size,
        )


def discard_generations(run_dir: RunDir, *, up_to: int) -> None:
    """Remove the logs of published batches, up to step `up_to`."""
    for path in run_dir.rollouts.glob("generations_*.log"):
        step = path.stem.removeprefix("generations_")
        if step.isdecimal() and int(step) <= up_to:
            path.unlink(missing_ok=True)


def prompt_hash(token_ids: Sequence[int]) -> str:
    """Return the digest of a prompt, as in `Answer.prompt`."""
    return xxhash.xxh3_128_hexdigest(array("q", token_ids).tobytes())
