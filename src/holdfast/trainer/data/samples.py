"""Supervised samples: reads, tokenises, splits and orders them.

The sample at global position p (p counts every sample ever trained) is `permutation(seed, p // n)[p % n]`. This is a
pure function, so the position is the whole state of the data. Resumes are exact, for any number of ranks.

One process of a machine makes the token cache on all its cores, and the other ranks wait. They wait in collectives that
repeat while it works, so no deadline of a collective limits the size of the data.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import tokenizers
import xxhash
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from holdfast.chat.tokenizer import Tokenizer
from holdfast.chat.tokenizer import load_tokenizer as load_orchestrator_tokenizer
from holdfast.config.data import LEAST_SHARE, MixedDataConfig, SftDataConfig
from holdfast.errors import ConfigError, DataError
from holdfast.process.events import report
from holdfast.run.data_files import find_files, left_out
from holdfast.run.rows import Rows, read_rows
from holdfast.trainer.data.formats import SAMPLE_FORMATS, Format, find_format, has_format, refuse_mistaken
from holdfast.trainer.data.remarks import lines_of, tell, tell_samples
from holdfast.trainer.data.rows import BadRows, Sample
from holdfast.trainer.data.same_tokens import differences, differences_at_borders, texts_of_rows, way_out
from holdfast.trainer.data.tokenizing import (
    FEW_ROWS,
    CachedSamples,
    ChosenSamples,
    JoinedSamples,
    TrainedSamples,
    cache_directory,
    cache_key,
    make_cached,
    open_cached,
    ordered_chunks,
    sizes_of,
    tokenize_rows,
)

if TYPE_CHECKING:
    from holdfast.trainer.mesh import Mesh

_TELL_S = 10.0
_CHECKED_ROWS = 3
_BLOCK = round(1 / LEAST_SHARE)
_Work = Generator[None, None, str | None]


def read_samples(
    config: SftDataConfig, tokenizer: Tokenizer, formats: tuple[Format, ...], *, mesh: Mesh | None
) -> tuple[Sequence[Sample], Format]:
    """Return the samples of all rows, in their order, and how the rows are written. Raise ConfigError or DataError if
    the dataset is missing, lacks columns, or has a row that cannot be used. `mesh`: the ranks, if there are several:
    all get all samples. Collective then."""
    files = find_files(config.name, key="data.name", split=config.split)
    is_main = mesh is None or mesh.is_main
    if is_main and files is None:
        report(f"asking the hub for {config.name}")
    if is_main and files is not None and Path(config.name).is_dir() and (others := left_out(config.name, files)):
        report(f"WARNING: {config.name}: data.split = '{config.split}' leaves out {others}")
    make = partial(_make, config, tokenizer, formats)
    cached = _cached(config, make, mesh) if config.cache_dir != "" else None
    if cached is not None:
        _check_text(tokenizer, (), is_told=is_main)
        form = formats[cached.about.format]
        if is_main:
            report("tokenised", rows=f"{cached.about.rows:,}", format=form.name, cache=str(cached.directory))
        about = cached.about
        tell([*about.bad.settle(config, about.rows), *lines_of(about.remarks)], config, is_told=is_main)
        return cached.samples, form
    rows, place = open_dataset(config, formats, is_reported=is_main)
    _check_text(tokenizer, _first_rows(rows), is_told=is_main)
    if mesh is not None and len(counts := set(mesh.gather(len(rows)))) > 1:
        raise DataError(f"data.name = '{config.name}' has other numbers of rows on other machines: {sorted(counts)}")
    encode = partial(formats[place].encode, tokenizer=tokenizer, config=config)
    return tokenize_rows(rows, encode, config, is_told=is_main), formats[place]


def open_dataset(config: SftDataConfig, formats: tuple[Format, ...], *, is_reported: bool) -> tuple[Rows, int]:
    """Return the rows of a dataset and the place of their format, which is reported as well where `is_reported`. Raise
    DataError if the dataset is missing, unreadable or empty, or its first row has no known columns."""
    rows = read_rows(config.name, split=config.split)
    taken = (row for place in range(len(rows)) for _, row in rows.take(place, place + 1))
    objects = (row for row in taken if not isinstance(row, DataError))
    first = next(objects, None)
    if first is not None and config.on_bad_row == "drop":  # this row may lack columns
        first = next((row for row in chain([first], objects) if has_format(row, formats)), first)
    if first is None:
        BadRows(len(rows), tuple(str(row) for _, row in rows.take(0, 10))).settle(config, len(rows))
    assert first is not None, "settle has raised"
    refuse_mistaken(first, formats, name=config.name)
    form = find_format(first, formats, name=config.name)
    if is_reported:
        report("tokenising", rows=f"{len(rows):,}", format=form.name)
    return rows, formats.index(form)


def _first_rows(rows: Rows) -> list[object]:
    return [row for _, row in rows.take(0, min(_CHECKED_ROWS, len(rows))) if not isinstance(row, DataError)]


def _make(config: SftDataConfig, tokenizer: Tokenizer, formats: tuple[Format, ...]) -> _Work:
    """Put missing samples into the cache; return their name in the cache, or None. Yields now and then."""
    yield
    try:
        directory = cache_directory(config)
    except RuntimeError as error:
        _say_not_kept("the home directory", str(error))
        return None
    key = cache_key(config, tokenizer, formats)
    if open_cached(directory / key, verify=True, is_said=True) is not None:
        return key
    rows, place = open_dataset(config, formats, is_reported=False)
    if len(rows) <= FEW_ROWS:
        return None
    _check_text(tokenizer, _first_rows(rows), is_told=False)
    report("tokenising", rows=f"{len(rows):,}", format=formats[place].name, cache=str(directory / key))
    try:
        chunks = ordered_chunks(rows, partial(formats[place].encode, tokenizer=tokenizer, config=config), config)
        for _ in make_cached(
            directory / key, chunks, format_place=place, is_current=lambda: cache_key(config, tokenizer, formats) == key
        ):
            yield
    except OSError as error:
        _say_not_kept(str(directory), error.strerror or str(error))
        return None
    if open_cached(directory / key, verify=False) is None:
        report(f"WARNING: {config.name} changed while it was tokenised, which is done again, and not kept")
        return None
    return key


def _say_not_kept(where: str, reason: str) -> None:
    report(
        f"WARNING: data.cache_dir: tokenised data cannot be kept in {where} ({reason}), so every start tokenises it "
        'again, and it has to fit into memory. Name another directory, or "" to be content with that'
    )


def _cached(config: SftDataConfig, make: Callable[[], _Work], mesh: Mesh | None) -> CachedSamples | None:
    """Return the samples of the cache, which is made if need be; None if the cache cannot hold them. Collective. Raise
    DataError if machines have other data."""
    keys = _run_together(make() if mesh is None or mesh.is_main else None, mesh)
    if mesh is not None and mesh.world_size > 1 and None not in keys:
        # A machine that does not see the directory of rank 0 makes its own; the others find it.
        first_of_machine = not mesh.is_main and os.environ.get("LOCAL_RANK", "0") == "0"
        keys += _run_together(make() if first_of_machine else None, mesh)
    if None in keys:
        return None
    if len(set(keys)) > 1:
        raise DataError(
            f"data.name = '{config.name}', the tokenizer or the installed libraries are not the same on all machines"
        )
    found = open_cached(cache_directory(config) / str(keys[0]), verify=False)
    found_everywhere = [found is not None] if mesh is None else mesh.gather(found is not None)
    return found if all(found_everywhere) else None


def _run_together(work: _Work | None, mesh: Mesh | None) -> list[str | None]:
    """Run `work` on the ranks that have it while the others wait; return every rank's result. Collective. Raise
    the error of a rank on every rank."""
    is_done, outcome, failure = work is None, None, None
    while True:
        began = time.monotonic()
        while work is not None and not is_done:
            try:
                next(work)
            except StopIteration as end:
                is_done, outcome = True, end.value
            except Exception as error:  # noqa: BLE001 (raised on every rank)
                is_done, failure = True, error
            if time.monotonic() - began >= _TELL_S:
                break
        state = (work is not None, is_done, outcome, failure)
        states = [state] if mesh is None else mesh.gather(state)
        for *_, failed in states:
            if failed is not None:
                raise failed
        if all(done for _, done, _, _ in states):
            return [found for has_work, _, found, _ in states if has_work]


class SampleOrder:
    """The endless order in which samples are trained. `more`: numbers beside the seed, which make another order."""

    def __init__(self, num_samples: int, *, seed: int, shuffle: bool, more: tuple[int, ...] = ()) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._more = more
        self._shuffle = shuffle
        self._epoch = -1
        self._permutation = np.arange(num_samples)

    def at(self, position: int) -> int:
        """Return the index of the sample at global position `position`."""
        epoch, place = divmod(position, self.num_samples)
        if self._shuffle and epoch != self._epoch:
            self._permutation = np.random.default_rng([self._seed, epoch, *self._more]).permutation(self.num_samples)
            self._epoch = epoch
        return int(self._permutation[place])

    def batch(self, position: int, size: int) -> list[int]:
        """Return the indices of the next `size` samples from `position`; may cross an epoch."""
        return [self.at(place) for place in range(position, position + size)]


class MixedOrder(SampleOrder):
    """The endless order in which samples of several sources are trained, whose indices follow each other.

    Every thousand positions hold each source as often as its weight says, in an order of their own. Each source has its
    own `SampleOrder`. `sizes`: samples of each source."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool) -> None:
        super().__init__(sum(sizes), seed=seed, shuffle=shuffle)
        self._orders = [SampleOrder(size, seed=seed, shuffle=shuffle, more=(n,)) for n, size in enumerate(sizes, 1)]
        self._begins = np.cumsum([0, *sizes])
        exact = np.array(weights) / sum(weights) * _BLOCK
        self._counts = np.floor(exact + 1e-9).astype(int)
        self._counts[np.argsort(self._counts - exact, kind="stable")[: _BLOCK - self._counts.sum()]] += 1
        self._block = -1

    def at(self, position: int) -> int:
        """Return the index of the sample at global position `position`."""
        block, place = divmod(position, _BLOCK)
        if block != self._block:
            self._sources = np.repeat(np.arange(len(self._counts)), self._counts)
            np.random.default_rng([self._seed, block, _BLOCK]).shuffle(self._sources)
            self._block = block
        source = int(self._sources[place])
        before = block * int(self._counts[source]) + int((self._sources[:place] == source).sum())
        return int(self._begins[source]) + self._orders[source].at(before)


def order_of(samples: Sequence[object], config: SftDataConfig, *, seed: int) -> SampleOrder:
    """Return the order in which `samples` are trained."""
    if isinstance(samples, JoinedSamples) and isinstance(config, MixedDataConfig):
        return MixedOrder(samples.sizes, [*config.mix.values()], seed=seed, shuffle=config.shuffle)
    return SampleOrder(len(samples), seed=seed, shuffle=config.shuffle)


def fingerprint_samples(samples: Sequence[Sample]) -> str:
    """Return the xxh3-128 of the samples' tokens, masks and values, in order."""
    digest = xxhash.xxh3_128()
    for sample in samples:
        digest.update(len(sample.token_ids).to_bytes(8, "little"))
        digest.update(sample.token_ids.astype("<i4").tobytes())
        digest.update(sample.loss_mask.astype(np.uint8).tobytes())
        digest.update(np.array(sample.value, dtype="<f8").tobytes())
    return digest.hexdigest()


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local directory or hub model."""
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # unset, it would ask at a terminal
    except Exception as error:  # noqa: BLE001 (transformers raises errors of any class)
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(" .:") + "."
        where = "" if Path(name).exists() else f" There is no directory of that name (from {Path.cwd()}), and:"
        raise DataError(
            f"model.tokenizer = '{name}': no tokenizer could be loaded.{where} {reason} Name a directory with a "
            "tokenizer whose tokenizer_config.json names the right class, or a model of a hub that can be reached."
        ) from None


def chat_tokenizer(tokenizer: PreTrainedTokenizerBase, *, end_token_ids: Sequence[int] = ()) -> Tokenizer:
    """Return the tokenizer that renders, tokenises and masks, with the tokens of `tokenizer`. Raise DataError if it is
    not of the fast kind. `end_token_ids`: tokens that end a turn, beside the end-of-text token."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError(
            f"the tokenizer '{tokenizer.name_or_path}' is a {type(tokenizer).__name__}, which has no tokenizer.json; "
            "one is needed. Convert it to a fast tokenizer and save that."
        )
    return Tokenizer(
        tokenizers.Tokenizer.from_str(backend.to_str()),
        name=str(tokenizer.name_or_path),
        templates=tokenizer.chat_template,
        special=tokenizer.special_tokens_map,
        end_token_ids=end_token_ids,
    )


def refuse_other_tokens(name: str, tokenizer_name: str, *, key: str) -> None:
    """Refuse a model beside the policy to which the policy's token ids mean something else. Raise DataError if their
    tokenizers differ. `name`: of the model, the value of the setting `key`."""
    theirs, ours = load_tokenizer(name).get_vocab(), load_tokenizer(tokenizer_name).get_vocab()
    differing = [token for token, number in ours.items() if theirs.get(token) != number]
    if differing:
        token = min(differing)
        raise DataError(
            f"{key} = '{name}' has another tokenizer than '{tokenizer_name}': {len(differing)} tokens "
            f"differ, such as {token!r}, {ours[token]} here and {theirs.get(token, 'unknown')} there. It reads the "
            "policy's token ids, so take one that was trained from a model with the policy's tokenizer."
        )


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Check that the orchestrator, which reads tokenizer.json itself, has the tokens that transformers makes. Raise
    ConfigError if they differ, also if only special tokens do, so `rl` and `sft` would see different prompts."""
    original = load_orchestrator_tokenizer(name)

    def differing(loaded: Tokenizer) -> list[str]:
        found = [*differences(loaded, original), *differences_at_borders(loaded, original, loaded.added_tokens)]
        if loaded.eos_token_id != original.eos_token_id:
            found.append("it has another token that ends a text")
        if loaded.has_template and _probe_chat(loaded) != _probe_chat(original):
            found.append("it makes other tokens of a chat")
        return found

    if found := differing(chat_tokenizer(tokenizer)):
        _refuse_tokens(name, found, differing)


def _check_text(tokenizer: Tokenizer, rows: Iterable[object], *, is_told: bool) -> None:
    """Check that transformers makes the tokens of tokenizer.json, of texts of many kinds and of the first rows. Raise
    ConfigError if the tokens differ.

    Other tokens around special tokens are only reported: transformers makes some for models of Llama 2's kind."""
    try:
        original = load_orchestrator_tokenizer(tokenizer.name)
    except ConfigError:  # there is no tokenizer.json, such as for a model of SentencePiece: nothing to compare with
        return
    texts = texts_of_rows(rows)

    def differing(loaded: Tokenizer) -> list[str]:
        return list(differences(loaded, original, texts))

    if found := differing(tokenizer):
        _refuse_tokens(tokenizer.name, found, differing)
    known = tokenizer.added_tokens & original.added_tokens
    if is_told and (found := list(differences_at_borders(tokenizer, original, known))):
        report(
            f"WARNING: model.tokenizer: transformers loads '{tokenizer.name}' differently from its tokenizer.json: "
            f"{found[0]}. This run trains on the tokens of transformers; rl refuses such a tokenizer."
        )


def _refuse_tokens(name: str, found: list[str], differing: Callable[[Tokenizer], list[str]]) -> NoReturn:
    todo = way_out(name, lambda directory: chat_tokenizer(load_tokenizer(directory)), differing)
    raise ConfigError(
        f"model.tokenizer: transformers loads '{name}' differently from its tokenizer.json: {found[0]}. {todo}"
    )


def _probe_chat(tokenizer: Tokenizer) -> list[int] | str:
    try:
        return tokenizer.prompt([{"role": "user", "content": " The dog's 12\n"}])
    except DataError as error:
        return str(error)


def load_samples(
    config: SftDataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int, mesh: Mesh | None = None
) -> tuple[TrainedSamples, TrainedSamples]:
    """Return (training samples, validation samples), tokenised, of all sources; see `read_samples`."""
    parts = [_load_source(source, tokenizer, seed=seed, mesh=mesh) for source in config.sources]
    if len(parts) == 1:
        return parts[0]
    training, held_out = zip(*parts, strict=True)
    if mesh is None or mesh.is_main:
        counts = ", ".join(f"{source.name} {len(own):,}" for source, own in zip(config.sources, training, strict=True))
        report("mixing", text=f"samples of each source: {counts}")
    return JoinedSamples(training), JoinedSamples(held_out)


def _load_source(
    config: SftDataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int, mesh: Mesh | None
) -> tuple[ChosenSamples, ChosenSamples]:
    samples, _ = read_samples(config, chat_tokenizer(tokenizer), SAMPLE_FORMATS, mesh=mesh)
    lengths, first_targets = sizes_of(samples)
    is_too_long = lengths > config.seq_len
    is_kept = ~is_too_long if config.too_long == "drop" else np.ones(len(lengths), dtype=bool)
    is_trained = first_targets < config.seq_len  # also if it is cut there
    is_untrained = is_kept & ~is_trained
    untrained = int(is_untrained.sum())
    usable = np.flatnonzero(is_kept & is_trained)
    is_held_out = np.zeros(len(usable), dtype=bool)
    is_held_out[list(hold_out(len(usable), config.validation_fraction, seed=seed))] = True
    if is_held_out.all():
        why = [(int((is_too_long & ~is_kept).sum()), f"have more than {config.seq_len} tokens and were dropped")]
        cut = is_too_long & is_kept & ~is_trained
        why += [(int(cut.sum()), "were cut before their answer"), (untrained - int(cut.sum()), "have no answer")]
        why += [(len(usable), "are held out by data.validation_fraction")]
        raise DataError(
            f"{config.name}: no samples to train on are left of {len(lengths):,}: {reasons(why, len(lengths))}"
        )
    done = "dropped" if config.too_long == "drop" else "cut"
    texts = (
        (f"samples of more than {config.seq_len:,} tokens are {done}", is_too_long),
        ("samples have nothing to train on and are left out", is_untrained),
    )
    found = [(text, int(is_it.sum()), samples[int(is_it.argmax())].row) for text, is_it in texts]
    tell_samples(found, config, is_told=mesh is None or mesh.is_main)
    training, held_out = (
        ChosenSamples(samples, usable[places], most=config.seq_len) for places in (~is_held_out, is_held_out)
    )
    return training, held_out


def reasons(found: Sequence[tuple[int, str]], total: int) -> str:
    """Return why data cannot be trained on: `all were cut before their answer`, or each reason with its number."""
    return ", ".join("all " + what if count == total else f"{count:,} {what}" for count, what in found if count)


def hold_out(num_samples: int, fraction: float, *, seed: int) -> set[int]:
    """Return which of the samples are for validation, chosen by `seed`: at least one, unless `fraction` is 0."""
    shuffled = np.random.default_rng([seed, 2**31]).permutation(num_samples)
    return set(shuffled[: max(int(num_samples * fraction), int(fraction > 0))].tolist())
