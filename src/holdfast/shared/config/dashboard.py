"""Configuration of the page that shows a run while it goes on."""

from __future__ import annotations

from pydantic import Field

from holdfast.shared.config.base import Section


class DashboardConfig(Section):
    """Where the launcher serves the report of the run while it goes on, for a browser (docs/dashboard.md)."""

    port: int = Field(default=9466, ge=0, le=65535)
    """Port on 127.0.0.1 of this run, each of several on a machine its own; 0: any free one, which the console names."""
