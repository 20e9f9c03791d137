"""What the server counts about itself, for `/metrics` and `/health`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.process.heartbeat import BusyClock


class ServerMetrics(Collector):
    """Counters of one server. Busy is the time with at least one generation request in flight.

    Attributes:
        last_progress: monotonic time in seconds of the engine's last output; 0.0 before the first.
    """

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._busy = BusyClock()
        self._requests = 0
        self._tokens = 0
        self._updates = 0
        self._update_s = 0.0
        self.last_progress = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a generation request while the block runs."""
        self._requests += 1
        with self._busy.count():
            yield

    def weight_update(self, seconds: float) -> None:
        """Count a weight update that took `seconds`."""
        self._updates += 1
        self._update_s += seconds

    def sampled(self, num_tokens: int) -> None:
        """Count tokens that the engine has just sampled."""
        self.last_progress = time.monotonic()
        self._tokens += num_tokens

    def watch(self, engine_core: Any) -> None:
        """Count every token that comes out of vLLM's engine client, whichever route asked for it."""
        get_output = engine_core.get_output_async

        async def counted() -> Any:
            outputs = await get_output()
            if outputs.outputs:
                self.sampled(sum(len(output.new_token_ids) for output in outputs.outputs))
            return outputs

        engine_core.get_output_async = counted

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by prometheus at each scrape."""
        busy = self._busy.busy_s
        counters = {
            "holdfast_engine_busy_seconds": ("Time with at least one generation request in flight", busy),
            "holdfast_engine_idle_seconds": (
                "Time without a generation request",
                time.monotonic() - self._started - busy,
            ),
            "holdfast_generated_tokens": ("Tokens sampled by the engine", self._tokens),
            "holdfast_generation_requests": ("Generation requests, finished or not", self._requests),
            "holdfast_weight_updates": ("Weight updates applied", self._updates),
            "holdfast_weight_update_seconds": ("Time spent in applied weight updates", self._update_s),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
        yield GaugeMetricFamily(
            "holdfast_requests_in_flight", "Generation requests in flight", value=self._busy.in_flight
        )

    def register(self, registry: CollectorRegistry) -> None:
        """Show these metrics on the `/metrics` page that serves `registry`."""
        registry.register(self)
