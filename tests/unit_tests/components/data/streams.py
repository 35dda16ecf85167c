"""A stream over JSON lines, and what tests do with loaders. Imported by worker processes too."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.components.data import DatasetIterationPolicy, GrainDataLoader, SourceConfig
from torchtitan.components.data.files import Record
from torchtitan.components.data.sources import DocumentCursor, StreamingDataSource

MakeLoader = Callable[..., GrainDataLoader]
Batch = tuple[tuple[int, ...], ...]


class LinesCursor(DocumentCursor):
    """The lines of a file from some line on."""

    def __init__(self, path: Path, first: int) -> None:
        self._lines = path.read_text().splitlines()
        self._next = first

    def __next__(self) -> Record:
        if self._next == len(self._lines):
            raise StopIteration
        self._next += 1
        return Record(json.loads(self._lines[self._next - 1]), f"line {self._next}", 0)

    def state(self) -> dict[str, Any]:
        # Its shape changes with progress, as that of other libraries does.
        return {"next": self._next, "seen": list(range(self._next))[-2:]}


class LinesStream(StreamingDataSource):
    """A file of JSON lines, read forward only; counts what was opened where."""

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        path: str

    opened: list[int] = []

    def __init__(self, config: Config, *, dataset_iteration_policy: DatasetIterationPolicy) -> None:
        self.path = Path(config.path)

    def describe(self) -> str:
        return f"lines of {self.path.name}"

    def open(self, state: dict[str, Any] | None) -> DocumentCursor:
        first = state["next"] if state else 0
        self.opened.append(first)
        return LinesCursor(self.path, first)


def ids_of(batch: tuple) -> Batch:
    """Inputs, labels and positions of a microbatch."""
    inputs, labels = batch
    parts = (inputs["input"], labels, inputs["positions"])
    return tuple(tuple(part.tolist()) for part in parts)


def take(loader: GrainDataLoader, num_batches: int) -> list[Batch]:
    return [ids_of(next(loader)) for _ in range(num_batches)]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` as a checkpoint gives it back: no object of the run survives."""
    return json.loads(json.dumps(state))


def write_lines(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path
