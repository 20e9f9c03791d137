"""Configuration of the alerts of `rl`."""

from __future__ import annotations

from pydantic import Field

from holdfast.shared.config.base import Section


class AlertsConfig(Section):
    """When a metric says that something is wrong; each alert is given once. See docs/metrics.md."""

    window: int = Field(default=20, ge=1)
    """Steps whose median a new value is compared with; no comparison before there are as many."""

    ref_kld_jump: float = Field(default=5.0, gt=1)
    """`ref_kld` this many times its median, and above 0.01."""

    entropy_share: float = Field(default=0.1, ge=0, lt=1)
    """`entropy` below this share of what it was at the first step."""

    mismatch_growth: float = Field(default=10.0, gt=1)
    """`mismatch_kl` this many times its median, and above 0.001."""

    zero_variance: float = Field(default=0.95, gt=0, le=1)
    """`groups/zero_variance` at or above this for as many steps as `window`."""
