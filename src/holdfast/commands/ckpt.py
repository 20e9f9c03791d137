"""The command `ckpt`: parses the command line, runs one action, prints its report and returns an exit code.

No action imports torch before it needs tensors.
"""

import argparse
import contextlib
import json
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.arguments import Parser, add_json, positive
from holdfast.errors import CheckpointError, ConfigError, ReadError
from holdfast.process.child import heavy_imports
from holdfast.run.atomic import is_gone
from holdfast.run.checkpoints import TRAINER_DIR, BestMetric, Entry, Retention, kind_of
from holdfast.run.choose_run import RunSubcommands, no_run
from holdfast.run.manifest import Manifest, Verification
from holdfast.run.settings import flat_settings, read_settings, without_secrets
from holdfast.view import hub
from holdfast.view.ckpt_dirs import CheckpointDirs, TensorWorkFailed, export, tensor_work, verified
from holdfast.view.tables import Grid, Report, age, number, size

_EPILOG = (
    "STEP is a number, `latest`, or the path of a checkpoint such as OTHER/checkpoints/step_20. STEPS is also a span "
    "such as 3-7, or `all`."
)
_IMPORT = "ckpt import [--json] SOURCE sft @ my_run.toml --output-dir DIR"


def parse(argv: list[str]) -> argparse.Namespace:
    """Return `command`, `run`, `json`, and what the subcommand takes; print help and exit on -h. Raise
    ConfigError for an unknown subcommand or flag (with the nearest spelling) or a bad value."""
    subcommands = RunSubcommands("ckpt", "Look into the checkpoints of a run.", _EPILOG)
    add = subcommands.add
    ls = add("ls", "List the steps.")
    ls.add_argument("steps", nargs="*", metavar="STEPS", help="all steps if unset")
    ls.add_argument("--metric", metavar="NAME", help="marks the best: min:val/loss (ckpt.keep_best, reward/mean, loss)")
    verify = add("verify", "Check every byte against the manifests.")
    verify.add_argument("steps", nargs="*", metavar="STEPS", help="all steps if unset")
    verify.add_argument("--how", choices=("full", "size"), default="full", help="every byte (full), or sizes only")
    _add_step(add("show", "Show what one step holds."))
    export = add("export", "Write a step's model as a Hugging Face directory, or its training state for others.")
    _add_step(export)
    export.add_argument("--to", type=Path, required=True, metavar="DIR", help="new directory")
    told = "hf: the model (default); trainer, dcp: AdamW's state too, for transformers and TRL, or for torch's load"
    export.add_argument("--format", dest="form", choices=("hf", "trainer", "dcp"), default="hf", help=told)
    export.add_argument("--dtype", choices=("float32", "bfloat16"), help="that of the run if unset")
    export.add_argument("--base", metavar="NAME_OR_DIR", help="weights to merge a LoRA adapter into; unset: it alone")
    export.add_argument("--to-hub", metavar="USER/NAME", help="also upload it, with a model card: Hugging Face's hub")
    export.add_argument("--private", action="store_true", help="make a repository that others do not see")
    add("du", "Show what takes space in the directory of the run, and what may go.")
    prune = add("prune", "Remove older steps of a run that does not train now; the newest step stays.")
    prune.add_argument("--keep", type=positive, required=True, metavar="N", help="keep the newest N steps")
    prune.add_argument("--keep-interval", type=positive, metavar="K", help="keep every K-th step, too")
    prune.add_argument("--keep-best", metavar="NAME", help="keep the step with the best value, too: min:val/loss")
    prune.add_argument("--discarded", action="store_true", help="also remove files that resumes have moved aside")
    prune.add_argument("--dry-run", action="store_true", help="remove nothing, and show what would be removed")
    taken = add("import", f"Begin a run with a step of another program: {_IMPORT}.", shares=False)
    add_json(taken)
    taken.add_argument("source", metavar="SOURCE", help="the directory of the other program's step")
    taken.add_argument("words", nargs="+", metavar="COMMAND", help="sft or dpo, with the flags of the new run")
    return subcommands.parse(argv)


def _add_step(parser: Parser) -> None:
    parser.add_argument("step", nargs="?", default="latest", metavar="STEP", help="the newest (latest) if unset")


def main(argv: list[str]) -> int:
    """Run one subcommand; return 0, 1 when something is wrong with a checkpoint, or a failure's code. Raise
    HoldfastError for a mistake in the command, or something that is missing or damaged."""
    if argv[:1] == ["import"] and not {"-h", "--help"} & {*argv}:
        return _import(argv[1:])
    arguments = vars(parse(argv))
    actions = {"ls": ls, "verify": verify, "show": show, "export": _export, "du": du, "prune": prune}
    action: Callable[..., Report] = actions[arguments.pop("command")]
    as_json = arguments.pop("json")
    dirs = CheckpointDirs(arguments.pop("run"))
    try:
        report = action(dirs, **arguments)
    except TensorWorkFailed as failure:
        return failure.exit_code
    report.print(as_json=as_json)
    return report.exit_code


def ls(dirs: CheckpointDirs, *, steps: list[str], metric: str | None) -> Report:
    """List the steps; damaged and unreadable ones are problems, torn ones are not."""
    entries = dirs.entries()
    saved = {entry.step: entry.manifest.metrics for entry in entries if entry.manifest and entry.status == "committed"}
    try:
        chosen, unread = _metric(dirs, metric, saved), []
    except CheckpointError as error:  # damaged settings hide no checkpoint
        chosen, unread = None, [str(error)]
    best = chosen.best(saved) if chosen else None
    name = chosen.name if chosen else ""
    named = [directory for text in steps for directory in dirs.step_directories(text)]
    lines = [_step_line(entry, name, best) for entry in entries if not steps or entry.path in named]
    lines = [line for line in lines if not is_gone(Path(line["path"]))]  # what a run has removed is not damaged
    problems = [
        f"step {line['step']} is {line['status']}: {line['reason']}"
        for line in lines
        if line["status"] in ("damaged", "unreadable", "foreign")
    ] + unread
    document = {"checkpoints": str(dirs.checkpoints), "metric": name or None, "best": best}
    document |= {"steps": lines, "problems": problems}
    parts: list[Grid | str] = [
        _step_grid(lines, name or "metric") if lines else f"no checkpoints in {dirs.checkpoints}"
    ]
    if any(line["status"] == "torn" for line in lines):
        parts.append("torn: a save in progress, or one that was cut off; it counts for nothing")
    return Report(document, parts, problems)


def _metric(dirs: CheckpointDirs, asked: str | None, saved: Mapping[int, Mapping[str, float]]) -> BestMetric | None:
    """Return the metric that was asked for, else `ckpt.keep_best` of the run, else the mean reward or the loss."""
    known = sorted({name for metrics in saved.values() for name in metrics})
    if asked is not None:
        metric = BestMetric.parse(asked)
        if saved and metric.name not in known:
            there = f"They have: {', '.join(known)}." if known else "They have none."
            raise ConfigError(f"--metric {asked}: no step has the metric '{metric.name}'. {there}")
        return metric
    for path in sorted(dirs.run_dir.configs(dirs.run_dir.next_attempt() - 1).glob("*.toml")):
        if (configured := read_settings(path).get("ckpt", {}).get("keep_best")) is not None:
            return BestMetric.parse(configured)
    return next((BestMetric.parse(name) for name in ("reward/mean", "loss") if name in known), None)


def _step_line(entry: Entry, metric: str, best: int | None) -> dict[str, Any]:
    """Return the line of one checkpoint; `metric` and `world_size` are None if its manifest has none."""
    listing = entry.manifest
    return {
        "step": entry.step,
        "status": entry.status,
        "kind": kind_of(entry.path).value,
        "size_bytes": entry.size_bytes,
        "age_s": _age_s(entry.path, listing),
        "metric": listing.metrics.get(metric) if listing else None,
        "best": entry.status == "committed" and entry.step == best,
        "world_size": listing.world_size if listing else None,
        "path": str(entry.path),
        "reason": entry.reason,
    }


def _age_s(path: Path, listing: Manifest | None) -> float:
    """Return the seconds since a directory was written; 0 if the clock went back or the directory has gone."""
    try:
        written = listing.created_unix_s if listing else path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    return max(0.0, time.time() - written)


def _step_grid(lines: list[dict[str, Any]], metric: str) -> Grid:
    rows = [
        (
            str(line["step"]),
            line["status"],
            line["kind"],
            size(line["size_bytes"]),
            age(line["age_s"]),
            number(line["metric"]) + (" best" if line["best"] else ""),
            str(line["world_size"] or "-"),
        )
        for line in lines
    ]
    return Grid((">step", "status", "kind", ">size", ">age", metric, ">ranks"), rows)


def verify(dirs: CheckpointDirs, *, steps: list[str], how: Verification) -> Report:
    """Check steps (all of them if none is named) against their manifests."""
    entries = [entry for entry in dirs.entries() if entry.status != "torn"]
    directories = [entry.path for entry in entries]
    if steps:
        directories = [directory for text in steps for directory in dirs.step_directories(text)]
    started = time.monotonic()
    foreign = {entry.path: entry.reason for entry in entries if entry.status == "foreign"}
    lines = [_verify_one(directory, how, foreign.get(directory, "")) for directory in directories]
    if not steps:
        lines = [line for line in lines if line["ok"] or not is_gone(Path(line["path"]))]
    seconds = time.monotonic() - started
    num_bytes, num_ok = sum(line["size_bytes"] for line in lines), sum(line["ok"] for line in lines)
    rows = [(Path(line["path"]).name, line["status"], size(line["size_bytes"])) for line in lines]
    speed = f"{num_bytes / 1e6 / max(seconds, 1e-9):,.0f} MB/s" if how == "full" else "sizes only"
    total = f"{num_ok} of {len(lines)} OK; {size(num_bytes)} in {seconds:.2f} s, {speed}"
    problems = [line["reason"] for line in lines if not line["ok"]]
    document = {"how": how, "directories": lines, "size_bytes": num_bytes, "seconds": seconds, "problems": problems}
    nothing = f"no checkpoints in {dirs.checkpoints}"
    parts = [Grid(("directory", "status", ">size"), rows), total] if lines else [nothing]
    return Report(document, parts, problems)


def _verify_one(directory: Path, how: Verification, foreign: str) -> dict[str, Any]:
    try:
        files = verified(directory, how=how).files.values()
    except (CheckpointError, ReadError) as error:
        status = "unreadable" if isinstance(error, ReadError) else "damaged"
        return {"path": str(directory), "ok": False, "status": status, "size_bytes": 0, "reason": str(error)}
    size_bytes, status = sum(file.size_bytes for file in files), "foreign" if foreign else "OK"
    return {"path": str(directory), "ok": not foreign, "status": status, "size_bytes": size_bytes, "reason": foreign}


def show(dirs: CheckpointDirs, *, step: str) -> Report:
    """Show manifest, counters, tensors and settings of one step."""
    directory = dirs.step_directory(step)
    listing = verified(directory)
    with tensor_work("reading the index of the tensors"):
        with heavy_imports():
            from holdfast.trainer.export import describe
        groups = describe(directory / TRAINER_DIR)
    config, progress = directory / TRAINER_DIR / "config.toml", directory / TRAINER_DIR / "progress.json"
    settings = without_secrets(read_settings(config)) if config.exists() else {}
    counters: dict[str, Any] = json.loads(progress.read_bytes()) if progress.exists() else {}
    document = {
        "path": str(directory), "kind": kind_of(directory).value, "manifest": msgspec.to_builtins(listing),
        "counters": counters, "tensors": msgspec.to_builtins(groups), "config": settings,
    }  # fmt: skip
    rows = [(name, f"{group.tensors:,}", f"{group.elements:,}", size(group.bytes)) for name, group in groups.items()]
    parts: list[Grid | str] = [
        Grid(("checkpoint", ""), _details(directory, listing, counters)),
        "",
        Grid(("tensors", ">number", ">elements", ">size"), rows),
    ]
    flat = flat_settings(settings)
    if summary := [(key, str(flat[key])) for key in hub.SUMMARY if key in flat]:
        parts += ["", Grid(("setting", ""), summary)]
    return Report(document, parts)


def _details(directory: Path, listing: Manifest, counters: Mapping[str, Any]) -> list[tuple[str, str]]:
    details = {
        "path": str(directory),
        "kind": kind_of(directory).value,
        "step": str(listing.step),
        "policy version": str(listing.policy_version),
        "run": listing.run_id,
        "program": listing.program,
        "ranks": str(listing.world_size),
        "mesh": _joined(listing.mesh),
        "written": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(listing.created_unix_s)),
        "files": str(len(listing.files)),
        "size": size(sum(entry.size_bytes for entry in listing.files.values())),
        "counters": _joined({name: value for name, value in counters.items() if isinstance(value, int | float)}),
        "metrics": _joined({name: number(value) for name, value in listing.metrics.items()}),
        "libraries": _joined(listing.libraries),
    }
    fingerprints: dict[str, str] = msgspec.to_builtins(listing.fingerprints)
    details |= {f"{name} fingerprint": value for name, value in fingerprints.items()}
    return [(name, value) for name, value in details.items() if value]


def _joined(values: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in values.items())


_PARTS = {
    "checkpoints": "older steps: `ckpt prune RUN --keep N`",
    "weights": "no: the result, and weights that a resume needs",
    "rollouts": "old batches: a run with a smaller `journal.keep` removes them",
    "evaluations": "if nobody compares them any more",
    "discarded": "yes: `ckpt prune RUN --keep N --discarded`",
    "logs": "old attempts: a run with `keep_attempts` removes them",
    "tensorboard": "if nobody looks at the curves any more",
}
"""Part of a run directory -> whether it may be removed."""


def _bytes_of(path: Path) -> tuple[int, int]:
    """Return the bytes and the number of the files at or below a path; links count as nothing."""
    files = [path] if path.is_file() else path.rglob("*")
    sizes = list[int]()
    for one in files:
        with contextlib.suppress(FileNotFoundError):  # a run has just removed it
            status = one.lstat()
            sizes += [status.st_size] if stat.S_ISREG(status.st_mode) else []
    return sum(sizes), len(sizes)


def du(dirs: CheckpointDirs) -> Report:
    """Show the size of each part of a run directory, the largest first."""
    dirs.check()
    sizes = {path.name: _bytes_of(path) for path in dirs.run.iterdir() if not path.is_symlink()}
    lines = [
        {"part": name, "size_bytes": num_bytes, "files": files, "may_go": _PARTS.get(name, "no")}
        for name, (num_bytes, files) in sorted(sizes.items(), key=lambda item: (-item[1][0], item[0]))
    ]
    total = sum(num_bytes for num_bytes, _ in sizes.values())
    rows = [(one["part"], size(one["size_bytes"]), f"{one['files']:,}", one["may_go"]) for one in lines]
    grid = Grid(("part", ">size", ">files", "may go"), rows)
    return Report({"run": str(dirs.run), "size_bytes": total, "parts": lines}, [grid, f"{size(total)} in {dirs.run}"])


def prune(
    dirs: CheckpointDirs, *, keep: int, keep_interval: int | None, keep_best: str | None, discarded: bool, dry_run: bool
) -> Report:
    """Remove committed steps that the rule does not keep; damaged steps and steps of other runs stay. Raise ConfigError
    for a directory that is not of a run, or an unknown metric; RunDirError if the run trains now."""
    dirs.check()
    run_dir = dirs.run_dir
    if not run_dir.holds_run():
        raise no_run(dirs.run)
    if not (dry_run or run_dir.is_own()):
        run_dir.lock(instead=", or look with --dry-run")
    committed = {entry.step: entry for entry in dirs.entries() if entry.status == "committed" and entry.manifest}
    saved = {step: entry.manifest.metrics for step, entry in committed.items() if entry.manifest is not None}
    best = _metric(dirs, keep_best, saved) if keep_best is not None else None
    superseded = Retention(keep, keep_interval, best).superseded(saved)
    aside = run_dir.set_aside_directories() if discarded else []
    freed = sum(committed[step].size_bytes for step in superseded) + sum(_bytes_of(path)[0] for path in aside)
    if not dry_run:
        run_dir.remove(*(committed[step].path for step in superseded), *aside)
    kept = [step for step in committed if step not in superseded]
    document = {
        "removed": superseded, "kept": kept, "discarded": [str(path) for path in aside], "freed_bytes": freed,
        "dry_run": dry_run,
    }  # fmt: skip
    verb = "would remove" if dry_run else "removed"
    removed = f"{verb} {_numbered('step', superseded)}{f', {len(aside)} directories set aside' if aside else ''}"
    return Report(document, [f"{removed}: {size(freed)}; kept: {_numbered('step', kept)}"])


def _numbered(noun: str, steps: Sequence[int]) -> str:
    return f"{noun}{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}" if steps else f"no {noun}"


def _export(dirs: CheckpointDirs, *, to_hub: str | None, private: bool, **options: Any) -> Report:
    if to_hub is not None and options["form"] != "hf":
        raise ConfigError(f"--to-hub uploads a model: leave out --format {options['form']}")
    if private and to_hub is None:
        raise ConfigError("--private is of the repository of --to-hub: give that, or leave it out")
    if to_hub is not None:
        hub.check_repository(to_hub)
    written = export(dirs, **options, name=to_hub)
    count = f"{written.tensors:,} tensors, {written.parameters:,} parameters, {written.dtype}"
    files = f"{size(written.bytes)} in {written.files} file{'s' if written.files != 1 else ''} of tensors"
    lines = [f"wrote {written.directory}: {count}, {files}", *filter(None, [written.remark])]
    document = msgspec.to_builtins(written)
    if to_hub is not None:
        message = f"Step {dirs.step_directory(options['step']).name.removeprefix('step_')}"
        document["hub"] = hub.push(Path(written.directory), to_hub, private=private, message=message)
        lines.append(f"uploaded to {document['hub']}")
    return Report(document, lines)


def _import(words: list[str]) -> int:
    """Make the first checkpoint of the run that the command after SOURCE begins; return the exit code."""
    as_json = "--json" in words
    rest = [word for word in words if word != "--json"]
    source, program, *argv = [*rest, *[""] * (2 - len(rest))]
    if program not in ("sft", "dpo"):
        raise ConfigError(f"after the directory comes the command that continues, sft or dpo: `{_IMPORT}`")
    from holdfast.config import DpoConfig, SftConfig
    from holdfast.config.load import parse_command_line
    from holdfast.launcher.launch import resolve_for_import

    if not Path(source).is_dir():
        raise ConfigError(f"there is no directory {source} (from {Path.cwd()})")
    config = parse_command_line(SftConfig if program == "sft" else DpoConfig, argv, program)
    config = resolve_for_import(config, Path(source))
    try:
        with tensor_work("reading and writing tensors"):
            with heavy_imports():
                from holdfast.trainer.importing import import_state
            done = import_state(config, Path(source).absolute())
    except TensorWorkFailed as failure:
        return failure.exit_code
    told = [f"  taken: {line}" for line in done.taken] + [f"  not taken: {line}" for line in done.left]
    go_on = f"continue with: {program} ... --ckpt.resume-step {done.step}"
    Report(msgspec.to_builtins(done), [f"imported {done.checkpoint}", *told, go_on]).print(as_json=as_json)
    return 0
