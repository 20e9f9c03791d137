"""What runs may have, and what may happen to them. A new setting is one more `Feature`: its name, its programs, and the
flags of each of its options; `{p}` stands for the trainer's section of `rl`.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

ALL = ("sft", "dpo", "reward-model", "rl")
Pair = tuple[str, str]


@dataclass(frozen=True)
class Feature:
    """A part of a run. `options`: the flags of each; the first option is the plain one."""

    name: str
    options: Mapping[str, tuple[str, ...]]
    programs: tuple[str, ...] = ALL


def _environment(**section: Any) -> tuple[str, ...]:
    return ("--orchestrator.environments", json.dumps([{"id": "tests.search.parts:Letters", **section}]))


_JUDGE = {
    "url": "http://127.0.0.1:JUDGE_PORT/v1",
    "model": "judge",
    "prompt": "{first} and {last}",
    "max_score": 10.0,
    "max_concurrency": 4,
}


_LEVELS = {"levels": [{"size": 3}, {"size": 4}], "window": 4, "advance_reward": 0.01}
_ROUNDS = ("--orchestrator.schedule", "rounds", "--orchestrator.round-tokens", "3")
_EVALUATION = (
    *("--eval.interval", "2", "--eval.num-tasks", "2", "--eval.samples-per-task", "1"),
    *("--eval.seq-len", "64", "--eval.sampling.max-tokens", "4", "--eval.environments", '[{"id": "reverse_text"}]'),
)
_WHOLE = ("--model.init", "pretrained", "--model.name", "examples/reverse_text/model")
FEATURES = (
    Feature("ranks", {"1": (), "2": ("--{p}parallel.num-ranks", "2")}),
    Feature("interval", {"2": ("--ckpt.interval", "2"), "1": ("--ckpt.interval", "1"), "3": ("--ckpt.interval", "3")}),
    Feature("keep", {"all": (), "1": ("--ckpt.keep", "1"), "2": ("--ckpt.keep", "2")}),
    Feature("save", {"async": (), "waits": ("--ckpt.save-async", "false")}),
    Feature("on failure", {"stop": (), "warn": ("--ckpt.on-failure", "warn")}),
    Feature("store", {"none": (), "file": ("--ckpt.dir", "file://{place}/store")}),
    Feature("tracker", {"none": (), "own": ("--tracking.backends", '["tests.search.parts:Kept"]')}),
    Feature("begins", {"from scratch": (), "as a fork": ("--ckpt.resume-dir", "{place}/parent/checkpoints/step_1")}),
    Feature("attempts kept", {"20": (), "1": ("--{p}keep-attempts", "1")}),
    Feature("lora", {"none": (), "2": ("--{p}model.lora.rank", "2")}, ("dpo", "reward-model", "rl")),
    Feature("model", {"random": (), "whole": _WHOLE, "adapter": (*_WHOLE, "--model.lora.rank", "2")}, ("sft",)),
    Feature("optimizer", {"adamw": (), "muon": ("--{p}optim.type", "muon")}),
    Feature("accumulation", {"1": (), "2": ("--data.micro-batch-size", "2")}, ("sft", "dpo", "reward-model")),
    Feature("validation", {"none": (), "0.1": ("--data.validation-fraction", "0.1")}, ("sft", "dpo")),
    Feature("evaluation", {"none": (), "beside": _EVALUATION}, ("sft",)),
    Feature("loss", {"dpo": (), "ipo": ("--loss.type", "ipo"), "orpo": ("--loss.type", "orpo")}, ("dpo",)),
    Feature("schedule", {"strict": (), "rounds": _ROUNDS}, ("rl",)),
    Feature("async level", {"1": (), "0": ("--async-level", "0"), "2": ("--async-level", "2")}, ("rl",)),
    Feature("transport", {"directory": (), "collective": ("--weights.transport", "collective")}, ("rl",)),
    Feature("engines", {"1": (), "2": ("--inference.engines", "2")}, ("rl",)),
    Feature(
        "environment",
        {
            "plain": _environment(),
            "turns": _environment(args={"turns": 2}),
            "workers": _environment(workers=1),
            "levels": _environment(curriculum=_LEVELS),
            "fails": _environment(args={"fails": 5}, on_error="drop"),
            "judged": _environment(id="tests.search.players:Everything", args={"judge": _JUDGE}, workers=1),
        },
        ("rl",),
    ),
    Feature("average", {"none": (), "ema": ("--trainer.ema.decay", "0.9")}, ("rl",)),
    Feature("penalty", {"none": (), "kl": ("--trainer.kl.coef", "0.1")}, ("rl",)),
    Feature(
        "advantage",
        {"grpo": (), "gae": ("--trainer.advantage", "gae", "--trainer.critic.warmup-steps", "1")},
        ("rl",),
    ),
    Feature(
        "updates", {"1": (), "2x2": ("--trainer.updates.epochs", "2", "--trainer.updates.minibatches", "2")}, ("rl",)
    ),
    Feature("evaluated", {"never": (), "2": ("--eval.interval", "2", "--eval.num-tasks", "2")}, ("rl",)),
)
REFUSED = {
    *((("schedule", "rounds"), ("async level", level)) for level in "01"),
    *((("optimizer", "muon"), one) for one in (("lora", "2"), ("model", "adapter"))),
    (("transport", "collective"), ("lora", "2")),
    *((("interval", interval), ("evaluation", "beside")) for interval in "3"),
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
)
"""What happens at an event: to the process that meets it, or to another one."""
AT_REST = (
    *("nothing", "nothing", "refused", "moved", "copied", "clock back", "clock ahead", "links away", "other program"),
    *("new machine", "commands", "temporary left", "parent moved", "edited"),
)
"""What happens between two starts."""
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
    """Yield the cases of a seed. Options of pairs that no earlier case has are preferred."""
    met: Counter[str] = Counter()
    for number in itertools.count():
        generator = random.Random(f"{seed}:{number}")
        case = _draw(generator, met)
        met.update(map(str, case.pairs()))
        yield case


def _draw(generator: random.Random, met: Counter[str]) -> Case:
    program = generator.choice(PROGRAMS)
    effects = generator.sample(KILLS, generator.choice((1, 1, 2, 3)))
    at_rest = min(generator.sample(AT_REST, 3), key=lambda one: met[f"{program} {one}"])
    if at_rest != "nothing" and not {"kill launcher", "power", "term"} & {*effects}:
        effects[0] = generator.choice(("kill launcher", "term"))  # else nothing is at rest before the end
    happens = [*(f"at an event: {effect}" for effect in effects), f"at rest: {at_rest}"]
    chosen: dict[str, str] = {}
    features = of_program(program)
    for feature in generator.sample(features, len(features)):
        mine = {name: f"{program}: {feature.name} {name}" for name in feature.options}
        partners = [*(f"{program}: {name} {option}" for name, option in chosen.items()), *happens]

        def number_met(name: str, mine: Mapping[str, str] = mine, partners: list[str] = partners) -> float:
            pairs = (((mine[name], one) if one in happens else tuple(sorted((mine[name], one)))) for one in partners)
            return sum(min(2, met[str(pair)]) for pair in pairs) + generator.random()

        options = [option for option in feature.options if goes_with(chosen, feature.name, option)]
        chosen[feature.name] = options[0] if generator.random() < 0.3 else min(options, key=number_met)
    faults = tuple(Fault(effect, round(generator.random(), 4)) for effect in effects)
    return Case(program, chosen, faults, at_rest, steps=generator.choice((3, 4, 6)))
