"""Whether two nodes can train one run: the same code, settings and directory."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import tomli
import xxhash

from holdfast.commands.launcher.node_words import Hello
from holdfast.commands.resume.config_diff import compare_settings
from holdfast.shared.files import durable


def why_not_together(ours: Hello, theirs: Hello) -> str:
    """Return why the node of `theirs` cannot take part in the run of `ours`, naming both; empty where it can."""
    here, there = ours.name, theirs.name
    if theirs.code != ours.code:
        return (
            f"nodes run other code: {_version(ours.code)} on {here}, {_version(theirs.code)} on {there}. Install the "
            "same on all."
        )
    drift = compare_settings(tomli.loads(ours.settings), tomli.loads(theirs.settings))
    if differing := sorted(drift.computing + drift.free):
        lines = "\n  ".join(differing)
        return (
            f"nodes were started with other settings ({here} -> {there}):\n  {lines}\nStart the same command on every "
            "node."
        )
    if theirs.output_dir != ours.output_dir:
        return (
            f"nodes write to other directories: {ours.output_dir} on {here}, {theirs.output_dir} on {there}. Name one "
            "that all share, by its whole path, with --output-dir."
        )
    return ""


def why_not_writable(path: Path) -> str:
    """Return why this node cannot write to `path`, in words; empty where it can."""
    probe = durable.temporary_sibling(path / "probe")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        return f"cannot be written ({error.strerror})"
    return ""


def digest_of_code() -> str:
    """Return the installed version, and a digest of its source: of two checkouts it says whether they differ."""
    digest = xxhash.xxh3_64()
    root = Path(__file__).parents[2]  # of the package
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{version('holdfast')} {version('torch')} {digest.hexdigest()}"


def _version(code: str) -> str:
    ours, torch, digest = code.split()
    return f"holdfast {ours} (source {digest[:8]}) with torch {torch}"
