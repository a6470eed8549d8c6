"""Texts that the package ``datasets`` reads: from the hub, from compressed files and tables, from
folders of such files, and from folders that its ``save_to_disk`` wrote."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from hstree.lm._messages import quoted
from hstree.lm._packages import optional_package

from .source import HELD_OUT, SPLITS, TEXT, TRAIN_SHARE, WHOLE, Part, Source, hash_files

PREFIX = "hf:"
_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
_NAMES = {  # of a split in the path of a file
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "val", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_ROWS = 1000


def is_dataset(place: Path) -> bool:
    """Whether the package reads this file or folder: a table or compressed text by its name, a
    folder with such files or one that ``save_to_disk`` wrote."""
    return _is_saved(place) or bool(_files(place))


def _is_saved(folder: Path) -> bool:
    one = all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))
    return one or (folder / "dataset_dict.json").is_file()


def _files(place: Path) -> dict[str, list[Path]]:
    """The files that the package reads in a folder, or the one file, by the splits that their paths
    name; all as train where none does."""
    inside = sorted(place.rglob("*")) if place.is_dir() else [place]
    files: dict[str, list[Path]] = {}
    unnamed: list[Path] = []
    for file in inside:
        name = file.relative_to(place).as_posix()
        if file.is_file() and _format(file) and not re.search(r"(^|/)\.\w", name):
            words = re.findall("[a-z]+", name.lower())
            named = [_NAMES[word] for word in words if word in _NAMES]
            (files.setdefault(named[-1], []) if named else unnamed).append(file)
    return files or ({"train": unnamed} if unnamed else {})


def _format(file: Path) -> str | None:
    """The format of a file by its name; None: text that is not compressed."""
    *others, last = ["", *(suffix.lower() for suffix in file.suffixes)]
    if last in _COMPRESSED:
        return _FORMATS.get(others[-1], "text")
    return _FORMATS.get(last)


def dataset_source(data: str, column: str | None = None, *, held_out: bool = False) -> Source:
    """The splits train, validation and test (``held_out``: the last two, of which one suffices) of
    a dataset, with one line per row. A row with line breaks is several lines; a row without a value
    is skipped. The split train alone is one text, as a file is.

    Args:
        data: ``hf:NAME`` or ``hf:NAME:CONFIG``, a dataset of the hub; or a path, of which
            :func:`is_dataset`.
        column: the column of text; None: ``text``, or the only one.
        held_out: whether the text is only to be scored.

    Raises:
        ValueError: the package is missing, the dataset cannot be loaded, or a split or the column
            is missing.
    """
    package = optional_package("datasets", f"--data {data}", "data")
    place, files = Path(data), {}
    if data.startswith(PREFIX):
        name, config = _hub_name(data)
        title = name if config is None else f"{name} {config}"
        load = partial(package.load_dataset, name, config)
    else:
        title = place.resolve().name
        if _is_saved(place):
            files = {"": sorted(place.rglob("*.arrow"))}
            load = partial(package.load_from_disk, data)
        else:
            files = _files(place)
            load = _loader(package, title, files)
    try:
        found = load()
    except Exception as error:  # of the package, the hub, the network or the disk
        causes = (str(part) for part in (error, error.__cause__) if part is not None)
        reason = ": ".join(filter(None, causes))
        raise ValueError(f"{title}: the dataset cannot be loaded: {reason}") from error
    splits = _chosen(found if isinstance(found, dict) else {"train": found}, title, held_out)
    first, *others = splits.values()
    column = _column(first.features, title, column)
    for rows in others:
        _column(rows.features, title, column)
    splits = {split: rows.select_columns([column]) for split, rows in splits.items()}
    parts = {
        split: Part(
            f"{title}: the {f'split {_SPLITS[split]}' if split in SPLITS else 'text'}",
            partial(_lines, rows, column),
            partial(getattr, rows.data, "nbytes"),
        )
        for split, rows in splits.items()
    }
    first = next(iter(splits.values()))
    if WHOLE in splits:
        first = first.select(range(int(len(first) * TRAIN_SHARE)))
    content = partial(_fingerprint, splits, place, files, column)
    return Source(title, parts, partial(_lines, first, column), content)


def _hub_name(data: str) -> tuple[str, str | None]:
    name, _, config = data.removeprefix(PREFIX).partition(":")
    if not name or ":" in config or os.path.isdir(name):
        got = f"a folder; give --data {name}" if os.path.isdir(name) else quoted(data)
        raise ValueError(f"--data: expected {PREFIX}NAME[:CONFIG], a dataset of the hub, got {got}")
    return name, config or None


def _loader(package: Any, title: str, files: Mapping[str, Sequence[Path]]) -> partial[Any]:
    """A function that loads files. Raises ValueError if they have several formats or need another
    package."""
    every = [*chain.from_iterable(files.values())]
    formats = sorted({str(_format(file)) for file in every})
    if len(formats) > 1:
        raise ValueError(f"{title}: expected files of one format, got {' and '.join(formats)}")
    if any(file.suffix.lower() == ".zst" for file in every):
        optional_package("zstandard", f"--data {title}", "data")
    options = {"sep": "\t"} if formats == ["tsv"] else {}
    paths = {
        split: [glob.escape(str(file.resolve())) for file in some] for split, some in files.items()
    }
    builder = "csv" if options else formats[0]
    return partial(package.load_dataset, builder, data_files=paths, **options)


def _chosen(found: Mapping[str, Any], title: str, held_out: bool) -> dict[str, Any]:
    """The parts to read. Raises ValueError for a missing one."""
    if [*found] == ["train"]:
        return {TEXT if held_out else WHOLE: found["train"]}
    needed = HELD_OUT if held_out else SPLITS
    *others, last = (_SPLITS[split] for split in needed)
    missing = [_SPLITS[split] for split in needed if _SPLITS[split] not in found]
    if missing and (not held_out or len(missing) == len(needed)):
        expected = f"the splits {', '.join(others)} {'or' if held_out else 'and'} {last}"
        raise ValueError(
            f"{title}: expected {expected}, missing {', '.join(missing)}; "
            f"there are {', '.join(map(str, found)) or 'none'}"
        )
    return {split: found[_SPLITS[split]] for split in needed if _SPLITS[split] in found}


def _column(features: Mapping[str, Any], title: str, column: str | None) -> str:
    kinds = {name: getattr(feature, "dtype", None) for name, feature in features.items()}
    texts = [name for name, kind in kinds.items() if kind in ("string", "large_string")]
    if column is None and "text" in texts:
        return "text"
    if column is None and len(texts) == 1:
        return texts[0]
    if column is None or column not in texts:
        got = "none" if column is None else quoted(column)
        known = f"one of {', '.join(texts)}, got {got}"
        if not texts:
            known = f"whose columns are {', '.join(kinds) or 'none'}"
        raise ValueError(f"--column: expected a column of text of {title}, {known}")
    return column


def _lines(rows: Any, column: str) -> Iterator[str]:
    for batch in rows.iter(batch_size=_ROWS):
        for text in batch[column]:
            if text is not None:
                for line in text.removesuffix("\n").split("\n"):
                    yield f"{line}\n"


def _fingerprint(
    splits: Mapping[str, Any], place: Path, files: Mapping[str, Iterable[Path]], column: str
) -> str:
    if not files:
        found = {split: rows._fingerprint for split, rows in splits.items()}
        return f"datasets: {found} {column}"
    names = {
        split: [file.relative_to(place).as_posix() for file in some]
        for split, some in files.items()
    }
    content = hash_files(chain.from_iterable(files.values()))
    return f"datasets, files: {names} {content} {column}"
