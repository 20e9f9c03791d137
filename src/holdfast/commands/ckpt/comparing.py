"""`ckpt diff`: how two steps differ, in settings, counters, libraries, files and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.commands.ckpt.checkpoint_dirs import CheckpointDirs
from holdfast.commands.ckpt.inspecting import CONFIG, counters, verified
from holdfast.commands.ckpt.tensor_work import tensor_work
from holdfast.commands.resume.config_diff import Drift, compare_settings, read_settings
from holdfast.commands.tables import Grid, Report, number
from holdfast.shared.files.checkpoints import TRAINER_DIR
from holdfast.shared.files.manifest import Manifest
from holdfast.shared.process.child import heavy_imports

if TYPE_CHECKING:
    from holdfast.trainer.conversion.reading import Comparison, Difference

_MODEL = "model."

Changes = dict[str, tuple[Any, Any]]


def diff(dirs: CheckpointDirs, *, before: str, after: str, top: int) -> Report:
    """Compare two steps, each a step of `dirs` or a path; verify both first."""
    first, second = dirs.step_directory(before), dirs.step_directory(after)
    old, new = verified(first), verified(second)
    with tensor_work("comparing tensors"):
        with heavy_imports():
            from holdfast.trainer.conversion.reading import compare
        found = compare(first / TRAINER_DIR, second / TRAINER_DIR)
    changes = {
        "counters": _changes(counters(first), counters(second)),
        "libraries": _changes(old.libraries, new.libraries),
        "fingerprints": _changes(msgspec.to_builtins(old.fingerprints), msgspec.to_builtins(new.fingerprints)),
        "manifest": _changes(_identity(old), _identity(new)),
    }
    drift = _drift(first, second)
    files = sorted(_changes(old.files, new.files))
    parameters = [difference for difference in found.tensors if difference.name.startswith(_MODEL)][:top]
    document = {
        "before": str(first),
        "after": str(second),
        "bit_equal": _are_equal(found),
        "settings": asdict(drift) if drift else None,
        **changes,
        "files": files,
        "groups": _groups(found),
        "only_before": found.only_before,
        "only_after": found.only_after,
        "reshaped": found.reshaped,
        "parameters": msgspec.to_builtins(parameters),
    }
    rows = [(what, key, _shown(a), _shown(b)) for what, pairs in changes.items() for key, (a, b) in pairs.items()]
    parts: list[Grid | str] = [f"{first} -> {second}", ""]
    parts += [Grid(("", "key", "before", "after"), rows)] if rows else ["counters and libraries are equal"]
    parts += ["", *_setting_lines(drift), f"files that differ: {', '.join(files) or 'none'}", "", *_tensor_lines(found)]
    parts += ["", _parameter_grid(parameters)] if parameters else []
    return Report(document, parts)


def _drift(first: Path, second: Path) -> Drift | None:
    """Return the settings that differ; None where a checkpoint holds none."""
    if not ((first / CONFIG).exists() and (second / CONFIG).exists()):
        return None
    return compare_settings(read_settings(first / CONFIG), read_settings(second / CONFIG))


def _setting_lines(drift: Drift | None) -> list[str]:
    if drift is None:
        return ["settings: not compared, as one of the checkpoints holds none"]
    lines = [f"setting (changes what is computed)  {line}" for line in drift.computing]
    lines += [f"setting (free to change)  {line}" for line in drift.free]
    return lines or ["settings are equal"]


def _tensor_lines(found: Comparison) -> list[str]:
    lines = [
        f"{name}: {group['equal']} of {group['tensors']} tensors are bit-equal"
        for name, group in _groups(found).items()
    ]
    for text, names in (
        ("only before", found.only_before),
        ("only after", found.only_after),
        ("of another shape or dtype", found.reshaped),
    ):
        if names:
            lines.append(f"tensors {text}: {', '.join(names)}")
    return lines


def _parameter_grid(parameters: list[Difference]) -> Grid:
    rows = [
        (
            item.name.removeprefix(_MODEL),
            number(item.norm_before),
            number(item.norm_after),
            "equal" if item.equal else number(item.relative),
        )
        for item in parameters
    ]
    columns = ("parameter", ">norm before", ">norm after", ">relative change")
    return Grid(columns, rows, expendable=("norm before", "norm after"))


def _are_equal(found: Comparison) -> bool:
    others = found.only_before or found.only_after or found.reshaped
    return not others and all(item.equal for item in found.tensors)


def _groups(found: Comparison) -> dict[str, dict[str, int]]:
    """Return how many tensors of `model`, `optim` and so on are equal."""
    groups: dict[str, dict[str, int]] = {}
    for item in sorted(found.tensors, key=lambda item: item.name):
        group = groups.setdefault(item.name.split(".", 1)[0], {"tensors": 0, "equal": 0})
        group["tensors"] += 1
        group["equal"] += item.equal
    return groups


def _identity(listing: Manifest) -> dict[str, Any]:
    names = ("step", "policy_version", "run_id", "world_size", "mesh")
    return {name: getattr(listing, name) for name in names}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Changes:
    """Return key -> (old, new) where they differ."""
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def _shown(value: Any) -> str:
    return "-" if value in (None, "") else str(value)
