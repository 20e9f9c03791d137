"""Loads a tokenizer from a directory or a hub, and turns texts, prompts and continuations into token ids and back."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from holdfast.chat.forms import Forms, forms_of
from holdfast.chat.messages import Message, as_dict, roles_left_out, squeezed, texts_of
from holdfast.chat.template import ChatMessage, ChatTemplate
from holdfast.chat.written import check_calls_written, is_value_written
from holdfast.errors import ConfigError, DataError
from holdfast.process.events import report

# Stands for an assistant's turn when a template is rendered for the messages that follow it:
# private-use characters, which no template and no user writes.
_MARKER = "\ue0f0\ue0f1\ue0f0"
# Characters that are always tokenised, to learn how many tokens they are: that takes a second.
_MANY_CHARACTERS = 1 << 20
# Characters before an assistant's turn in which the token that begins the turn is looked for.
_NEAR_CHARACTERS = 256
# A normalizer may make one character of several, and a model one unknown token.
_SHRINKING = 8


class Around(NamedTuple):
    """Text up to the end of an assistant's turn, and after it."""

    before: str
    after: str


class Tokenizer:
    """A fast tokenizer with its chat template.

    Attributes:
        name: its directory or hub name, for messages.
        eos_token_id: the token that ends a text, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        templates: str | Mapping[str, str] | None,
        special: Mapping[str, str],
        end_token_ids: Sequence[int] = (),
    ) -> None:
        """Wrap `backend`, which is changed: it neither pads nor truncates from now on.

        Args:
            templates: the chat template, or several by name (`default`, `tool_use`).
            special: special tokens by role, such as `eos_token`.
            end_token_ids: tokens that end a turn, beside the end-of-text token.

        Raise DataError if a template is not valid.
        """
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self.name = name
        named = {"default": templates} if isinstance(templates, str) else dict(templates or {})
        self._templates = {
            kind: ChatTemplate(source, name=name, special=special) for kind, source in named.items() if source
        }
        self._special = dict(special)
        self._forms: dict[str, Forms] = {}
        self._end_token_ids = set(end_token_ids)
        eos = special.get("eos_token")
        self.eos_token_id = None if eos is None else backend.token_to_id(eos)
        probe = backend.encode("a", add_special_tokens=True)
        added = probe.special_tokens_mask
        num_before = added.index(0) if 0 in added else 0
        self._text_beginning = probe.ids[:num_before]

    @cached_property
    def stop_token_ids(self) -> list[int]:
        """The tokens that end a turn: the end-of-text token, the tokens of generation_config.json, and the special
        token with which the chat template closes an assistant's turn."""
        ends = set(self._end_token_ids)
        if self.eos_token_id is not None:
            ends.add(self.eos_token_id)
        if self._templates:
            closing = self._ids_after(self.around_assistant([], open_turn=False))
            written = (token for token in closing if self.decode([token], skip_special_tokens=False).strip(" \n\r\t▁"))
            first = next(written, None)
            if first is not None and first in self._backend.get_added_tokens_decoder():
                ends.add(first)
        return sorted(ends)

    @cached_property
    def stop_texts(self) -> list[str]:
        """The texts of `stop_token_ids`."""
        return [self.decode([token], skip_special_tokens=False) for token in self.stop_token_ids]

    @cached_property
    def added_tokens(self) -> frozenset[str]:
        """The tokens that a text is searched for before anything else, such as special tokens."""
        return frozenset(token.content for token in self._backend.get_added_tokens_decoder().values())

    @cached_property
    def border_tokens(self) -> dict[int, str]:
        """The special tokens that split a text before anything else, without changing the text around them."""
        return {
            token_id: token.content
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        }

    def identity(self) -> str:
        """Return all that its tokens depend on, as text: the tokenizer, the templates and the special tokens."""
        templates = {kind: template.source for kind, template in self._templates.items()}
        return json.dumps([self._backend.to_str(), templates, self._special, sorted(self._end_token_ids)])

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(self._templates)

    def template(self, tools: Sequence[Any] | None = None) -> ChatTemplate:
        """Return the chat template for a chat with these tools. Raise ConfigError if there is none."""
        if not self._templates:
            raise ConfigError(
                f"the tokenizer of '{self.name}' has no chat template, which messages need. Add chat_template.jinja "
                "to its directory, or give prompts as text."
            )
        kind = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if kind not in self._templates:
            raise ConfigError(
                f"the tokenizer of '{self.name}' has several chat templates and none is named `default`: "
                f"{', '.join(sorted(self._templates))}. Name one of them so."
            )
        return self._templates[kind]

    def forms(self, tools: Sequence[Any] | None = None) -> Forms:
        """Return which forms of a message the chat template reads."""
        template = self.template(tools)
        if template.source not in self._forms:
            self._forms[template.source] = forms_of(template)
        return self._forms[template.source]

    def is_too_long(self, num_characters: int, *, room: int) -> bool:
        """Whether a text surely has more than `room` tokens, told by its length: tokenising 50 MB takes gigabytes."""
        return num_characters > max(_MANY_CHARACTERS, _SHRINKING * self._longest_token * (room + 1))

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._backend.get_vocab()), default=1)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without BOS or EOS. Special tokens written in the text are recognised."""
        return _encoded(self._backend, text).ids

    def encode_with_places(self, text: str) -> tokenizers.Encoding:
        """Return the ids of `text` with the characters that each stands for, nothing added."""
        return _encoded(self._backend, text)

    def encode_after(self, text: str) -> list[int]:
        """Return the ids of `text` as they follow others: without the blank that some tokenizers put before a text."""
        return _encoded(self._inner, text).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def text_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt of plain text, with BOS if the tokenizer adds it.

        BOS is not added to a text that already begins with it."""
        token_ids = self.encode(text)
        beginning = self._text_beginning
        return token_ids if token_ids[: len(beginning)] == beginning else beginning + token_ids

    def prompt(
        self,
        messages: Sequence[Message | ChatMessage],
        *,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a chat, up to the beginning of the assistant's turn. Raise ConfigError if the tokenizer has
        no chat template; DataError if the template refuses the messages, or leaves out a tool call."""
        text = self.render(messages, open_turn=True, tools=tools, options=options)
        chat = [as_dict(message) for message in messages]

        def render(changed: Sequence[ChatMessage]) -> str:
            return self.render(changed, open_turn=True, tools=tools, options=options)

        check_calls_written(chat, render, text, name=self.name)
        for role in roles_left_out(chat, text):
            _warn_of_what_is_left_out(self.name, role)
        return self.encode(text)

    def unseen(self, messages: Sequence[Message | ChatMessage], *, tools: Sequence[Any] | None = None) -> list[str]:
        """Return the roles of a prompt whose messages can change without a change of the prompt."""

        def render(changed: Sequence[Message | ChatMessage]) -> str:
            return self.render(changed, open_turn=True, tools=tools)

        chat, text = [as_dict(message) for message in messages], render(messages)
        suspects = roles_left_out(chat, text)
        found = dict[str, None]()
        for number, message in enumerate(chat):
            said = "".join(texts_of(message))

            def put(other: str, number: int = number, message: dict[str, Any] = message) -> list[dict[str, Any]]:
                return [*chat[:number], {**message, "content": other}, *chat[number + 1 :]]

            if message["role"] in suspects and said and not is_value_written(said, put, render, text):
                found[message["role"]] = None
        return list(found)

    def render(
        self,
        messages: Sequence[Message | ChatMessage],
        *,
        open_turn: bool,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a chat; see `ChatTemplate.render`."""
        chat = self.forms(tools).adapt(as_dict(message) for message in messages)
        return self.template(tools).render(chat, open_turn=open_turn, tools=tools, options=options)

    def rewrites(
        self,
        chat: Sequence[Message | ChatMessage],
        messages: Sequence[Message | ChatMessage],
        *,
        around: Around,
        tools: Sequence[Any] | None = None,
    ) -> bool:
        """Whether the template writes a chat otherwise once `messages` follow: such as without the thoughts of turns
        before a question, or with the tools at another place.

        The text is then not the policy's view before its last turn, then this turn, then the tokens of `continuation`.
        White space does not count: many templates strip the content.

        Args:
            chat: all that was said so far, a turn of the assistant's last.
            around: what `around_assistant` says of these messages and tools.

        Raise DataError if the template refuses the messages.
        """
        seen = self.render(chat[:-1], open_turn=True, tools=tools)
        turn = "".join(texts_of(as_dict(chat[-1])))
        anew = self.render([*chat, *messages], open_turn=True, tools=tools)
        return squeezed(anew) != squeezed(seen) + squeezed(turn) + squeezed(around.after)

    def continuation(
        self,
        messages: Sequence[Message | ChatMessage],
        *,
        last_token_id: int,
        tools: Sequence[Any] | None = None,
        around: Around | None = None,
    ) -> list[int]:
        """Return the ids to append to a session whose last turn was sampled, then `messages`.

        Closes the assistant's turn where sampling did not, adds `messages`, opens the next turn. Nothing before is
        rendered or tokenised again. `around`: what `around_assistant` says of these messages and tools; unset: it is
        asked. Raise DataError if the template cannot continue a chat, or leaves out what a message says."""
        around = around or self.around_assistant(messages, tools=tools)
        text, token_ids = around.after, self._ids_after(around)
        if not text:
            raise DataError(
                f"the chat template of '{self.name}' adds nothing after an assistant's turn, so this environment "
                "cannot continue a chat with it: use append_text, or another template"
            )
        chat = [as_dict(message) for message in messages]

        def render(changed: Sequence[ChatMessage]) -> str:
            return self.around_assistant(changed, tools=tools).after

        check_calls_written(chat, render, text, name=self.name)
        if left_out := roles_left_out(chat, text):
            raise DataError(
                f"the chat template of '{self.name}' leaves out what messages of role `{left_out[0]}` say behind an "
                "assistant's turn, so the policy would not see it. Use a role that the template writes (such as "
                "`user`), append_text, or another template."
            )
        return token_ids[self._length_of_closing(token_ids, last_token_id) :]

    def _length_of_closing(self, token_ids: list[int], last_token_id: int) -> int:
        """Return how many ids after an assistant's turn only close it, if `last_token_id` closed it already.

        Some templates write white space before the token that ends the turn (as Llama 2's), which was not sampled."""
        if last_token_id not in self.stop_token_ids or last_token_id not in token_ids:
            return 0
        place = token_ids.index(last_token_id)
        return 0 if self.decode(token_ids[:place], skip_special_tokens=False).strip() else place + 1

    def _ids_after(self, around: Around) -> list[int]:
        """Return the ids of the text after an assistant's turn, tokenised after that turn."""
        # Text before a border, such as all tools, does not change the tokens after it.
        start = self._last_border(around.before)
        border = len(around.before) - start
        encoding = self.encode_with_places(around.before[start:] + around.after)
        first = next((place for place, (start, _) in enumerate(encoding.offsets) if start >= border), None)
        if first is None or (first and encoding.offsets[first - 1][1] > border):
            # The tokenizer joins it with the marker, which it does not know.
            return self.encode_after(around.after)
        return encoding.ids[first:]

    def around_assistant(
        self, messages: Sequence[Message | ChatMessage], *, open_turn: bool = True, tools: Sequence[Any] | None = None
    ) -> Around:
        """Return a chat up to the end of a turn of the assistant's, and what follows it: `messages`, and the next turn.
        Raise DataError if the template refuses the messages."""
        chat = [Message("user", "."), Message("assistant", _MARKER), *messages]
        before, marker, after = self.render(chat, open_turn=open_turn, tools=tools).partition(_MARKER)
        return Around(before + marker, after)

    def _last_border(self, text: str) -> int:
        """Return where the last of the `border_tokens` near the end of `text` begins; 0 without one."""
        near = max(0, len(text) - _NEAR_CHARACTERS)
        places = (text.rfind(border, near) for border in self.border_tokens.values())
        return max(0, max(places, default=0))

    @cached_property
    def _inner(self) -> tokenizers.Tokenizer:
        """The tokenizer, without a blank before the text if it adds one."""
        pre_tokenizer = _state(self._backend.pre_tokenizer)
        normalizer = _state(self._backend.normalizer)
        plain = _without_prefix(pre_tokenizer), _without_prefix(normalizer)
        if plain == (pre_tokenizer, normalizer):
            return self._backend
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        if plain[0] != pre_tokenizer:
            part = pre_tokenizers.Whitespace()
            part.__setstate__(json.dumps(plain[0]).encode())
            copy.pre_tokenizer = part
        if plain[1] != normalizer:
            part = normalizers.NFC()
            part.__setstate__(json.dumps(plain[1]).encode())
            copy.normalizer = part
        return copy


def _encoded(backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    try:
        return backend.encode(text, add_special_tokens=False)
    except TypeError:  # what tokenizers says of text that is not Unicode
        place = next(place for place, character in enumerate(text) if "\ud800" <= character <= "\udfff")
        raise DataError(
            f"the text has {text[place]!a}, half of a surrogate pair, behind {text[max(0, place - 20) : place]!a}"
        ) from None


@lru_cache
def _warn_of_what_is_left_out(name: str, role: str) -> None:
    report(f"WARNING: the chat template of '{name}' leaves out what messages of role `{role}` say in prompts")


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _without_prefix(part: Any) -> Any:
    """Return the description of a normalizer or pre-tokenizer without what puts a blank before a text."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part.get("type") == "ByteLevel":
        return {**part, "add_prefix_space": False}
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    for key in ("pretokenizers", "normalizers"):
        if key in part:
            return {**part, key: [_without_prefix(inner) for inner in part[key]]}
    return part


_GENERATION = "generation_config.json"
_TEMPLATES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
_FILES = ("tokenizer.json", "tokenizer_config.json", _GENERATION, *_TEMPLATES.values())
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a local directory or of a model on the hub. Raise ConfigError if the directory or model
    does not exist, or has no `tokenizer.json`; DataError if one of its files is damaged."""
    files = tokenizer_files(name)
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
    templates = _templates_of(config.get("chat_template"))
    if _TEMPLATES["default"] in files:
        # As transformers, whatever the locale says.
        templates = {kind: files[file].read_text("utf-8") for kind, file in _TEMPLATES.items() if file in files}
    return Tokenizer(
        backend,
        name=name,
        templates=templates,
        special={key: text for key in _SPECIAL if (text := _text_of(config.get(key)))},
        end_token_ids=_end_token_ids(files),
    )


def end_token_ids(name: str) -> list[int]:
    """Return the tokens that end a turn by the generation_config.json of `name`, a local directory or a model on the
    hub. Raise as `load_tokenizer`."""
    return _end_token_ids(_files_of(name, [_GENERATION]))


def _end_token_ids(files: Mapping[str, Path]) -> list[int]:
    ends = _read_json(files[_GENERATION]).get("eos_token_id") if _GENERATION in files else None
    return [] if ends is None else ends if isinstance(ends, list) else [ends]


def complete_end_tokens(directory: Path) -> None:
    """Add to the generation_config.json of a model the tokens that end a turn by its chat template, after those there.

    Without them, other programs than ours would not stop at the end of a turn. The file stays, with a
    warning, if the tokenizer or its template cannot be read. The tokenizer's files stay: its `eos_token` may be in
    templates."""
    path = directory / _GENERATION
    if not path.is_file():
        return
    known = _end_token_ids({_GENERATION: path})
    try:
        added = [token for token in load_tokenizer(str(directory)).stop_token_ids if token not in known]
    except (ConfigError, DataError) as error:
        report(f"WARNING: generation_config.json does not name the token that ends a turn: {error}")
        return
    if added:
        settings = _read_json(path) | {"eos_token_id": [*known, *added]}
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def tokenizer_files(name: str) -> Mapping[str, Path]:
    """Return the files of a tokenizer by their name, in a directory or on the hub. Raise as `load_tokenizer`."""
    return _files_of(name, _FILES)


def _files_of(name: str, wanted: Sequence[str]) -> dict[str, Path]:
    if not Path(name).is_dir():
        return _hub_files(name, wanted)
    return {file: Path(name, file) for file in wanted if Path(name, file).is_file()}


def _hub_files(name: str, wanted: Sequence[str]) -> dict[str, Path]:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError

    found = {}
    for file in wanted:
        try:
            found[file] = Path(hf_hub_download(name, file))
        except LocalEntryNotFoundError as error:
            if file == "tokenizer.json":
                raise ConfigError(
                    f"model.tokenizer: '{name}' is not a directory, and the hub is silent: {error}"
                ) from None
            # A template that is missing for a broken connection would change what the model is trained on.
            is_known_missing = try_to_load_from_cache(name, file) is not None
            if not (is_known_missing or constants.HF_HUB_OFFLINE):
                raise ConfigError(
                    f"model.tokenizer: whether '{name}' has {file} is not known, as the hub is silent: {error}. Try "
                    "again, or set HF_HUB_OFFLINE=1 to go by what is in the cache."
                ) from None
        except EntryNotFoundError:
            continue
        except (HFValidationError, OSError) as error:
            raise ConfigError(
                f"model.tokenizer: '{name}' is neither a directory nor a model on the hub: {error}"
            ) from None
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None


def _text_of(token: Any) -> str | None:
    """Special tokens are written as text, or as a map with `content`."""
    return token.get("content") if isinstance(token, dict) else token


def _templates_of(entry: Any) -> dict[str, str]:
    """`chat_template` of tokenizer_config.json: text, or a list of named templates."""
    if isinstance(entry, list):
        return {item["name"]: item["template"] for item in entry}
    return {"default": entry} if entry else {}
