"""The help: one screen, one section or everything, from a list that is what the settings say."""

import json
import subprocess
import sys

import jsonschema
import pytest
import tomli

from docs_tools import listing
from holdfast.config import help
from holdfast.config.load import flags_of
from holdfast.errors import ConfigError
from tests.conftest import ROOT

SUMMARY = "What it does."


def test_the_list_is_what_the_settings_say() -> None:
    assert listing.FILE.read_text() == listing.text_of_listing(), "run `python -m docs_tools.listing`"


@pytest.mark.parametrize("command", listing.SETTINGS)
def test_help_fits_on_a_screen_and_names_what_there_is(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help.text(command, SUMMARY, ["--help"])
    lines = text.splitlines()
    assert len(lines) <= 60 and SUMMARY in lines
    sections = help._sections(command)
    keys = {one["key"] for section in sections.values() for one in section["settings"]}
    assert set(help.first(command)["settings"]) <= keys
    for name, section in sections.items():
        assert not name or f"{name} {len(section['settings'])}" in " ".join(text.split())
    if command != "evaluate":
        assert all(f"uv run {example}" in text for example in help.first(command)["examples"])


@pytest.mark.parametrize("command", listing.SETTINGS)
def test_help_all_has_every_setting_that_is_not_handed_down(command: str) -> None:
    text = help.text(command, SUMMARY, ["--help-all"])
    shown = {word for word in text.split() if word.startswith("--")}
    handed_down = {
        f"--{process}.{name}"
        for process, names in json.loads(listing.FILE.read_text())["shared"].items()
        for name in names
    }
    for word, flag in flags_of(listing.SETTINGS[command]).items():
        hidden = command == "rl" and any(
            word == one.replace("_", "-") or word.startswith(f"{one.replace('_', '-')}.") for one in handed_down
        )
        if not word.startswith("--no-") and not flag.is_section and not hidden:
            assert word in shown or f"[{flag.key}[]]" in text, word
    for words in ("(undefined)", "None", "null", "JSON string"):
        assert f"default {words}" not in text


def test_help_of_a_section_a_setting_and_of_nothing() -> None:
    section = help.text("rl", SUMMARY, ["--help", "trainer.loss"])
    assert "--trainer.loss.clip-high" in section and "--trainer.loss.correction.level" in section
    assert "--trainer.optim.lr" not in section
    for words in (["--help", "trainer.optim.lr"], ["--help", "--trainer.optim.lr"]):
        assert help.text("rl", SUMMARY, words).count("--trainer.optim.") == 1
    with pytest.raises(ConfigError, match=r"Did you mean 'trainer.loss'\?"):
        help.text("rl", SUMMARY, ["--help", "trainer.los"])
    assert help.text("rl", SUMMARY, ["--help", "@", "x.toml"]) == help.text("rl", SUMMARY, ["-h"])


def test_defaults_of_sections_that_are_off_do_not_read_as_if_they_were_on() -> None:
    text = help.text("rl", SUMMARY, ["--help"])
    assert "--trainer.model.lora.rank (off; 16) " in text and " LoRA: rank of the adapters\n" in text
    assert "--trainer.optim.lr (" in text and "--trainer.optim.lr (off" not in text


def test_help_imports_no_settings() -> None:
    code = (
        "import sys; sys.argv = ['rl', '--help']\nfrom holdfast import cli\ntry: cli.rl()\nexcept SystemExit: pass\n"
        "print(sorted({'pydantic', 'asyncio', 'holdfast.launcher', 'torch'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("command", "file"),
    [("rl", "rl"), ("sft", "sft"), ("dpo", "dpo"), ("reward-model", "reward_model"), ("trainer", "train"),
     ("orchestrator", "orch"), ("inference", "infer"), ("evaluate", "evaluate")],
)  # fmt: skip
def test_the_schema_takes_the_shipped_files_and_no_unknown_key(command: str, file: str) -> None:
    schema = json.loads(listing.json_schema(command))
    content = tomli.loads((ROOT / "configs" / "reverse_text" / f"{file}.toml").read_text())
    jsonschema.validate(content, schema)
    with pytest.raises(jsonschema.ValidationError, match="learning_rate"):
        jsonschema.validate({**content, "learning_rate": 1}, schema)
    described = [schema, *schema["$defs"].values()]
    assert all(one.get("description") for table in described for one in table.get("properties", {}).values())
