"""What a start says of the steps that are to be profiled, and a run of where they are."""

from pathlib import Path

import pytest

from holdfast.config import CkptConfig, SftConfig
from holdfast.launcher.exit_reasons import profile_lines
from holdfast.launcher.resume.plan import prepare, profile_notes
from holdfast.run.run_dir import RunDir


@pytest.mark.parametrize(
    ("profile", "done", "said"),
    [
        ("3:5", 5, ["WARNING: profile = 3:5: nothing is profiled, the run continues from step 5"]),
        ("3:5", 7, ["WARNING: profile = 3:5: nothing is profiled, the run continues from step 7"]),
        ("3:5", 3, ["profile = 3:5: the run continues from step 3, and is profiled from there"]),
        *((profile, done, []) for profile, done in (("3:5", 2), ("3:5", 0), (None, 3), ("1:20", 0))),
    ],
)
def test_a_run_says_which_steps_it_no_longer_profiles(profile: str | None, done: int, said: list[str]) -> None:
    assert profile_notes(SftConfig(profile=profile), done=done) == said


def test_a_start_says_it_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = SftConfig(output_dir=tmp_path / "run", profile="1:30", ckpt=CkptConfig())
    prepare(config, clean=False, dry_run=True)
    said = capsys.readouterr().out
    assert "WARNING: profile = 1:30 records 30 steps" in said and "memory and disk" in said


def test_the_end_names_the_profiles_of_the_newest_attempt_that_has_any(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    config = SftConfig(output_dir=tmp_path, profile="3:5")
    assert profile_lines(run_dir, config) == []
    for attempt, name in (
        (2, "profile_steps_3_to_3/rank_0.json.gz"),
        (10, "profile_steps_4_to_5/rank_0.json.gz"),
        (10, "profile_steps_4_to_5/rank_1.json.gz"),
        (11, "trainer.log"),
    ):
        (run_dir.logs(attempt) / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir.logs(attempt) / name).touch()
    path = run_dir.logs(10) / "profile_steps_4_to_5"
    assert profile_lines(run_dir, config) == [f"profile: {path} (a trace of each rank, for https://ui.perfetto.dev)"]
    assert profile_lines(run_dir, SftConfig(output_dir=tmp_path)) == []


def test_unlisted_logs_do_not_hide_how_a_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: RunDir) -> list[Path]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(RunDir, "profiles", fail)
    (said,) = profile_lines(RunDir(tmp_path), SftConfig(output_dir=tmp_path, profile="3:5"))
    assert said == "cannot list the profiles: [Errno 5] Input/output error"
