"""Subcommands and flags of `ckpt`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from holdfast.commands.subcommands import Parser, Subcommands

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EPILOG = "STEP is a number, `latest`, or the path of a checkpoint such as OTHER/checkpoints/step_20."


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the arguments; prints help and exits on -h.

    Returns:
        `command` (name of the subcommand), `output_dir`, `json`, and what the subcommand takes.

    Raises:
        ConfigError: an unknown subcommand or flag, with the nearest spelling, or a value that cannot be used.
    """
    return _subcommands().parse(argv)


def _subcommands() -> Subcommands:
    subcommands = Subcommands("ckpt", "Look into the checkpoints of a run.", _EPILOG)
    add = subcommands.add
    _add_looking(add("ls", "List steps and exports."), add("verify", "Check every byte against the manifests."))
    add("show", "Show what one step holds.").add_argument("step", metavar="STEP")
    export = add("export", "Write a step's model as a Hugging Face directory.")
    export.add_argument("step", metavar="STEP")
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="new directory")
    _add_export(export)
    promote = add("promote", "Export a step to OUTPUT_DIR/exports/NAME, which retention never touches.")
    promote.add_argument("step", metavar="STEP")
    promote.add_argument("--name", type=_name, required=True, help="letters, digits, '.', '_' and '-'")
    _add_export(promote)
    _add_prune(add("prune", "Remove steps by the rules of --ckpt.keep, and what torn saves left."))
    importing = add("import", "Make a warm start (--ckpt.weights-only) of weights of any kind.")
    importing.add_argument("source", metavar="PATH", help="weights file, directory, checkpoint, or step")
    importing.add_argument("--to", type=Path, required=True, metavar="DIR", help="new directory")
    importing.add_argument("--model", metavar="NAME_OR_DIR", help="source of config and tokenizer, if PATH has none")
    return subcommands


def _add_looking(ls: Parser, verify: Parser) -> None:
    ls.add_argument("--metric", metavar="NAME", help="marks the best: min:val/loss (ckpt.keep_best, reward/mean, loss)")
    verify.add_argument("steps", nargs="*", metavar="STEP", help="all steps and exports if none is named")
    verify.add_argument("--how", choices=("full", "size"), default="full", help="every byte (full), or sizes only")


def _add_export(command: Parser) -> None:
    command.add_argument("--dtype", choices=("float32", "bfloat16"), help="that of the run if unset")
    command.add_argument("--max-shard-size", type=_size, metavar="SIZE", help="such as 4GB or 500MiB (4GiB)")
    command.add_argument("--model", metavar="NAME_OR_DIR", help="config and tokenizer for a step that has none")
    command.add_argument("--base", metavar="NAME_OR_DIR", help="weights to merge a LoRA adapter into; unset: it alone")


def _add_prune(prune: Parser) -> None:
    prune.add_argument("--keep", type=_positive, metavar="K", help="keep the newest K; unset: all steps stay")
    prune.add_argument("--keep-interval", type=_positive, metavar="M", help="keep every Mth step besides")
    prune.add_argument("--keep-best", metavar="METRIC", help="keep the best besides, such as max:reward/mean")
    prune.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text) or text.startswith("."):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a name: letters, digits, '.', '_' and '-' are allowed, and no '.' at the start"
        )
    return text


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 4GB, 500MB or 2GiB")
    return size
