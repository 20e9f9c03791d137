"""A start of `rl` up to its first process."""

from holdfast.config import RlConfig
from holdfast.launcher.resume.attempt import Attempt, write_config
from holdfast.launcher.resume.prepare import prepare


def start_rl(config: RlConfig) -> Attempt:
    """As `launch_rl` does: prepare, then write the configuration of both."""
    sections = {"trainer": config.trainer, "orchestrator": config.orchestrator, "inference": config.inference}
    attempt = prepare(
        config.trainer, clean=False, dry_run=False, orchestrator=config.orchestrator, inference=config.inference
    )
    for name, section in sections.items():
        write_config(attempt, name, section, dry_run=False)
    return attempt
