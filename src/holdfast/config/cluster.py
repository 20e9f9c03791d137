"""Configuration of a job of SLURM's."""

import re

from pydantic import Field, field_validator

from holdfast.config.base import Section


class SlurmConfig(Section):
    """A SLURM job. A bare ``--slurm`` submits one for one node to the default partition."""

    nodes: int = Field(default=1, ge=1)
    """Nodes of the job. `rl`: nodes of the trainer, plus nodes that engines have to themselves. Others: nodes of the
    trainer; unset: `parallel.nodes`."""

    gpus_per_node: int | None = Field(default=None, ge=1)
    """GPUs of each node; unset: none are asked for."""

    time: str | None = None
    """Time limit, such as `24:00:00`; unset: the limit of the partition. Ahead of it the step is saved, and the job is
    queued again."""

    partition: str | None = None
    """Partition to run in; unset: the default partition."""

    account: str | None = None
    """Whom it is charged to; unset: your default account."""

    job_name: str = "holdfast"
    """Name of the job."""

    extra: list[str] = []
    """Further options of sbatch, such as `["--qos=high", "--exclusive"]`."""

    setup: list[str] = []
    """Lines of shell before the run, such as `["module load cuda", "source .venv/bin/activate"]`."""

    @property
    def time_s(self) -> float | None:
        """Seconds of `time`; None where it is unset or unlimited (0)."""
        return _seconds(self.time) or None if self.time is not None else None

    @field_validator("time")
    @classmethod
    def _is_a_time(cls, value: str | None) -> str | None:
        if value is not None:
            _seconds(value)
        return value

    @field_validator("partition", "account", "job_name")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("must not be empty")
        return value

    @field_validator("extra")
    @classmethod
    def _are_options(cls, extra: list[str]) -> list[str]:
        for option in extra:
            if not option.startswith("-"):
                raise ValueError("must be options such as --qos=high")
        return extra

    @field_validator("partition", "account", "job_name", "extra", "setup")
    @classmethod
    def _is_one_line(cls, value: object) -> object:
        """Refuse what would be another line of the script."""
        texts = value if isinstance(value, list) else [value]
        if any("\n" in text or "\r" in text for text in texts if isinstance(text, str)):
            raise ValueError("must not hold line breaks")
        return value


# Minutes, minutes:seconds or hours:minutes:seconds; after days: hours, hours:minutes or hours:minutes:seconds.
_TIME = re.compile(r"(?:(?P<days>\d+)-(?P<of_day>\d+(?::\d+){0,2})|(?P<plain>\d+(?::\d+){0,2}))", re.ASCII)


def _seconds(time: str) -> int:
    """Return the seconds of a time as sbatch reads it. Raise ValueError if it is not a time."""
    match = _TIME.fullmatch(time)
    if match is None:
        raise ValueError("must be minutes, HH:MM:SS or D-HH:MM:SS, such as 24:00:00")
    numbers = [int(number) for number in (match["of_day"] or match["plain"]).split(":")]
    if match["plain"] and len(numbers) < 3:
        numbers = [0, *numbers]
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
