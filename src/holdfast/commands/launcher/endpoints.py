"""What a launcher serves of its run: the numbers to Prometheus, the page to browsers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from holdfast.commands.dashboard.endpoint import Dashboard, listening_for_browsers
from holdfast.commands.launcher.plan import Plan
from holdfast.commands.prometheus.endpoint import Endpoint, listening_for_prometheus
from holdfast.commands.web import Listener
from holdfast.shared.config.trainer import TrainingCommand


@dataclass(frozen=True)
class Listeners:
    """Where a launcher listens; None: it does not."""

    prometheus: Listener | None = None
    dashboard: Listener | None = None


@contextmanager
def listening_for(config: TrainingCommand) -> Iterator[Listeners]:
    """Listen wherever the settings say, before anything is started.

    Raises:
        ConfigError: a port is taken, or what is needed to serve there is not installed.
    """
    with (
        listening_for_prometheus(config.prometheus) as prometheus,
        listening_for_browsers(config.dashboard) as dashboard,
    ):
        yield Listeners(prometheus, dashboard)


class Endpoints:
    """Serves one run, over all attempts of this launcher; a context manager."""

    def __init__(self, listeners: Listeners, plan: Plan) -> None:
        run_dir = plan.attempt.run_dir
        self._prometheus = Endpoint(listeners.prometheus, run_dir, plan.trainer.program, leads=plan.node == 0)
        self._dashboard = Dashboard(listeners.dashboard, run_dir)
        self._open = ExitStack()

    def __enter__(self) -> Endpoints:
        with ExitStack() as stack:
            stack.enter_context(self._prometheus)
            stack.enter_context(self._dashboard)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def begin(self, plan: Plan) -> None:
        """Serve another attempt."""
        engines = {name: health.url.removesuffix("/health") for name, health in plan.health.items()}
        self._prometheus.begin(plan.attempt.number, max_steps=plan.trainer.max_steps, engines=engines)

    def look(self, processes: dict[str, bool], say: Callable[[str], None]) -> None:
        """Take which processes live, and say what went wrong since the last call."""
        self._prometheus.look(processes, say)
        self._dashboard.look(say)
