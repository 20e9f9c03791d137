"""Reading an endpoint as Prometheus does."""

import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests.runs.processes import HANG_S, answer_when

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Scrape:
    samples: Mapping[str, list[tuple[dict[str, str], float]]]

    def value(self, name: str, **labels: str) -> float:
        """Return the one sample of that name with these labels among its own."""
        (found,) = [value for own, value in self.samples[name] if labels.items() <= own.items()]
        return found


def scrape(port: int) -> Scrape:
    """Return what the endpoint of this machine says. Raises `OSError`: nobody answers."""
    with _opener.open(f"http://127.0.0.1:{port}/metrics", timeout=HANG_S) as answer:
        text = answer.read().decode()
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return Scrape(samples)


def scraped_when(port: int, is_so: Callable[[Scrape], bool]) -> Scrape:
    return answer_when(lambda: scrape(port), is_so)
