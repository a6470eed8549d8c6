"""The file of a planned study's records: one line for each finished run, in JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hstree._files import write_atomic

from ..report import provenance

Settings = Mapping[str, Any]


def key(settings: Settings, seed: int) -> str:
    """Identifies a run: equal settings and seed are the same run, whatever its name."""
    return json.dumps([dict(settings), seed], sort_keys=True)


class Records:
    """The finished runs of a study, kept in one file, so that the study can go on another day or on
    another machine. A record holds the name of the contender, its settings, the seed, the text, the
    figures, and what :func:`hstree.lab.report.provenance` says; all records of a file are about the
    same text. The file may not exist yet. Raises ValueError if it is not a list of records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs: dict[str, dict[str, Any]] = {}
        self._read(path)

    def __len__(self) -> int:
        return len(self._runs)

    def figures(self, settings: Settings, seed: int) -> dict[str, Any] | None:
        record = self._runs.get(key(settings, seed))
        return None if record is None else record["figures"]

    def all(self) -> list[dict[str, Any]]:
        return sorted(self._runs.values(), key=lambda r: (r["name"], key(r["settings"], r["seed"])))

    def add(
        self, name: str, settings: Settings, seed: int, text: str, figures: Mapping[str, Any]
    ) -> None:
        """Add a finished run, and write the file. Runs that another process has added meanwhile are
        kept. Raises ValueError if the records are about another text."""
        record = {"name": name, "settings": dict(settings), "seed": seed}
        record |= {"text": text, "figures": dict(figures), **provenance()}
        self.check_text(text)
        self._read(self.path)
        self._runs[key(settings, seed)] = json.loads(json.dumps(record))
        self._write()

    def merge(self, paths: Iterable[Path]) -> None:
        """Add the records of other files, and write the file. A run that is in both keeps its
        record in this file."""
        own = dict(self._runs)
        for path in paths:
            if not path.is_file():
                raise ValueError(f"{path}: no such file")
            self._read(path)
        self._runs |= own
        self._write()

    def check_text(self, text: str) -> None:
        for record in self._runs.values():
            if record["text"] != text:
                raise ValueError(
                    f"{self.path}: expected the text {record['text']!r} as before, got {text!r}"
                )

    def _read(self, path: Path) -> None:
        if not path.is_file():
            return
        try:
            records = json.loads(path.read_text(encoding="utf-8"))
            found = {key(record["settings"], record["seed"]): record for record in records}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: expected a list of records: {error!r}") from None
        for record in found.values():
            self.check_text(record["text"])
        self._runs |= found

    def _write(self) -> None:
        lines = ",\n".join(json.dumps(record) for record in self.all())
        write_atomic(self.path, f"[\n{lines}\n]\n".encode())
