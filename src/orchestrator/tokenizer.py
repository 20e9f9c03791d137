"""Text to token ids and back, and the chat template, read from a model's tokenizer files.

Uses `tokenizers` and `jinja2` directly: transformers would load torch, which costs seconds of
start-up and hundreds of megabytes for a process that never touches a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triad.errors import ConfigError, DataError

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Stands for an assistant's turn when a template is rendered for the messages that follow it:
# private-use characters, which no template and no user writes.
_MARKER = "\ue0f0\ue0f1\ue0f0"


class Message(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: str
    content: str


class Tokenizer:
    """A fast tokenizer with its chat template.

    Attributes:
        stop_token_ids: what ends a turn: the tokenizer's end token, those of generation_config.json,
            and the special token with which the chat template closes an assistant's turn.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        template: str | None,
        special: dict[str, str],
        end_token_ids: Sequence[int] = (),
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._name = name
        self._special = special
        self._template = _compile(template, name) if template else None
        ends = set(end_token_ids)
        if "eos_token" in special and (eos := backend.token_to_id(special["eos_token"])) is not None:
            ends.add(eos)
        if self._template is not None:
            closing = self.encode(self._after_assistant([], open_turn=False))
            if closing and closing[0] in backend.get_added_tokens_decoder():
                ends.add(closing[0])
        self.stop_token_ids = sorted(ends)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, nothing added; special tokens written in it are recognised."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids` without special tokens."""
        return self._backend.decode(token_ids, skip_special_tokens=True)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a chat so far, up to where the assistant's turn begins."""
        return self.encode(self._render(messages, open_turn=True))

    def continuation(self, messages: Sequence[Message], *, last_token_id: int) -> list[int]:
        """Return the ids to append to a session whose last turn was sampled, then `messages`.

        Closes the assistant's turn where sampling did not, adds `messages`, opens the next turn.
        Nothing before is rendered or tokenised again.

        Raises:
            DataError: the template cannot continue a chat.
        """
        text = self._after_assistant(messages, open_turn=True)
        if not text:
            raise DataError(
                f"the chat template of '{self._name}' adds nothing after an assistant's turn, so this environment "
                "cannot continue a chat with it: use append_text, or another template"
            )
        token_ids = self.encode(text)
        closed = last_token_id in self.stop_token_ids and token_ids[:1] == [last_token_id]
        return token_ids[1:] if closed else token_ids

    def _after_assistant(self, messages: Sequence[Message], *, open_turn: bool) -> str:
        chat = [Message("user", "."), Message("assistant", _MARKER), *messages]
        return self._render(chat, open_turn=open_turn).partition(_MARKER)[2]

    def _render(self, messages: Sequence[Message], *, open_turn: bool) -> str:
        if self._template is None:
            raise ConfigError(
                f"the tokenizer of '{self._name}' has no chat template, which messages need. Add chat_template.jinja "
                "to its directory, or let the environment give its prompts as text."
            )
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=plain, add_generation_prompt=open_turn, **self._special)
        except jinja2.TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise DataError(f"the chat template of '{self._name}' refuses a chat of [{roles}]: {error}") from None


def _compile(template: str, name: str) -> jinja2.Template:
    """Compile a chat template with what transformers promises to every template."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(value: object, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template of '{name}' is not valid: {error}") from None


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a local directory or of a model on the hub.

    Raises:
        ConfigError: there is no such directory or model, or it has no `tokenizer.json`.
        DataError: a file of it is damaged.
    """
    files = _local_files(Path(name)) if Path(name).is_dir() else _hub_files(name)
    if "tokenizer.json" not in files:
        raise ConfigError(
            f"model.tokenizer: '{name}' has no tokenizer.json. Write one with "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(directory)` and name that directory."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(files["tokenizer.json"]))
    except Exception as error:  # noqa: BLE001 (tokenizers raises plain Exception)
        raise DataError(f"{files['tokenizer.json']} cannot be read: {error}") from None
    config = _read_json(files["tokenizer_config.json"]) if "tokenizer_config.json" in files else {}
    template = files["chat_template.jinja"].read_text() if "chat_template.jinja" in files else None
    generation = _read_json(files["generation_config.json"]) if "generation_config.json" in files else {}
    ends = generation.get("eos_token_id")
    return Tokenizer(
        backend,
        name=name,
        template=template or _template_of(config.get("chat_template")),
        special={key: text for key in _SPECIAL if (text := _text_of(config.get(key)))},
        end_token_ids=[] if ends is None else ends if isinstance(ends, list) else [ends],
    )


def _local_files(directory: Path) -> dict[str, Path]:
    return {name: directory / name for name in _FILES if (directory / name).is_file()}


def _hub_files(name: str) -> dict[str, Path]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

    found = {}
    for file in _FILES:
        try:
            found[file] = Path(hf_hub_download(name, file))
        except LocalEntryNotFoundError as error:
            if file == "tokenizer.json":
                raise ConfigError(
                    f"model.tokenizer: '{name}' is no directory, and the hub is silent: {error}"
                ) from None
        except EntryNotFoundError:
            continue
        except (HFValidationError, OSError) as error:
            raise ConfigError(f"model.tokenizer: '{name}' is no directory and no model on the hub: {error}") from None
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None


def _text_of(token: Any) -> str | None:
    """Special tokens are written as text, or as a map with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _template_of(entry: Any) -> str | None:
    """`chat_template` of tokenizer_config.json: text, or a list of named templates."""
    if isinstance(entry, list):
        return next((item["template"] for item in entry if item.get("name") == "default"), None)
    return entry
