"""Supervised samples: reading, tokenising, holding out, ordering.

Order: the sample at global position p (p counts every sample ever trained) is
`permutation(seed, p // n)[p % n]`. That is a pure function, so the position is the whole state of
the data: exact on resume and the same for any number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.packing import Sample
from triad.config.trainer import SftDataConfig
from triad.errors import DataError

_log = logging.getLogger("trainer")
_SHAPES = "either `messages`, or `prompt` and `completion`"


class SampleOrder:
    """The endless order in which samples are trained."""

    def __init__(self, num_samples: int, *, seed: int, shuffle: bool) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._permutation = np.arange(num_samples)

    def at(self, position: int) -> int:
        """Return the index of the sample at global position `position`."""
        epoch, place = divmod(position, self.num_samples)
        if self._shuffle and epoch != self._epoch:
            self._permutation = np.random.default_rng([self._seed, epoch]).permutation(self.num_samples)
            self._epoch = epoch
        return int(self._permutation[place])

    def batch(self, position: int, size: int) -> list[int]:
        """Return the indices of the next `size` samples from `position`; may cross an epoch."""
        return [self.at(place) for place in range(position, position + size)]


def fingerprint_samples(samples: Sequence[Sample]) -> str:
    """Return the xxh3-128 of the samples' tokens and masks, in order."""
    digest = xxhash.xxh3_128()
    for sample in samples:
        digest.update(len(sample.token_ids).to_bytes(8, "little"))
        digest.update(sample.token_ids.astype("<i4").tobytes())
        digest.update(sample.loss_mask.astype(np.uint8).tobytes())
    return digest.hexdigest()


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local directory or hub model."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"model.tokenizer = '{name}': no tokenizer could be loaded. {reason}") from None


def load_samples(
    config: SftDataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Return (training samples, validation samples), tokenised.

    Raises:
        DataError: the dataset is missing, lacks columns, or has a sample that is too long.
    """
    rows = read_rows(config, fits=_has_samples, shapes=_SHAPES)
    samples: list[Sample] = []
    too_long = untrained = 0
    for number, row in enumerate(rows):
        sample = tokenize_row(row, tokenizer, where=f"{config.name}, row {number}")
        if len(sample.token_ids) > config.seq_len:
            too_long += 1
            if config.too_long == "error":
                raise DataError(
                    f"{config.name}, row {number}: the sample has {len(sample.token_ids)} tokens, data.seq_len is "
                    f"{config.seq_len}. Raise data.seq_len, or set data.too_long to drop or truncate."
                )
            if config.too_long == "drop":
                continue
            sample = Sample(sample.token_ids[: config.seq_len], sample.loss_mask[: config.seq_len])
        if sample.num_targets:
            samples.append(sample)
        else:
            untrained += 1
    if too_long:
        done = "dropped" if config.too_long == "drop" else "cut"
        _log.warning("%s: %d samples of more than %d tokens were %s", config.name, too_long, config.seq_len, done)
    if untrained:
        _log.warning("%s: %d samples have nothing to train on and are left out", config.name, untrained)
    held_out = hold_out(len(samples), config.validation_fraction, seed=seed)
    training = [sample for number, sample in enumerate(samples) if number not in held_out]
    if not training:
        raise DataError(f"{config.name}: no samples to train on are left of {len(samples)}")
    return training, [samples[number] for number in sorted(held_out)]


def hold_out(num_samples: int, fraction: float, *, seed: int) -> set[int]:
    """Return which of the samples are for validation, chosen by `seed`."""
    shuffled = np.random.default_rng([seed, 2**31]).permutation(num_samples)
    return set(shuffled[: int(num_samples * fraction)].tolist())


def _has_samples(columns: set[str]) -> bool:
    return "messages" in columns or {"prompt", "completion"} <= columns


def read_rows(config: SftDataConfig, *, fits: Callable[[set[str]], bool], shapes: str) -> Iterable[Mapping[str, Any]]:
    """Return the rows of the dataset that `config` names.

    Args:
        fits: whether a dataset with these columns can be used.
        shapes: what rows must have, in words.

    Raises:
        DataError: it is missing, unreadable or empty, or lacks columns.
    """
    import datasets
    import datasets.exceptions

    datasets.disable_progress_bars()
    path = Path(config.name)
    looks_local = path.suffix in (".jsonl", ".json", ".parquet") or config.name.startswith((".", "/"))
    if not path.exists() and (looks_local or config.name.count("/") != 1):
        raise DataError(f"data.name = '{config.name}': there is no such file or directory (from {Path.cwd()})")
    try:
        if path.is_file():
            kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(path.suffix)
            if kind is None:
                raise DataError(f"data.name = '{config.name}': use a .jsonl or .parquet file, a directory or a hub id")
            rows = datasets.load_dataset(kind, data_files=str(path), split="train")
        else:
            rows = datasets.load_dataset(config.name, split=config.split)
    except StopIteration:  # what datasets makes of an empty file
        raise DataError(f"data.name = '{config.name}' holds no rows") from None
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = error.__cause__ or error
        raise DataError(f"data.name = '{config.name}' could not be read: {cause}") from None
    columns = set(rows.column_names or [])
    if not fits(columns):
        raise DataError(
            f"data.name = '{config.name}' has the columns {sorted(columns)}; rows need {shapes}. Rename the columns."
        )
    return rows  # type: ignore[return-value]  # a map-style Dataset iterates over dicts


def tokenize_row(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, *, where: str) -> Sample:
    """Return the sample of one row. Only what the assistant says (or the completion) is trained.

    Pieces are tokenised apart, as they are at inference, where a prompt's tokens are fixed before
    the completion exists.

    Args:
        where: file and row, for error messages.
    """
    if row.get("messages") is not None:
        pieces = _chat_pieces(row["messages"], tokenizer, where)
    elif isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        pieces = [(row["prompt"], False), (row["completion"] + (tokenizer.eos_token or ""), True)]
    elif isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
        pieces = _chat_pieces(row["prompt"] + row["completion"], tokenizer, where, first_trained=len(row["prompt"]))
    else:
        raise DataError(f"{where}: rows need {_SHAPES} (both text or both lists of messages)")
    ids: list[int] = []
    mask: list[bool] = []
    for number, (text, trained) in enumerate(pieces):
        piece = tokenizer(text, add_special_tokens=number == 0 and row.get("messages") is None)["input_ids"]
        ids += piece
        mask += [trained] * len(piece)
    return Sample(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=bool))


def _chat_pieces(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, where: str, *, first_trained: int = 0
) -> list[tuple[str, bool]]:
    """Split a rendered chat into (text, trained) pieces at the borders of assistant messages."""
    if not tokenizer.chat_template:
        raise DataError(f"{where}: the row holds messages, but the tokenizer has no chat template")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise DataError(f"{where}: a message needs `role` and `content`, got {message!r:.120}")
    pieces: list[tuple[str, bool]] = []
    done = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < first_trained:
            continue
        before = _render(messages[:number], tokenizer, where, generation_prompt=True)
        after = _render(messages[: number + 1], tokenizer, where)
        if not before.startswith(done) or not after.startswith(before):
            raise DataError(
                f"{where}: the chat template does not render this chat piece by piece (it changes earlier turns), "
                "so the tokens to train cannot be told. Use prompt and completion columns instead."
            )
        pieces += [(before[len(done) :], False), (after[len(before) :], True)]
        done = after
    if not pieces:
        raise DataError(f"{where}: there is no assistant message to train on")
    return pieces


def _render(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, where: str, *, generation_prompt: bool = False
) -> str:
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    except Exception as error:  # noqa: BLE001 - jinja raises whatever the template's author chose
        raise DataError(f"{where}: the chat template refused these messages: {error}") from None
    return str(rendered)
