"""The command `chat`: talks to a model, or to the newest weights of a run, in the terminal.

The chat is rendered as training renders it. transformers samples the answers, in this process. It says nothing exact
about a policy: for numbers use `evaluate`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.arguments import Parser, positive
from holdfast.chat.messages import Message
from holdfast.errors import ConfigError, DataError
from holdfast.process.child import heavy_imports
from holdfast.run.choose_run import HOME, command_line, no_run, only_run
from holdfast.run.run_dir import RunDir

if TYPE_CHECKING:
    from holdfast.chat.tokenizer import Tokenizer

_HELP = "/system TEXT (empty: none), /reset (begin again), /quit"
_UNFINISHED = "\ufffd"
"""The decoder writes this for a part of a character."""


def main(argv: list[str]) -> int:
    """Talk until the end of the input; return 0. Raise ConfigError if the place holds neither a model nor a run.
    Raise DataError if the model cannot be loaded."""
    arguments = parse(argv)
    name = weights_of(arguments.model or only_run("chat", argv))
    from holdfast.chat.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(name)
    if not tokenizer.has_template:
        raise ConfigError(f"{name} has no chat template: it completes texts, and does not chat")
    print(f"loading {name} ...", file=sys.stderr, flush=True)
    model = _Model(name, tokenizer, arguments)
    print(f"{name}: {_HELP}", file=sys.stderr, flush=True)
    history = _with_system(arguments.system or "")
    for line in _lines():
        command, _, rest = line.partition(" ")
        match command:
            case "/quit" | "/exit":
                break
            case "/reset":
                history = history[:1] if history and history[0].role == "system" else []
            case "/system":
                history = _with_system(rest.strip()) + [one for one in history if one.role != "system"]
            case _ if line.startswith("/"):
                print(f"there is no {command}. There are: {_HELP}", file=sys.stderr)
            case _:
                asked = [*history, Message("user", line)]
                answer = model.answer(asked)
                history = [*asked, Message("assistant", answer)] if answer is not None else history
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the arguments. Raise ConfigError for an unknown flag or a bad value."""
    parser = Parser(prog="chat", description="Talk to a model in the terminal.", epilog=f"In the chat: {_HELP}.")
    told = (
        "a directory with a model, a run (its newest weights), or a model on a hub; unset: the only run below outputs"
    )
    parser.add_argument("model", nargs="?", metavar="WEIGHTS_OR_RUN", help=told)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--temperature", type=_temperature, default=1.0, metavar="T", help="0: the likeliest token")
    parser.add_argument("--max-tokens", type=positive, default=512, metavar="N", help="most tokens of an answer (512)")
    parser.add_argument("--seed", type=int, help="of the samples; unset: another one each time")
    return parser.parse_args(argv)


def _temperature(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < 100:
            return value
    raise argparse.ArgumentTypeError(f"must be a number from 0 on, got {text!r}")


def weights_of(place: str | Path) -> str:
    """Return the directory of the weights that a place stands for, or the name of a model on a hub. Raise ConfigError
    if a run has no weights yet, or a directory holds neither."""
    path = Path(place)
    if not path.exists() and (str(place)[:1] in tuple("./~") or path.parts[0] == HOME.name or len(path.parts) > 2):
        raise no_run(path)
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file() or not path.exists():
        return str(place)
    run_dir = RunDir(path)
    if not run_dir.holds_run():
        raise ConfigError(f"{place} has neither config.json nor run.json: name a model, or the directory of a run")
    versions = run_dir.published_weights()
    if not versions:
        line = command_line("ckpt export", path, ["latest", "--to", "DIR"])
        raise ConfigError(f"{place} has no exported weights yet. `{line}` exports a checkpoint; then chat with DIR.")
    return str(run_dir.weights_of(versions[-1]))


def _with_system(text: str) -> list[Message]:
    return [Message("system", text)] if text else []


def _lines() -> Iterator[str]:
    """Yield what is typed, line by line, until the end of the input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


class _Model:
    """A model that answers chats."""

    def __init__(self, name: str, tokenizer: Tokenizer, arguments: argparse.Namespace) -> None:
        with heavy_imports():
            import torch
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._torch, self._tokenizer, self._arguments = torch, tokenizer, arguments
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto", trust_remote_code=False)
        except Exception as error:
            raise DataError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
        self._model = model.to(device).eval()
        if arguments.seed is not None:
            torch.manual_seed(arguments.seed)

    def answer(self, chat: list[Message]) -> str | None:
        """Print an answer while it is sampled, and return it; None if the chat is too long, or Ctrl-C ended it."""
        ids, most = self._tokenizer.prompt(chat), self._arguments.max_tokens
        room = getattr(self._model.config, "max_position_embeddings", None)
        if room is not None and len(ids) + most > room:
            told = f"the chat has {len(ids)} tokens, and with {most} more it exceeds the {room} of the model"
            print(f"{told}: /reset, or a smaller --max-tokens", file=sys.stderr)
            return None
        shown, begun = _Shown(self._tokenizer), time.monotonic()
        temperature = self._arguments.temperature
        sampled = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0} if temperature else {}
        given = self._torch.tensor([ids], device=self._model.device)
        try:
            with self._torch.inference_mode():
                self._model.generate(
                    given, attention_mask=self._torch.ones_like(given), streamer=shown, max_new_tokens=most,
                    eos_token_id=self._tokenizer.stop_token_ids, pad_token_id=self._tokenizer.stop_token_ids[0],
                    **(sampled or {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}),
                )  # fmt: skip
        except KeyboardInterrupt:
            print("\n(stopped: the question and this answer are forgotten)", file=sys.stderr, flush=True)
            return None
        count = len(shown.ids)
        speed = count / max(1e-9, time.monotonic() - begun)
        print(flush=True)
        print(f"({count} tokens, {speed:.1f} tokens/s)", file=sys.stderr, flush=True)
        return shown.text


class _Shown:
    """Prints tokens as text when they come, as transformers calls a streamer.

    Attributes:
        ids: of the answer.
        text: of the answer, without special tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._has_prompt = tokenizer, False
        self.ids: list[int] = []
        self.text = ""

    def put(self, value: Any) -> None:
        """Take the prompt first, and then each token."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.ids += value.reshape(-1).tolist()
        text = self._tokenizer.decode(self.ids)
        if not text.endswith(_UNFINISHED):
            print(text[len(self.text) :], end="", flush=True)
            self.text = text

    def end(self) -> None:
        """Print the rest, such as a part of a character."""
        text = self._tokenizer.decode(self.ids)
        print(text[len(self.text) :], end="", flush=True)
        self.text = text
