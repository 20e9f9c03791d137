"""Finds the files that hold the rows of a data set: one file, a directory, or a glob.

A directory is read whole. Its files are left out only if all files name a split, such as `train` and `test`, and
`data.split` chooses one; hidden files and files such as README.md do not count. Other files that cannot be
read are refused by their names.
"""

import glob
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import DataError, ReadError, nearest

COMPRESSED = (".gz", ".zst")
FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
    ".parquet": "parquet",
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
}
WHAT_IS_READ = ".jsonl, .json, .csv, .tsv, .parquet or .arrow file (JSON and CSV also as .gz or .zst)"
_OTHER_FILES = (".txt", ".gz", ".zip", ".zst", ".xz", ".bz2", ".yaml", ".yml", ".xlsx", ".tar")
_NO_ROWS = {"dataset_info.json", "dataset_infos.json"}
_OF_SAVED = ("state.json", "dataset_dict.json")
"""Files that `save_to_disk` writes beside the files of rows."""
_NO_ROWS_SUFFIXES = {".md", ".rst", ".py", ".sh", ".lock", ".html", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".svg"}
_NO_ROWS_STEMS = {"readme", "license", "licence", "notice", "citation", "changelog", "requirements"}
_PARQUET, _GZIP, _ZSTD, _UTF_16 = b"PAR1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", (b"\xff\xfe", b"\xfe\xff")
_LFS = b"version https://git-lfs"
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}  # as `datasets` takes them
_SHARD = re.compile(r"data/(\w[\w.]*)-\d{5}-of-\d{5}.*")
_MOST_NAMED = 5


class DataFile(msgspec.Struct, frozen=True):
    """A file of rows.

    Attributes:
        path: where it is.
        label: its name among several files, such as its path below the directory.
    """

    path: Path
    label: str


def format_of(path: Path) -> str | None:
    """Return `json`, `csv`, `parquet` or `arrow` by the name of a file; None for other names."""
    bare = path.name.lower()
    for suffix in COMPRESSED:
        if bare.endswith(suffix):
            found = FORMATS.get(Path(bare.removesuffix(suffix)).suffix)
            return found if found in ("json", "csv") else None
    return FORMATS.get(Path(bare).suffix)


def find_files(name: str, *, key: str, split: str | None = None) -> list[DataFile] | None:
    """Return the files of a data set in the order of their rows; None for the name of a hub.

    Args:
        key: the setting that has the name.
        split: which files of a directory, if their names tell splits; unset: all.

    Raise DataError if there is nothing of that name, or a file cannot hold rows; ReadError if a file is there and
    cannot be read.
    """
    path = Path(name)
    try:
        if path.is_file():
            found = [DataFile(path, path.name)]
            if format_of(path) is None:
                raise DataError(f"{key} = '{name}'{_instead(path)}: use a {WHAT_IS_READ}, a directory or a hub id.")
        elif path.is_dir():
            found = _files_of_directory(path, f"{key} = '{name}'", split)
        elif path.exists():  # a pipe may have no end, or no writer
            raise DataError(f"{key} = '{name}' is not a regular file, but a pipe or a device")
        elif glob.has_magic(name):
            found = _files_of_glob(name, f"{key} = '{name}'")
        else:
            looks_local = name.startswith((".", "/", "~")) or name.lower().endswith((*FORMATS, *_OTHER_FILES))
            if looks_local or name.count("/") != 1:
                raise DataError(
                    f"{key} = '{name}': there is no such file or directory (from {Path.cwd()}).{_beside(path)}"
                )
            return None
        for file in found:
            if wrong := _wrong_with(file.path, is_only=len(found) == 1):
                where = "" if path.is_file() else f": {file.label}"
                raise DataError(f"{key} = '{name}'{where} {wrong}")
    except OSError as error:
        raise ReadError.of(Path(error.filename or path), error) from error
    return found


def left_out(name: str, found: Sequence[DataFile]) -> str:
    """Name the files of rows in the directory `name` that are not among those found, as if a split leaves them out.
    Return an empty string if there are none."""
    folder, chosen = Path(name), {file.path for file in found}
    others = sorted(one.relative_to(folder) for one in folder.rglob("*") if one not in chosen and one.is_file())
    others = [one for one in others if one.name not in _OF_SAVED]
    labels = [
        one.as_posix()
        for one in others
        if format_of(one) and not _cannot_hold_rows(one) and not any(part.startswith((".", "__")) for part in one.parts)
    ]
    return _some(labels)


def _beside(path: Path) -> str:
    """Say what is there in the place of a missing file."""
    folder = path.parent
    there = sorted(one.name for one in folder.iterdir() if format_of(one)) if folder.is_dir() else []
    return f"{nearest(path.name, there)} {folder} has: {_some(there)}." if there else ""


def _instead(path: Path) -> str:
    if path.suffix.lower() in (".yaml", ".yml"):
        return " is YAML, which holds settings and no rows"
    return ""


def _files_of_glob(name: str, what: str) -> list[DataFile]:
    found: dict[str, DataFile] = {}
    for match in sorted(glob.glob(name, recursive=True)):  # noqa: PTH207 - it may be absolute
        if Path(match).is_dir():
            if not match.endswith("/") and "**" not in name:
                found |= {str(one.path): DataFile(one.path, str(one.path)) for one in _all_files(Path(match), what)}
        elif not _cannot_hold_rows(Path(match)):
            found[match] = DataFile(Path(match), match)
    files = list(found.values())
    if not files:
        raise DataError(f"{what}: no file of rows matches (from {Path.cwd()}). Use a {WHAT_IS_READ}.")
    _refuse_unknown(files, what)
    return files


def _files_of_directory(path: Path, what: str, split: str | None) -> list[DataFile]:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved_files(path, what, split)
    if (path / "README.md").is_file() and (chosen := _of_card(path, what)) is not None:
        return _files_of_card(path, chosen, what, split)
    files = _all_files(path, what)
    if not files:
        raise DataError(f"{what} holds no {WHAT_IS_READ}. Name a directory or a file with rows of these formats.")
    return files if split is None else _of_split(files, what, split)


def _all_files(path: Path, what: str) -> list[DataFile]:
    """Return the files below a directory in the order of their paths."""
    found: list[DataFile] = []
    entered: set[str] = set()
    for folder, directories, names in os.walk(path, followlinks=True):
        if (real := os.path.realpath(folder)) in entered:  # by a link
            directories.clear()
            continue
        directories[:] = sorted(one for one in directories if not one.startswith((".", "__")))
        entered.add(real)
        files = [Path(folder) / one for one in names]
        found += [DataFile(one, one.relative_to(path).as_posix()) for one in files if not _cannot_hold_rows(one)]
    _refuse_unknown(found, what)
    return sorted(found, key=lambda file: file.label)


def _cannot_hold_rows(path: Path) -> bool:
    name = path.name.lower()
    if name.startswith(".") or name in _NO_ROWS:
        return True
    if format_of(path) is not None:
        return False
    is_told = name.startswith("_") or Path(name).suffix in _NO_ROWS_SUFFIXES
    return is_told or (Path(name).stem in _NO_ROWS_STEMS and Path(name).suffix in ("", ".txt"))


def _refuse_unknown(files: list[DataFile], what: str) -> None:
    if unknown := sorted(file.label for file in files if format_of(file.path) is None):
        raise DataError(
            f"{what} holds {_some(unknown)}, which cannot be read as rows. Move what holds no rows away, or choose "
            f"files with a glob, such as 'rows/*.jsonl'; rows are in a {WHAT_IS_READ}."
        )


def _split_of(label: str) -> str | None:
    """Return the split that the path of a file names, as `datasets` reads it."""
    if shard := _SHARD.fullmatch(label):
        return shard[1]
    for part in reversed(label.lower().split("/")):
        for word in re.split(r"[-._ 0-9]+", part):
            if word in _SPLITS:
                return _SPLITS[word]
    return None


def _of_split(files: list[DataFile], what: str, split: str) -> list[DataFile]:
    splits = {file.label: _split_of(file.label) for file in files}
    told = sorted({one for one in splits.values() if one is not None})
    wanted = split if split in told else _SPLITS.get(split, split)
    without = [label for label, one in splits.items() if one is None]
    if without and told and told != ["train"]:
        some = _some([f"{label} ({one})" for label, one in splits.items() if one is not None])
        raise DataError(
            f"{what}: the names of some files tell a split, {some}, and others none, {_some(without)}. Rename them, so "
            "that all or none do, or choose files with a glob, such as 'rows/*.jsonl', which reads all that match."
        )
    if without and wanted == "train":
        return files
    if wanted not in told:
        have = f"has the splits {told}" if told else "has no splits: the name of no file tells one"
        raise DataError(f"data.split = '{split}': {what} {have}.{nearest(split, told)}")
    return [file for file in files if splits[file.label] == wanted]


def _saved_files(path: Path, what: str, split: str | None) -> list[DataFile]:
    """Return the files that `save_to_disk` of `datasets` wrote."""
    chosen = [path]
    if (path / "dataset_dict.json").is_file():
        splits = [str(one) for one in _json_of(path / "dataset_dict.json", what).get("splits", [])]
        if split is not None and split not in splits:
            told = f"{what} has the splits {sorted(splits)}.{nearest(split, splits)}"
            raise DataError(f"data.split = '{split}': {told}")
        chosen = [path / one for one in splits if split in (None, one)]
    found = []
    for folder in chosen:
        if not (folder / "state.json").is_file():
            raise DataError(f"{what}: {folder} has no state.json. Copy it again, or save it again.")
        names = [str(one["filename"]) for one in _json_of(folder / "state.json", what).get("_data_files", [])]
        for name in names:
            if not (folder / name).is_file():
                raise DataError(f"{what}: {folder} lacks {name}, which its state.json names. Copy it again.")
            found.append(DataFile(folder / name, (folder / name).relative_to(path).as_posix()))
    if not found:
        raise DataError(f"{what} holds no rows")
    return found


def _json_of(path: Path, what: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{what}: {path} is not JSON: {error}. Copy it again, or save it again.") from None
    if not isinstance(found, dict):
        raise DataError(f"{what}: {path} holds no JSON object. Copy it again, or save it again.")
    return found


def _of_card(path: Path, what: str) -> Mapping[str, Any] | None:
    """Return the configuration that README.md, the card of a data set of the hub, names; None without files of one."""
    if b"data_files:" not in (path / "README.md").read_bytes():
        return None
    from huggingface_hub import metadata_load

    try:
        card = metadata_load(path / "README.md") or {}
    except Exception as error:  # noqa: BLE001 - of a parser of YAML
        raise DataError(f"{what}: the first lines of README.md are not YAML: {error}. Mend them.") from None
    every = card.get("configs")
    configs = [one for one in every if isinstance(one, Mapping)] if isinstance(every, list) else []
    if not any("data_files" in one for one in configs):
        return None
    chosen = [one for one in configs if one.get("default") or one.get("config_name") == "default"] or configs
    if len(chosen) != 1 or "data_files" not in chosen[0]:
        names = [str(one.get("config_name")) for one in configs]
        raise DataError(
            f"{what}: README.md has the configurations {names}, and none is the default. Choose files with a glob, "
            "such as 'rows/*.jsonl'."
        )
    return chosen[0]


def _files_of_card(path: Path, chosen: Mapping[str, Any], what: str, split: str | None) -> list[DataFile]:
    """Return the files that a configuration of a card names for a split."""
    patterns: dict[str, list[str]] = {}
    for name, pattern in _patterns(chosen["data_files"]):
        patterns.setdefault(name, []).append(pattern)
    if split is not None and split not in patterns:
        told = f"{what} has the splits {sorted(patterns)}.{nearest(split, patterns)}"
        raise DataError(f"data.split = '{split}': {told}")
    found: dict[Path, DataFile] = {}
    for pattern in [one for name, those in patterns.items() if split in (None, name) for one in those]:
        whole = Path(str(chosen.get("data_dir") or ""), pattern)
        if not pattern or whole.is_absolute() or ".." in whole.parts:
            raise DataError(
                f"{what}: README.md names the files {pattern!r}, which are not below its directory. Choose files with "
                "a glob, such as 'rows/*.jsonl'."
            )
        found_there = sorted(path.glob(f"{whole}/*" if whole.name == "**" else str(whole)))  # follows no links in `**`
        places = [(one, one.relative_to(path)) for one in found_there if one.is_file() and not _cannot_hold_rows(one)]
        matches = [one for one, place in places if "/." in f"/{whole}" or "/." not in f"/{place}"]
        if not matches:
            raise DataError(f"{what} lacks {pattern}, which its README.md names. Download it again.")
        found |= {one: DataFile(one, one.relative_to(path).as_posix()) for one in matches}
    _refuse_unknown(list(found.values()), what)
    return list(found.values())


def _patterns(data_files: object) -> Iterator[tuple[str, str]]:
    """Yield (split, pattern) of a card, which has a path, a list of paths, or splits with one or the other."""
    if isinstance(data_files, Mapping):
        data_files = [{"split": split, "path": path} for split, path in data_files.items()]
    for one in data_files if isinstance(data_files, list) else [data_files]:
        split, paths = (one.get("split", "train"), one.get("path")) if isinstance(one, Mapping) else ("train", one)
        for path in paths if isinstance(paths, list) else [paths]:
            yield str(split), str(path)


def _wrong_with(path: Path, *, is_only: bool) -> str | None:
    """Return why a file cannot hold rows, by its first and last bytes; None if it may."""
    suffix, status = path.suffix.lower(), path.stat()
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file, but a pipe or a device: move it away."
    size = status.st_size
    with path.open("rb") as file:
        beginning = file.read(len(_LFS))
        file.seek(max(0, size - 4))
        end = file.read()
    if beginning == _LFS:
        return "is a pointer of Git LFS in the place of the rows: run `git lfs pull` there."
    if not size and (is_only or format_of(path) != "json" or suffix in COMPRESSED):
        return "holds no rows: the file is empty. Write it again, or name another."
    if suffix == ".parquet" and not beginning[:4] == end == _PARQUET:
        return "is not a Parquet file, or was cut: those begin and end with PAR1. Write it again, or change its suffix."
    for compressed, magic in ((".gz", _GZIP), (".zst", _ZSTD)):
        if suffix == compressed and not beginning.startswith(magic):
            how = "gzip" if suffix == ".gz" else "zstd"
            return f"is not compressed by {how}, and its name ends in {suffix}: rename it, or compress it."
    if beginning.startswith(_UTF_16):
        return f"is in UTF-16, and UTF-8 is read. Convert it: iconv -f UTF-16 -t UTF-8 '{path}' > new.jsonl"
    return None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
