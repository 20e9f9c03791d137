"""Model cards of exported steps, and their upload to a hub: `ckpt export --to-hub`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError, HoldfastError
from holdfast.run.checkpoints import TRAINER_DIR
from holdfast.run.manifest import read_manifest
from holdfast.run.settings import flat_settings, read_settings, without_secrets
from holdfast.run.weights import ADAPTER_NAME

CARD_NAME = "README.md"
SUMMARY = (
    "max_steps", "seed", "model.name", "model.dtype", "data.name", "data.batch_size", "data.seq_len", "loss.type",
    "optim.lr", "optim.schedule", "parallel.num_ranks",
)  # fmt: skip


def check_repository(name: str) -> None:
    """Raise ConfigError if a hub has no repositories with such a name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--to-hub {name}: {error}. Give USER/NAME.") from None


def write_card(directory: Path, step: Path, *, name: str) -> None:
    """Write the model card of a checkpoint `step` beside its exported weights, without paths of this machine."""
    from huggingface_hub import ModelCardData

    listing, config = read_manifest(step), step / TRAINER_DIR / "config.toml"
    settings = flat_settings(without_secrets(read_settings(config))) if config.exists() else {}
    base, data = (_of_hub(settings.get(key)) for key in ("model.name", "data.name"))
    card = ModelCardData(
        base_model=base,
        datasets=data,
        library_name="peft" if (directory / ADAPTER_NAME).exists() else "transformers",
        pipeline_tag="text-ranking" if listing.program == "reward-model" else "text-generation",
        tags=["holdfast", listing.program] if listing.program else ["holdfast"],
    )
    shown = {key: settings[key] for key in SUMMARY if key in settings}
    shown |= {key: Path(str(shown[key])).name for key in ("model.name", "data.name") if key in shown}
    shown |= {key: value for key, value in (("model.name", base), ("data.name", data)) if value}
    metrics = {key: f"{value:.6g}" for key, value in listing.metrics.items()}
    parts = [
        f"---\n{card.to_yaml()}\n---\n\n# {name.rpartition('/')[2]}\n",
        f"Step {listing.step} of `{listing.program or 'training'}` with holdfast, run `{listing.run_id}`.\n",
        *(_table("setting", shown) if shown else ()),
        *(_table("metric of this step", metrics) if metrics else ()),
    ]
    (directory / CARD_NAME).write_text("\n".join(parts), encoding="utf-8")


def _of_hub(name: object) -> str | None:
    """Return a name if it is of a hub, and not of a file or directory."""
    text = str(name or "")
    is_local = text.startswith(("/", ".", "~")) or Path(text).exists() or Path(text).suffix in (".jsonl", ".parquet")
    return text if text.count("/") == 1 and not is_local else None


def _table(title: str, values: Mapping[str, Any]) -> list[str]:
    cells = (f"| {key} | {str(value).replace('|', '&#124;')} |" for key, value in values.items())
    return ["\n".join([f"| {title} | |", "| --- | --- |", *cells, ""])]


def push(directory: Path, name: str, *, private: bool, message: str) -> str:
    """Upload a directory to the repository `name` of a hub, which is made if need be; return its address. Raise
    HoldfastError if the hub cannot be reached or refuses; the directory stays."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        url = api.create_repo(name, private=private or None, exist_ok=True)  # None: as its owner has chosen
        api.upload_folder(repo_id=url.repo_id, folder_path=directory, commit_message=message)
        return str(url)
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        error = HoldfastError(
            f"--to-hub {name}: the hub at {api.endpoint} refused, or cannot be reached: {reason}. It needs a token "
            "that may write (`hf auth login`, or HF_TOKEN). The export stays; to upload it again: "
            f"`hf upload {name} {shlex.quote(str(directory))}`"
        )
        error.exit_code = 1
        raise error from None
