"""Reading the endpoints of runs as Prometheus does."""

import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.runs.processes import HANG_S, answer_when

_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Scrape:
    types: Mapping[str, str]  # of the samples, by name
    samples: Mapping[str, list[tuple[dict[str, str], float]]]  # labels and value of each, by name

    def value(self, name: str, **labels: str) -> float:
        """Return the one sample of that name with these labels among its own."""
        (found,) = [value for own, value in self.samples[name] if labels.items() <= own.items()]
        return found


def scrape(port: int, *, openmetrics: bool = False) -> Scrape:
    """Return what the endpoint of this machine says, in one of the two formats that Prometheus asks for. Raises
    `OSError`: nobody answers.
    """
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics")
    if openmetrics:
        request.add_header("Accept", _OPENMETRICS)
    with _opener.open(request, timeout=HANG_S) as answer:
        text = answer.read().decode()
        assert answer.headers["Content-Type"].startswith("application/openmetrics" if openmetrics else "text/plain")
    types: dict[str, str] = {}
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in (parse_openmetrics if openmetrics else parse_text)(text):
        for sample in family.samples:
            types[sample.name] = family.type
            samples.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return Scrape(types, samples)


def scraped_when(port: int, is_so: Callable[[Scrape], bool]) -> Scrape:
    """Return the first answer for which `is_so` holds; who does not answer yet is asked again."""
    return answer_when(lambda: scrape(port), is_so)
