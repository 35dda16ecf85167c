"""Find the files of a run and read their lines, also those of a run that was killed while it wrote.

A line that was cut off at the end of a file is what a kill leaves; it is passed over. One that is
broken elsewhere was damaged later; it is counted, so that a reader can say so.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.observability.structured_logger.jsonl_handler import FOLDER


@dataclass(kw_only=True, slots=True)
class BrokenLines:
    """Lines that could not be read."""

    cut_off: int = 0
    """Last lines without an end."""

    damaged: int = 0


def log_files(folder: Path) -> list[Path]:
    """The files of the run that dumps into ``folder``, which may also be their own folder.

    Raises ``FileNotFoundError`` if there are none.
    """
    for place in (folder / FOLDER, folder):
        found = sorted(place.glob("*.jsonl"))
        if found:
            return found
    raise FileNotFoundError(
        f"no structured logs in {folder} or {folder / FOLDER}. Name the --dump_folder of a run; one "
        "that was started with --debug.no-enable-structured-logging has none."
    )


def read_records(path: Path, broken: BrokenLines) -> Iterator[dict[str, Any]]:
    """The records of a file in order; adds to ``broken`` what is none."""
    with path.open("rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict) and isinstance(record.get("time"), (int, float)):
                yield record
            elif line.endswith(b"\n"):
                # Not the end of the file, so not what a kill leaves.
                broken.damaged += bool(line.strip())
            else:
                broken.cut_off += 1
