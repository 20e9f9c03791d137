"""What files of models and data are taken for, by names, bytes and headers."""

import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest

from holdfast.config import InferenceConfig
from holdfast.errors import ConfigError, DataError, ReadError
from holdfast.run import inputs
from holdfast.run.data_files import find_files
from holdfast.run.inputs import check_data_path, check_model_path, check_tokenizer_path, check_weights_path
from tests.runs.processes import in_a_child


def weights_of(header: object, *, num_bytes: int = 0) -> bytes:
    """Return a file of safetensors with that header and so many bytes behind it."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


ONE = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}}


def refusal(check: Callable[[], None]) -> str:
    with pytest.raises(DataError) as caught:
        check()
    return str(caught.value)


@pytest.mark.parametrize(("content", "said"), [
    (b"", "it has 0 bytes"), (struct.pack("<Q", 1 << 40), "or was cut: it has 8 bytes"),
    (weights_of([1]), "its header cannot be read"), (weights_of({}), "its header cannot be read"),
    (weights_of({"a": 3}), "its header cannot be read"),
])  # fmt: skip
def test_weights_that_are_none_are_told_by_their_header(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    message = refusal(lambda: check_weights_path(str(tmp_path)))
    assert said in message and "model.safetensors" in message and str(tmp_path) in message


def test_the_model_of_an_example_is_told_with_the_command_that_makes_it(in_tmp_path: Path) -> None:
    maker = in_tmp_path / "examples" / "tiny" / "make_model.py"
    maker.parent.mkdir(parents=True)
    maker.touch()
    said = refusal(lambda: check_model_path("outputs/tiny/model", key="model.name"))
    assert "Make it by `uv run --group tiny python -m examples.tiny.make_model`, or name another model." in said
    assert "make_model" not in refusal(lambda: check_model_path("outputs/other/model", key="model.name"))


def test_whole_weights_pass_in_one_file_or_in_several(tmp_path: Path) -> None:
    check_weights_path("someone/model")
    (tmp_path / "model.safetensors").write_bytes(weights_of(ONE, num_bytes=8))
    check_weights_path(str(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    assert "which says what is in one.safetensors" in refusal(lambda: check_weights_path(str(tmp_path)))
    check_weights_path(str(tmp_path), needs_index=False)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    check_weights_path(str(tmp_path))
    index.write_text(json.dumps({"weight_map": {str(number): f"{number}.safetensors" for number in range(5)}}))
    said = refusal(lambda: check_weights_path(str(tmp_path)))
    assert "lacks 5 of the 5 files" in said and "0.safetensors, 1.safetensors, 2.safetensors ..." in said
    index.write_text("[]")
    assert "holds no JSON object" in refusal(lambda: check_weights_path(str(tmp_path)))


def test_directories_without_what_makes_a_model_are_told_with_what_makes_one(tmp_path: Path) -> None:
    assert "model.name = " in (said := refusal(lambda: check_model_path(str(tmp_path), key="model.name")))
    assert "has no config.json" in said
    (tmp_path / "run/weights/step_12").mkdir(parents=True)
    said = refusal(lambda: check_model_path(str(tmp_path / "run"), key="model.name"))
    assert (
        f"It is the directory of a run: give weights of the run, the newest are {tmp_path}/run/weights/step_12." in said
    )
    assert "is in the directory of a run" in refusal(lambda: check_model_path(str(tmp_path / "run/weights"), key="x"))
    said = refusal(lambda: check_weights_path(str(tmp_path)))
    assert "has no *.safetensors. Set model.init = random" in said


def test_any_file_of_a_tokenizer_is_one(tmp_path: Path) -> None:
    check_tokenizer_path("someone/model", key="model.name")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert "model.name = " in refusal(lambda: check_tokenizer_path(str(tmp_path), key="model.name"))
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "qwen.tiktoken"):
        (tmp_path / name).touch()
        check_tokenizer_path(str(tmp_path), key="model.name")
        (tmp_path / name).unlink()


def test_kinds_of_files_of_data(tmp_path: Path) -> None:
    def said(name: str, content: bytes = b"") -> str:
        (tmp_path / name).write_bytes(content)
        return refusal(lambda: check_data_path(str(tmp_path / name), key="data.name"))

    assert "use a .jsonl, .json, .csv" in said("rows.xlsx")
    assert "no such file" in refusal(lambda: check_data_path(str(tmp_path / "none.csv"), key="data.name"))
    assert "UTF-16" in said("rows.jsonl", "{}".encode("utf-16-be").join([b"\xfe\xff", b""]))
    good = {"ROWS.JSONL": b"{}", "a.parquet": b"PAR1....PAR1", "a.json.gz": b"\x1f\x8b", "b.json": b"["}
    for name, content in good.items():
        (tmp_path / name).write_bytes(content)
        check_data_path(str(tmp_path / name), key="data.name")
    check_data_path("someone/rows", key="data.name")


def test_a_directory_of_data_is_read_whole_or_refused_with_names(tmp_path: Path) -> None:
    def check(split: str | None = "train") -> None:
        check_data_path(str(tmp_path), key="data.name", split=split)

    (tmp_path / "deep").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/b.csv").touch()
    (tmp_path / "dataset_info.json").touch()
    (tmp_path / "notes.md").touch()
    assert "holds no .jsonl, .json" in refusal(check)
    (tmp_path / "deep/a.jsonl").touch()
    (tmp_path / "c.parquet").write_bytes(b"PAR1....PAR1")
    check()
    (tmp_path / "rows.yaml").touch()
    assert "holds rows.yaml, which cannot be read as rows" in refusal(check)
    (tmp_path / "rows.yaml").unlink()
    (tmp_path / "math_test.json").write_text("[]")
    assert "tell a split, math_test.json (test), and others none, c.parquet, deep/a.jsonl." in refusal(check)
    check(None)
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: a\n  data_files: c.parquet\n---\n")
    check()
    assert "has the splits ['train']" in refusal(lambda: check("test"))


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("  data_dir: deep\n  data_files: '*.csv'", ["deep/a.csv"]),
        ("  data_files: deep/*", ["deep/a.csv"]),
        ("  data_files: '**'", ["b.csv", "deep/a.csv"]),
        ("  data_files: /etc/*.csv", "which are not below its directory"),
        ("  data_files: ''", "which are not below its directory"),
        ("", ["b.csv", "deep/a.csv"]),
    ],
)
def test_files_are_those_that_a_card_names(entry: str, found: list[str] | str, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.csv", "deep/a.csv", "deep/.hidden.csv"):
        (tmp_path / name).write_text("text\nx\n")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "README.md").write_text(f"---\nlicence: mit\nconfigs:\n- config_name: a\n{entry}\n---\n`data_files:`\n")
    if isinstance(found, str):
        assert found in refusal(lambda: find_files(str(tmp_path), key="data.name"))
    else:
        assert [file.label for file in find_files(str(tmp_path), key="data.name") or ()] == found


def test_what_cannot_be_read_is_no_damage(tmp_path: Path) -> None:
    """Permissions count for whoever is not root: this is seen by a process that is nobody."""
    tmp_path.chmod(0o755)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model.safetensors").write_bytes(weights_of(ONE, num_bytes=8))
    (tmp_path / "rows.jsonl").write_text("{}")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for name in ("config.json", "model.safetensors", "rows.jsonl"):
        (tmp_path / name).chmod(0)

    def check() -> None:
        os.fchdir(descriptor)  # its parents may not be entered
        if os.getuid() == 0:
            os.setuid(65534)
        for call in (
            lambda: check_model_path(".", key="model.name"),
            lambda: check_weights_path("."),
            lambda: check_data_path("./rows.jsonl", key="data.name"),
        ):
            with pytest.raises(ReadError, match="cannot be read: Permission denied"):
                call()

    assert os.waitstatus_to_exitcode(os.waitpid(in_a_child(check), 0)[1]) == 0
    os.close(descriptor)


def test_a_full_cache_is_not_a_missing_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(OSError, match="No space left on device"):
        inputs.ask_hub("someone/model", key="model.name")


SCALED = {"rope_parameters": {"type": "linear", "factor": 4.0}}


@pytest.mark.parametrize(("config", "args", "is_refused"), [
    ({"max_position_embeddings": 32, "rope_parameters": {"rope_type": "default"}}, {}, True),
    ({"max_position_embeddings": 32}, {"hf_overrides": "{}"}, False),
    ({"max_position_embeddings": 33}, {}, False),
    # What vLLM has to interpret:
    ([], {}, False),
    ({"max_position_embeddings": "many"}, {}, False),
    ({"max_position_embeddings": 8, "model_max_length": 64}, {}, False),
    ({"max_position_embeddings": 8, **SCALED}, {}, False),
    ({"max_position_embeddings": 8, "text_config": {"max_position_embeddings": 64}}, {}, False),
])  # fmt: skip
def test_more_positions_than_the_model_has_are_refused(
    config: object, args: dict[str, str], is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = InferenceConfig.model_validate({"model": {"name": "m", "max_len": 33}, "engine": {"args": args}})
    inputs.check_max_len(served, "owner/model", key="model")
    inputs.check_max_len(served, tmp_path, key="model")
    (tmp_path / "config.json").write_text(json.dumps(config))
    if is_refused:
        said = r"^eval\.inference\.model\.max_len = 33 is more than the 32 .* Set --eval\.inference\.model\.max-len 32"
        with pytest.raises(ConfigError, match=said):
            inputs.check_max_len(served, tmp_path, key="eval.inference.model")
        monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "True")
    inputs.check_max_len(served, tmp_path, key="model")
