"""Base classes of all settings, sections that several processes share, and URL checks."""

import ipaddress
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from holdfast.config.chat_template import tokenizer_with
from holdfast.config.marks import Mark
from holdfast.errors import ConfigError

DType = Literal["float32", "bfloat16"]
LogFormat = Literal["text", "json"]
KlEstimator = Literal["k1", "k2", "k3", "k3_unbiased"]
DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class DeviceDefaults:
    """Defaults for one kind of device.

    On CUDA the fast dtype is bfloat16. TensorFloat-32 (products with ten bits of mantissa) stays off: trainer and
    engine would disagree by more than `trainer.mismatch_limit` allows for float32.

    Attributes:
        dtype: `model.dtype` of trainer and engine.
        activation_checkpointing: `model.activation_checkpointing`. Memory is what GPUs run out of first.
        logits_chunk_tokens: `model.logits_chunk_tokens`. With 150,000 words, 4096 tokens take 10 GiB in float32.
        eager: `engine.eager`. On CPU compiling costs 15-30 s at the start and brings little; without CUDA graphs a GPU
            waits for the launches of its kernels.
    """

    dtype: DType
    activation_checkpointing: bool
    logits_chunk_tokens: int
    eager: bool


BY_DEVICE: dict[DeviceType, DeviceDefaults] = {
    "cpu": DeviceDefaults(dtype="float32", activation_checkpointing=False, logits_chunk_tokens=4096, eager=True),
    "cuda": DeviceDefaults(dtype="bfloat16", activation_checkpointing=True, logits_chunk_tokens=1024, eager=False),
}


def _check_plain(cls: type[BaseModel], value: Any, info: ValidationInfo) -> Any:
    """Refuse true and false for numbers, which pydantic would take for 1 and 0, and text that no file can hold."""
    assert info.field_name is not None
    kinds = _kinds(cls.model_fields[info.field_name].annotation)
    if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
        raise ValueError("should be a number, not true or false")
    if Path in kinds and value == "":  # an unset variable of the shell, and not this directory
        raise ValueError("must not be empty; this directory is '.'")
    if not any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds):  # a section checks its own
        for text in _texts(value):
            _check_text(text)
    return value


def _check_text(text: str) -> None:
    if "\0" in text:
        raise ValueError("must not hold the character NUL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("must be text in UTF-8, without halves of surrogate pairs") from None


def _texts(value: Any) -> Iterator[str]:
    """Yield all text in a value, however deep."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() | Path() as text:
                yield str(text)
            case list() | tuple() as items:
                waiting += items
            case dict() as entries:
                waiting += [*entries.keys(), *entries.values()]


def _kinds(annotation: Any) -> set[Any]:
    parts = typing.get_args(annotation)
    return set().union(*map(_kinds, parts)) if parts else {annotation}


class Section(BaseModel):
    """A part of a configuration. A docstring beneath a field is its ``--help`` text: `docs_tools.listing`."""

    model_config = ConfigDict(
        extra="forbid", defer_build=True, validate_default=True, ser_json_inf_nan="constants", allow_inf_nan=False
    )

    _plain = field_validator("*", mode="before")(classmethod(_check_plain))


S = TypeVar("S", bound=Section)


def read_section(kind: type[S], values: Mapping[str, Any], *, key: str = "") -> S:
    """Return the section with these `values`, which no configuration holds. Raise ConfigError that names each value
    that cannot be used, and `key` before it."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_input=False)
        found = [(".".join(map(str, one["loc"])), one["msg"].removeprefix("Value error, ")) for one in errors]
        raise ConfigError(
            "; ".join(f"{key}{name}{':' if said.startswith('there') else ''} {said}" for name, said in found)
        ) from None


class _Given(dict[str, str]):
    """Dotted key -> the flag or variable that gave the setting. It does not count when configurations are compared."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Given)

    __hash__ = None  # pyright: ignore[reportAssignmentType] - as of any dict


class Command(Section):
    """The whole configuration of one command: what every command has."""

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs of settings: the first, given by a flag, removes the second from variables and files, and so on."""

    _given: _Given = PrivateAttr(default_factory=_Given)

    output_dir: Annotated[Path, Mark.FREE, Mark.SHARED, Mark.PLACE] = Path("outputs")
    """The run directory: checkpoints, rollouts, weights, metrics, logs and resolved configs."""

    seed: Annotated[int, Mark.SHARED] = Field(default=0, ge=0, lt=2**31)
    """The one seed from which data order, initialisation and sampling are derived."""

    dry_run: Annotated[bool, Mark.FREE, Mark.PLACE] = False
    """Make the checks that a real run makes before it starts anything, write the resolved TOML, print the plan, start
    nothing. Checked are all settings, local paths, environments and functions of your own (they are imported; the
    constructor of an environment of your own is not called), and every byte of the checkpoint or weights to start
    from. The rows of data on this machine are read. Not checked are names on a hub."""

    @property
    def variables(self) -> Mapping[str, str]:
        """Dotted key -> the environment variable that set it."""
        begin = "variable "
        return {key: said.removeprefix(begin) for key, said in self._given.items() if said.startswith(begin)}

    @property
    def given(self) -> Mapping[str, str]:
        """Dotted key -> `flag --NAME` or `variable NAME` that set it."""
        return self._given

    def note_given(self, given: Mapping[str, str]) -> None:
        """Take note of the flags and variables that set something: dotted key -> `flag --NAME` or `variable NAME`."""
        self._given = _Given(given)


class CkptConfig(Section):
    """Checkpoints. A bare ``--ckpt`` writes the final step only."""

    interval: int | None = Field(default=None, ge=1)
    """Save after every this many steps; unset: after the final step only."""

    every_minutes: float | None = Field(default=None, gt=0)
    """Save when this many minutes have passed since the last save; goes together with `interval`."""

    save_async: bool = True
    """Copy the state and write it in the background; off: training waits until it is committed."""

    on_failure: Literal["stop", "warn"] = "stop"
    """After a save that failed (disk full, I/O error): end the run, or warn and continue."""

    keep: int | None = Field(default=None, ge=1)
    """Keep this many of the newest checkpoints; unset: all stay, whatever the next two say."""

    keep_interval: int | None = Field(default=None, ge=1)
    """Keep the checkpoints of every this many steps for good, in addition to the newest `keep`."""

    keep_best: str | None = None
    """Keep the checkpoint with the best value of this metric in addition to the newest `keep`. Examples:
    `min:val/loss`, `max:reward/mean`. Without `min:` or `max:`: lower is better for losses, errors and divergences."""

    dir: str | None = None
    """Copy every committed checkpoint there as well, in the background: `s3://bucket/prefix` or any
    other URL of fsspec. A resume finds there what this machine does not have."""

    resume_step: Annotated[int | Literal["latest", "auto"] | None, Mark.PLACE] = None
    """Continue from this step: a number, `latest` (-1 is the same; an error if there is none),
    or `auto` (the newest, or a fresh start if there is none)."""

    resume_dir: Annotated[Path | None, Mark.PLACE] = None
    """Fork another run: start this one from OTHER/checkpoints/step_N with everything that it holds.
    Together with `resume_step = auto`, this run's own checkpoints come first."""

    init_from: Annotated[Path | None, Mark.PLACE] = None
    """Warm start: take the weights of a checkpoint or a Hugging Face directory and nothing else;
    optimizer, counters and data start from scratch."""

    verify: Literal["full", "size"] = "full"
    """Check before a checkpoint is used: every byte, or sizes only (for very large ones)."""

    grace_s: float = Field(default=60.0, gt=0)
    """On SIGTERM, SIGUSR1 or SIGHUP: the time to save the current step before all is stopped. Ctrl-C has no limit."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.keep_best is not None and not self.keep_best.removeprefix("min:").removeprefix("max:"):
            raise ValueError(f"keep_best = '{self.keep_best}' names no metric; write it as `max:reward/mean`")
        if self.init_from is not None and self.resume_dir is not None:
            raise ValueError("init_from takes the weights alone and resume_dir everything: give one of them")
        return self


class ModelConfig(Section):
    """Which model, by the name of a local directory or of a model on a hub."""

    name: str = ""
    """Directory with config.json, safetensors and tokenizer, or a hub id such as Qwen/Qwen3-0.6B. Needed."""

    tokenizer: str | None = None
    """Directory or hub id of the tokenizer; unset: the same as `model.name`."""

    chat_template: str | None = None
    """File with a chat template in Jinja, in the place of the tokenizer's, such as chatml.jinja. Needs a tokenizer in a
    directory. Published weights have it, too."""

    @model_validator(mode="after")
    def _tokenizer_with_template(self) -> Self:
        if self.chat_template is not None and not self.tokenizer_name:
            raise ValueError("has chat_template and no name: give model.name and model.chat_template together")
        if self.chat_template is not None:
            # Only once: a process that starts later must not read a template that was edited meanwhile.
            self.tokenizer, self.chat_template = tokenizer_with(self.chat_template, self.tokenizer_name), None
        return self

    @property
    def tokenizer_name(self) -> str:
        """Source of the tokenizer."""
        return self.tokenizer or self.name


def check_url(url: str) -> str:
    """Return the base URL of a server. Other text is refused without repeating it: it may hold a password."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError
        parts.hostname.encode("idna")  # sockets raise an error of their own for labels that are too long or empty
        if not url.isascii() or not url.isprintable() or " " in url:
            raise ValueError
    except ValueError:  # also: brackets without an end, a port that is not a number
        raise ValueError("must be the URL of a server, such as http://127.0.0.1:8000") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "must not hold a user name or password, which would be kept with the run's settings and logs: the servers "
            "take an admin token, see admin_token_env"
        )
    if parts.query or parts.fragment:
        raise ValueError("must end with the path that comes before /health, without '?' and '#'")
    return url


Url = Annotated[str, AfterValidator(check_url)]


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine, and no other machine reaches it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_this_machine(header: str) -> bool:
    """Whether a Host header names this machine, and no other machine reaches it. No browser omits it."""
    if not header:
        return True
    try:
        name = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name.removesuffix("."))
