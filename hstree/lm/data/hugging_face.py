"""Texts of the package ``datasets``, from the hub or saved to a folder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hstree.lm._messages import quoted
from hstree.lm._packages import optional_package

from .source import HELD_OUT, SPLITS, Part, Source, hash_files

PREFIX = "hf:"
_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
_ROWS = 1000


def is_saved_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` of the package ``datasets`` wrote this folder."""
    one = all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))
    return one or (folder / "dataset_dict.json").is_file()


def parse_dataset(text: str, *, held_out: bool = False) -> Source:
    """The dataset ``hf:NAME``, ``hf:NAME:CONFIG`` or ``hf:NAME:CONFIG:COLUMN``; CONFIG may be
    empty. Raises ValueError as :func:`dataset_source`, or for anything else."""
    name, _, rest = text.removeprefix(PREFIX).partition(":")
    config, _, column = rest.partition(":")
    if not text.startswith(PREFIX) or not name or ":" in column:
        raise ValueError(f"--data: expected {PREFIX}NAME[:CONFIG[:COLUMN]], got {quoted(text)}")
    return dataset_source(name, config or None, column or "text", held_out=held_out)


def dataset_source(
    name: str, config: str | None = None, column: str = "text", *, held_out: bool = False
) -> Source:
    """The splits train, validation and test (``held_out``: the last two, of which one suffices) of
    a dataset on the hub, or of a folder that was saved to disk, with one line per row. A row with
    line breaks is several lines; a row without a value is skipped. Raises ValueError if the package
    is missing, the dataset cannot be loaded, or a split or the column is missing."""
    package = optional_package("datasets", f"--data {PREFIX}{name}", "data")
    folder = Path(name)
    saved = folder.is_dir() and is_saved_dataset(folder)
    if saved and config is not None:
        raise ValueError(
            f"{name}: a saved dataset has no configurations, got {config!r}; "
            f"write hf:NAME::COLUMN to name a column"
        )
    try:
        found = package.load_from_disk(name) if saved else package.load_dataset(name, config)
    except Exception as error:  # of the package, the hub, the network or the disk
        raise ValueError(f"{name}: the dataset cannot be loaded: {error}") from error
    chosen = _chosen(found, name, column, held_out)
    splits = {split: found[_SPLITS[split]].select_columns([column]) for split in chosen}
    parts = {
        split: Part(
            f"{name}: the split {_SPLITS[split]}",
            partial(_lines, rows, column),
            partial(getattr, rows.data, "nbytes"),
        )
        for split, rows in splits.items()
    }
    if saved:
        title = folder.resolve().name
        content = partial(_saved_fingerprint, sorted(folder.rglob("*.arrow")), folder, column)
    else:
        title = name if config is None else f"{name} {config}"
        content = partial(_hub_fingerprint, splits, column)
    return Source(title, parts, next(iter(parts.values())).pieces, content)


def _chosen(found: Any, name: str, column: str, held_out: bool) -> list[str]:
    """The parts to read. Raises ValueError for a missing one, or one without the column."""
    needed = HELD_OUT if held_out else SPLITS
    *others, last = (_SPLITS[split] for split in needed)
    expected = f"the splits {', '.join(others)} {'or' if held_out else 'and'} {last}"
    if not isinstance(found, dict):
        raise ValueError(
            f"{name}: expected {expected}, got one dataset without splits; save a DatasetDict"
        )
    chosen = [split for split in needed if _SPLITS[split] in found]
    missing = [_SPLITS[split] for split in needed if split not in chosen]
    if not chosen or (missing and not held_out):
        raise ValueError(
            f"{name}: expected {expected}, missing {', '.join(missing)}; "
            f"there are {', '.join(map(str, found)) or 'none'}"
        )
    for split in chosen:
        features = found[_SPLITS[split]].features
        kind = getattr(features.get(column), "dtype", None)
        if kind not in ("string", "large_string"):
            names = ", ".join(features)
            raise ValueError(
                f"{name}: expected a column {column!r} of text in the split {_SPLITS[split]}, "
                f"whose columns are {names}; name one as {PREFIX}NAME:CONFIG:COLUMN"
            )
    return chosen


def _lines(rows: Any, column: str) -> Iterator[str]:
    for batch in rows.iter(batch_size=_ROWS):
        for text in batch[column]:
            if text is not None:
                for line in text.removesuffix("\n").split("\n"):
                    yield f"{line}\n"


def _saved_fingerprint(files: list[Path], folder: Path, column: str) -> str:
    names = [file.relative_to(folder).as_posix() for file in files]
    return f"datasets, saved: {names} {hash_files(files)} {column}"


def _hub_fingerprint(splits: dict[str, Any], column: str) -> str:
    fingerprints = {split: rows._fingerprint for split, rows in splits.items()}
    return f"datasets: {fingerprints} {column}"
