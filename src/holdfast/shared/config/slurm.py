"""Configuration of a job of SLURM's."""

from __future__ import annotations

from pydantic import Field, field_validator

from holdfast.shared.config.base import Section


class SlurmConfig(Section):
    """A SLURM job. A bare ``--slurm`` submits one for one node to the default partition."""

    nodes: int = Field(default=1, ge=1)
    """Nodes of the job: those of the trainer, and of the engines where they shall have their own."""

    gpus_per_node: int | None = Field(default=None, ge=1)
    """GPUs of each node; unset: none are asked for."""

    time: str | None = Field(default=None, pattern=r"^[0-9:-]+$")
    """Time limit, such as `24:00:00`; unset: that of the partition. Ahead of it the step is saved, and the job is
    queued again."""

    partition: str | None = None
    """Where to run; unset: the default partition."""

    account: str | None = None
    """Whom it is charged to; unset: your default account."""

    job_name: str = "holdfast"
    """What the job is called."""

    extra: list[str] = []
    """Further options of sbatch, such as `["--qos=high", "--exclusive"]`."""

    setup: list[str] = []
    """Lines of shell before the run, such as `["module load cuda", "source .venv/bin/activate"]`."""

    @field_validator("partition", "account", "job_name", "extra", "setup")
    @classmethod
    def _is_one_line(cls, value: object) -> object:
        """Refuse what would be another line of the script."""
        texts = value if isinstance(value, list) else [value]
        if any("\n" in text or "\r" in text for text in texts if isinstance(text, str)):
            raise ValueError("must not hold line breaks")
        return value
