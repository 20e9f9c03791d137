"""What runs may have (`features.toml`), and what may happen to them."""

from __future__ import annotations

import itertools
import json
import random
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

ALL = ("sft", "dpo", "reward-model", "rl")
Pair = tuple[str, str]


@dataclass(frozen=True)
class Feature:
    """A part of a run. `options`: the flags of each; the first option is the plain one."""

    name: str
    options: Mapping[str, list[str]]
    programs: tuple[str, ...]


def _features() -> list[Feature]:
    tables = tomllib.loads(Path(__file__).with_name("features.toml").read_text())
    return [Feature(name, table["options"], tuple(table.get("programs", ALL))) for name, table in tables.items()]


FEATURES = _features()
REFUSED = {
    *((("schedule", "rounds"), ("async level", level)) for level in "01"),
    (("schedule", "rounds"), ("dynamic sampling", "12")),
    *((("optimizer", "muon"), one) for one in (("lora", "2"), ("model", "adapter"))),
    (("transport", "collective"), ("lora", "2")),
    (("interval", "3"), ("evaluation", "beside")),
    (("begins", "clean"), ("store", "file")),  # --clean leaves the steps of a store, and so refuses them next time
    (("environment", "splits"), ("pretraining", "mixed")),  # its template leaves rows out
}
"""Options that do not go together."""
KILLS = (
    "kill",
    "kill",
    "kill",
    "power",
    "error",
    "pause",
    "term",
    "kill launcher",
    "kill rank",
    "kill engine",
    "second start",
    "look",
    "kill player",
    "edit",
)
"""What happens at an event: to the process that meets it, or to another one."""
AT_REST = (
    *("nothing", "nothing", "refused", "moved", "copied", "clock back", "clock ahead", "links away", "other program"),
    *("new machine", "commands", "temporary left", "parent moved", "edited"),
)
"""What happens between two starts."""
BLOCK = 3
"""So many cases share their features, and with them an undisturbed run."""
PROGRAMS = ("rl", "rl", "sft", "dpo", "reward-model")


@dataclass(frozen=True)
class Fault:
    """`effect` at the event `key` ("ROLE CALL PART"), the one at `share` of all that an undisturbed run has."""

    effect: str
    share: float
    key: str = ""
    nth: int = 0


@dataclass(frozen=True)
class Case:
    """One run and what happens to it. `features`: the option of each; `found`: what was found, of a kept case."""

    program: str
    features: Mapping[str, str]
    faults: tuple[Fault, ...] = ()
    at_rest: str = "nothing"
    steps: int = 4
    found: str = ""
    words: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> Case:
        plain = json.loads(text)
        return cls(**plain | {"faults": tuple(Fault(**fault) for fault in plain.get("faults", ()))})

    def write(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def flags(self, place: str) -> list[str]:
        """Return the flags of its features; `place`: the directory that holds run, parent and store."""
        section = "trainer." if self.program == "rl" else ""
        given = [flag for one in of_program(self.program) for flag in one.options[self.features[one.name]]]
        return [flag.replace("{p}", section).replace("{place}", place) for flag in given]

    def pairs(self) -> set[Pair]:
        """Return the pairs of features, and of a feature and what happens, that the case meets."""
        chosen = [f"{self.program}: {name} {option}" for name, option in sorted(self.features.items())]
        happens = [*(f"at an event: {fault.effect}" for fault in self.faults), f"at rest: {self.at_rest}"]
        return {*itertools.combinations(chosen, 2), *itertools.product(chosen, happens)}


def of_program(program: str) -> list[Feature]:
    return [one for one in FEATURES if program in one.programs]


def plain(program: str) -> Case:
    return Case(program, {one.name: next(iter(one.options)) for one in of_program(program)})


def every_pair() -> set[Pair]:
    found: set[Pair] = set()
    for program in ALL:
        features = of_program(program)
        words = [[f"{program}: {one.name} {option}" for option in one.options] for one in features]
        for mine, other in itertools.combinations(features, 2):
            names = ((mine.name, option, {other.name: one}) for option in mine.options for one in other.options)
            found |= {
                tuple(sorted((f"{program}: {name} {option}", f"{program}: {other.name} {others[other.name]}")))  # type: ignore[misc]
                for name, option, others in names
                if goes_with(others, name, option)
            }
        happens = [*(f"at an event: {effect}" for effect in KILLS), *(f"at rest: {one}" for one in AT_REST)]
        found |= {(one, what) for options in words for one in options for what in happens}
    return found


def goes_with(chosen: Mapping[str, str], name: str, option: str) -> bool:
    return not any(
        pair in REFUSED for other in chosen.items() for pair in ((other, (name, option)), ((name, option), other))
    )


def draws(seed: int) -> Iterator[Case]:
    """Yield the cases of a seed, several of the same features after another. What was drawn less is preferred."""
    met: Counter[str] = Counter()
    for block in itertools.count():
        case = _draw_features(random.Random(f"{seed}:{block}"), met)
        for number in range(BLOCK):
            hit = _draw_hits(random.Random(f"{seed}:{block}:{number}"), case, met)
            met.update(map(str, hit.pairs()))
            yield hit


def _draw_features(generator: random.Random, met: Counter[str]) -> Case:
    program = generator.choice(PROGRAMS)
    chosen: dict[str, str] = {}
    features = of_program(program)
    for feature in generator.sample(features, len(features)):
        partners = [f"{program}: {name} {option}" for name, option in chosen.items()]

        def number_met(option: str, name: str = feature.name, partners: list[str] = partners) -> float:
            pairs = (tuple(sorted((f"{program}: {name} {option}", one))) for one in partners)
            return sum(min(2, met[str(pair)]) for pair in pairs) + generator.random()

        options = [option for option in feature.options if goes_with(chosen, feature.name, option)]
        chosen[feature.name] = options[0] if generator.random() < 0.3 else min(options, key=number_met)
    return Case(program, chosen, steps=generator.choice((3, 4, 6)))


def _draw_hits(generator: random.Random, case: Case, met: Counter[str]) -> Case:
    effects = generator.sample(KILLS, generator.choice((1, 1, 2, 3)))
    chosen = [f"{case.program}: {name} {option}" for name, option in case.features.items()]

    def number_met(at_rest: str) -> float:
        return sum(met[str((one, f"at rest: {at_rest}"))] for one in chosen) + generator.random()

    at_rest = min(generator.sample(AT_REST, 4), key=number_met)
    if at_rest != "nothing" and not {"kill launcher", "power", "term"} & {*effects}:
        effects[0] = generator.choice(("kill launcher", "power", "term"))  # else nothing is at rest before the end
    faults = tuple(Fault(effect, round(generator.random(), 4)) for effect in effects)
    return replace(case, faults=faults, at_rest=at_rest)
