"""Configuration of the endpoint that Prometheus reads a run from."""

from __future__ import annotations

from pydantic import Field

from holdfast.shared.config.base import Section


class PrometheusConfig(Section):
    """Where the launcher serves the numbers of the run at `/metrics`, for Prometheus (docs/prometheus.md)."""

    port: int = Field(default=9464, ge=0, le=65535)
    """Port of this run, each of several on a machine its own; 0: any free one, which the console and
    `prometheus.json` in the run directory name."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen at. `0.0.0.0` for a Prometheus on another machine: whoever reaches the port may read then."""
