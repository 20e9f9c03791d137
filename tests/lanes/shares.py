"""The everyday lane as plain pytest processes, two at a time: each collects and imports only what its share needs."""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.lanes.durations import seconds_of_files


@dataclass(frozen=True)
class Share:
    name: str
    paths: tuple[str, ...]
    usual_s: float  # about how long it takes on an idle core, until a run has been recorded
    light: bool = False  # torch, transformers and vLLM must not be imported in its process

    def options(self) -> list[str]:
        """Return what pytest is given: the paths, or everything that is in no other share."""
        words = ["--light"] if self.light else []
        if self.paths:
            return [*words, *self.paths]
        return [*words, "tests", *(f"--ignore={path}" for share in SHARES for path in share.paths)]

    def holds(self, file: str) -> bool:
        """Whether a file of tests is in this share; a share without paths has every file that no other holds."""
        if self.paths:
            return any(file == path or file.startswith(f"{path}/") for path in self.paths)
        return not any(share.holds(file) for share in SHARES if share.paths)

    def seconds(self, recorded: Mapping[str, float]) -> float:
        return sum(took for file, took in seconds_of_files(recorded).items() if self.holds(file)) or self.usual_s


SHARES = (
    Share("trainer", ("tests/unit/trainer",), 270),
    Share("orchestrator", ("tests/unit/orchestrator", "tests/unit/inference"), 180, light=True),
    Share("launcher", ("tests/unit/launcher", "tests/unit/view", "tests/unit/commands"), 190, light=True),
    Share("runs", (), 160),
    Share(
        "run",
        (
            *(f"tests/unit/{package}" for package in ("chat", "config", "process", "protocol", "remote", "run")),
            "tests/unit/test_cli.py",
        ),
        55,
        light=True,
    ),
)


def longest_first(recorded: Mapping[str, float]) -> list[Share]:
    return sorted(SHARES, key=lambda share: share.seconds(recorded), reverse=True)
