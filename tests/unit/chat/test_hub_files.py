"""A tokenizer of a model on the hub: what is there, what is not, and what nobody knows."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fastapi import FastAPI, Response

from holdfast.chat.tokenizer import complete_end_tokens, load_tokenizer
from holdfast.errors import ConfigError, DataError
from tests.servers.quick_server import served

LOAD = """
import sys, time
time.sleep = lambda _: None  # between the tries of the hub's own library
from holdfast.chat.tokenizer import load_tokenizer
from holdfast import HoldfastError
try:
    print(sorted(load_tokenizer("someone/model")._templates))
except HoldfastError as error:
    sys.exit(str(error))
"""


@contextmanager
def hub(files: dict[str, bytes], *, fails: set[str] = frozenset()) -> Iterator[str]:
    """Serve one model as the hub does; for `fails` it answers 503."""
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "HEAD"])
    def answer(path: str) -> Response:
        name = path.rpartition("/")[2]
        content = files.get(name)
        headers = {"X-Repo-Commit": "c" * 40, "ETag": f'"{len(content or b"")}"'}
        if name in fails:
            return Response(status_code=503, headers=headers)
        if content is None:
            return Response(status_code=404, headers=headers | {"X-Error-Code": "EntryNotFound"})
        return Response(content, headers=headers)

    with served(app) as url:
        yield url


def load(endpoint: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    wanted = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-c", LOAD], env=os.environ | wanted | environment, capture_output=True, text=True, check=False
    )


def test_a_template_that_cannot_be_read_leaves_the_end_tokens_with_a_warning(
    tmp_path: Path, plain_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    model = shutil.copytree(plain_model(), tmp_path / "model")
    (model / "generation_config.json").write_text("{}")
    (model / "chat_template.jinja").write_text("{% broken")
    complete_end_tokens(model)
    assert "WARNING: generation_config.json does not name the token that ends a turn: " in caplog.text
    assert (model / "generation_config.json").read_text() == "{}"


@pytest.mark.launch
def test_an_unknown_template_is_not_taken_for_missing(tmp_path: Path, plain_model: Callable[..., Path]) -> None:
    """With the fallback of a broken connection the model would be trained on another chat format."""
    files = {path.name: path.read_bytes() for path in plain_model().iterdir() if path.name.startswith("tokenizer")}
    files["chat_template.jinja"] = b"{{ messages }}"
    with hub(files, fails={"chat_template.jinja"}) as endpoint:
        broken = load(endpoint, tmp_path / "cache")
    assert broken.returncode == 1 and "whether 'someone/model' has chat_template.jinja is not known" in broken.stderr
    assert "HF_HUB_OFFLINE=1" in broken.stderr
    with hub(files) as endpoint:
        whole = load(endpoint, tmp_path / "cache")
    assert (whole.returncode, whole.stdout) == (0, "['default']\n"), whole.stderr
    gone = load("http://127.0.0.1:9", tmp_path / "cache")
    assert (gone.returncode, gone.stdout) == (0, "['default']\n"), "all is in the cache, also what is not there"
    (copied,) = (tmp_path / "cache").rglob("generation_config.json")
    copied.unlink()  # as where somebody has copied the snapshot alone
    assert load("http://127.0.0.1:9", tmp_path / "cache").returncode == 1
    offline = load("http://127.0.0.1:9", tmp_path / "cache", HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, "['default']\n"), offline.stderr
    unknown = load("http://127.0.0.1:9", tmp_path / "empty", HF_HUB_OFFLINE="1")
    assert unknown.returncode == 1 and "'someone/model' is not a directory, and the hub is silent" in unknown.stderr


@pytest.mark.launch
def test_the_template_of_tools_is_there_at_the_first_start(tmp_path: Path, plain_model: Callable[..., Path]) -> None:
    """Else a later start, after transformers has downloaded it, renders other prompts."""
    files = {path.name: path.read_bytes() for path in plain_model().iterdir() if path.name.startswith("tokenizer")}
    with hub(files | {"chat_template.jinja": b"{{ messages }}", "tool_use.jinja": b"{{ tools }}"}) as endpoint:
        first = load(endpoint, tmp_path / "cache")
    assert (first.returncode, first.stdout) == (0, "['default', 'tool_use']\n"), first.stderr


def test_a_name_that_can_be_no_model_is_refused_as_such() -> None:
    with pytest.raises(
        ConfigError, match="model.tokenizer: 'no/such/directory' is neither a directory nor a model on the"
    ):
        load_tokenizer("no/such/directory")


def test_a_template_is_read_alike_in_every_locale(
    plain_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(shutil.copytree(plain_model(), tmp_path / "model"))
    (directory / "chat_template.jinja").write_bytes("\uff5c{{ messages }}".encode())
    monkeypatch.setattr(io, "text_encoding", lambda encoding, *_: encoding or "latin-1")
    assert load_tokenizer(str(directory)).template().source == "\uff5c{{ messages }}"


def test_files_of_a_tokenizer_that_are_damaged_or_missing(plain_model: Callable[..., Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(plain_model(), tmp_path / "model"))
    config = directory / "tokenizer_config.json"
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": named}))
    tokenizer = load_tokenizer(str(directory))
    assert [tokenizer.template(tools).source for tools in (None, [{}])] == ["a", "b"]
    config.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(str(directory))
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(str(directory))
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json\. Write one with"):
        load_tokenizer(str(directory))
