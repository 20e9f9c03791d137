"""Configuration of the page that shows a run while it goes on."""

from __future__ import annotations

from pydantic import Field

from holdfast.shared.config.base import Section
from holdfast.shared.config.prometheus import PrometheusConfig


class DashboardConfig(Section):
    """Where the launcher serves the report of the run while it goes on, for a browser (docs/dashboard.md)."""

    port: int = Field(default=9466, ge=0, le=65535)
    """Port on 127.0.0.1 of this run, each of several on a machine its own; 0: any free one, which the console names."""


def check_served_ports(prometheus: PrometheusConfig | None, dashboard: DashboardConfig | None) -> None:
    """Refuse one port for both that a launcher serves.

    Raises:
        ValueError: they have the same; 0 is a free one for each.
    """
    if prometheus is not None and dashboard is not None and dashboard.port == prometheus.port != 0:
        raise ValueError(
            f"prometheus.port and dashboard.port are both {dashboard.port}: give each a port of its own, or 0 for any "
            "free one"
        )
