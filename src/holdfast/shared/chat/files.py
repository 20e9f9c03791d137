"""A tokenizer from the files of a model, local or on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from holdfast.shared.chat.tokenizer import Tokenizer
from holdfast.shared.errors import ConfigError, DataError

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MORE_TEMPLATES = "additional_chat_templates"


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
    templates = _templates_of(config.get("chat_template"))
    if "chat_template.jinja" in files:
        more = (files["chat_template.jinja"].parent / _MORE_TEMPLATES).glob("*.jinja")
        templates = {path.stem: path.read_text() for path in more}
        templates["default"] = files["chat_template.jinja"].read_text()
    generation = _read_json(files["generation_config.json"]) if "generation_config.json" in files else {}
    ends = generation.get("eos_token_id")
    return Tokenizer(
        backend,
        name=name,
        templates=templates,
        special={key: text for key in _SPECIAL if (text := _text_of(config.get(key)))},
        end_token_ids=[] if ends is None else ends if isinstance(ends, list) else [ends],
    )


def _local_files(directory: Path) -> dict[str, Path]:
    return {name: directory / name for name in _FILES if (directory / name).is_file()}


def _hub_files(name: str) -> dict[str, Path]:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
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


def _templates_of(entry: Any) -> dict[str, str]:
    """`chat_template` of tokenizer_config.json: text, or a list of named templates."""
    if isinstance(entry, list):
        return {item["name"]: item["template"] for item in entry}
    return {"default": entry} if entry else {}
