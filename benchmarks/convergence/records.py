"""Finished runs, one JSON line each: what is there need not be run again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.convergence.setting import Setting

Record = dict[str, Any]


class Records:
    """A file of finished runs.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        """Reads what is there; a last line that a crash cut short is left out, and cut off.

        Args:
            path: The file, or where to make it.

        Raises:
            ValueError: If another line is no record.
        """
        self.path = path
        self._found: dict[str, Record] = {}
        if path.exists():
            whole = path.read_bytes()
            end = whole.rfind(b"\n") + 1
            if end < len(whole):
                os.truncate(path, end)
            for number, line in enumerate(whole[:end].splitlines(), 1):
                try:
                    record = json.loads(line)
                    self._found[record["key"]] = record
                except (ValueError, KeyError, TypeError):
                    raise ValueError(f"{path}, line {number}: this is no record of a run") from None

    def __len__(self) -> int:
        """How many runs are finished."""
        return len(self._found)

    def of(self, setting: Setting) -> Record | None:
        """Returns the record of a run, or None if it has not been made."""
        return self._found.get(setting.key)

    def all(self) -> list[Record]:
        """Returns all records, in the order in which they came."""
        return list(self._found.values())

    def add(self, record: Mapping[str, Any]) -> None:
        """Appends a record; it is on the disk when this returns."""
        line = json.dumps(dict(record), allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self._found[record["key"]] = dict(record)
