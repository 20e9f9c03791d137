"""Which steps `profile` names, and what is refused before anything starts."""

from pathlib import Path

import pytest

from holdfast.config import RlConfig, SftConfig
from holdfast.config.load import parse_command_line, read_toml, to_toml
from holdfast.config.resolved import fingerprint
from holdfast.config.rl import hand_down_shared
from holdfast.config.view import ProfiledSteps
from holdfast.errors import ConfigError


def _sft(*flags: str) -> SftConfig:
    return parse_command_line(SftConfig, ["--max-steps", "100", *flags])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("3", 'should be FIRST:LAST, the first and the last step to profile, such as 3:5, got "3"'),
        ("a:b", 'should be FIRST:LAST, the first and the last step to profile, such as 3:5, got "a:b"'),
        ("3:5:7", "should be FIRST:LAST"),
        ("-1:2", "should be FIRST:LAST"),
        ("3:9999999999", "should be FIRST:LAST"),
        ("\u0663:\u0665", "should be FIRST:LAST"),  # digits all the same, of another script
        ("5:3", 'ends before it begins: 3:5 is the other way round, got "5:3"'),
        ("0:2", 'begins before the first step, which is 1, got "0:2"'),
        ("3:101", "goes on to step 101, and the run ends with step 100: choose steps up to there, or raise max_steps"),
    ],
)
def test_what_names_no_steps_of_the_run_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _sft(f"--profile={given}")
    assert said in str(refused.value) and "profile" in str(refused.value)


def test_steps_are_both_included_and_survive_the_file(tmp_path: Path) -> None:
    config = _sft("--profile", "3:5")
    steps = config.profiled_steps
    assert steps == ProfiledSteps(3, 5) and steps is not None and len(steps) == 3 and str(steps) == "3:5"
    (tmp_path / "sft.toml").write_text(to_toml(config))
    assert read_toml(SftConfig, tmp_path / "sft.toml").profiled_steps == steps
    assert len(ProfiledSteps.parse("100:100")) == 1 and _sft("--profile", "100:100").profile == "100:100"
    assert _sft().profiled_steps is None
    assert fingerprint(config) == fingerprint(_sft()), "it changes nothing that is computed"
    (tmp_path / "sft.toml").write_text("profile = 3\n")
    with pytest.raises(ConfigError, match="'profile' should be FIRST:LAST.*, got 3"):
        read_toml(SftConfig, tmp_path / "sft.toml")


def test_rl_hands_it_to_its_trainer_and_checks_it_against_the_last_step_of_the_run() -> None:
    given = RlConfig.model_validate({"profile": "3:5", "orchestrator": {"max_steps": 5}})
    assert hand_down_shared(given).trainer.profile == "3:5"
    of_trainer = hand_down_shared(RlConfig.model_validate({"trainer": {"profile": "2:2"}}))
    assert of_trainer.trainer.profile == of_trainer.profile == "2:2"
    for settings in ({"profile": "3:5", "max_steps": 4}, {"trainer": {"profile": "3:5", "max_steps": 4}}):
        with pytest.raises(ValueError, match="goes on to step 5, and the run ends with step 4"):
            RlConfig.model_validate(settings)
