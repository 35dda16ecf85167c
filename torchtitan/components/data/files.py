"""Read documents from text files, and say precisely which one is broken.

A ``.jsonl`` file holds one document a line, as a JSON object; any other text file is one document
with the single field ``text``. Reading goes through a file once, in order; random access goes
through an index of byte offsets that is made at the first use.

    patterns -> expand_patterns -> open_file -> JsonlFile / PlainTextFile -> Record
"""

import glob
import json
import os
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

# How far back the end of a file too large to be checked whole is read.
_TAIL_BYTES = 4 * 1024 * 1024


class SampleError(ValueError):
    """A document cannot be used; the text says where it is and what is wrong."""


@dataclass(frozen=True, slots=True)
class Record:
    """One document: its fields, where it was found, and its share of the file."""

    fields: dict[str, Any]
    location: str
    size_bytes: int


def expand_patterns(patterns: Sequence[str]) -> list[Path]:
    """The files that ``patterns`` (paths or globs) name, sorted.

    Raises FileNotFoundError for patterns without a file, ValueError for a single text in place of
    patterns, for a file named twice and for empty files.
    """
    if isinstance(patterns, str):
        raise ValueError(
            f"data files: a list of patterns was expected, but found the text {patterns!r}. Put it "
            "into a list or tuple."
        )
    if not patterns:
        raise ValueError("no data files were given: found an empty list. Name at least one file.")
    files: list[Path] = []
    missing = []
    for pattern in patterns:
        found = _match(os.path.expanduser(pattern))
        files += found
        if not found:
            missing.append(pattern)
    if missing:
        raise FileNotFoundError(
            f"no data file for {', '.join(sorted(missing))} (seen from {Path.cwd()}). Name files "
            "that are there; a folder needs a pattern, such as folder/*.jsonl."
        )
    files.sort()
    _refuse_repeated(files)
    empty = [str(file) for file in files if file.stat().st_size == 0]
    if empty:
        raise ValueError(f"empty data files: {', '.join(empty)}. Fill them or leave them out.")
    return files


def _match(pattern: str) -> list[Path]:
    # A file whose name holds glob characters is still reached by its name.
    names = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
    return [Path(name) for name in names if os.path.isfile(name)]


def _refuse_repeated(files: Sequence[Path]) -> None:
    seen: set[str] = set()
    repeated = []
    for file in files:
        real = os.path.realpath(file)
        if real in seen:
            repeated.append(str(file))
        seen.add(real)
    if repeated:
        raise ValueError(
            f"data files named more than once: {', '.join(sorted(set(repeated)))}. Its documents "
            "would count twice; name each file once."
        )


class DocumentFile(ABC):
    """The documents of one file, in order (``scan``) or by number (``[i]``)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def scan(self) -> Iterator[Record]:
        """All documents in order; raises SampleError at the first broken one."""

    @abstractmethod
    def probe(self, num_lines: int | None) -> Iterator[Record | SampleError]:
        """Like ``scan``, past broken documents; with ``num_lines`` only both ends of the file."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]: ...


class JsonlFile(DocumentFile):
    """One JSON object a line; blank lines are skipped."""

    def scan(self) -> Iterator[Record]:
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    location = f"{self.path}, line {number}"
                    yield Record(_parse(line, location), location, len(line))

    def probe(self, num_lines: int | None) -> Iterator[Record | SampleError]:
        with self.path.open("rb") as lines:
            for number, line in enumerate(islice(lines, num_lines), start=1):
                if not line.isspace():
                    yield _try_parse(line, f"{self.path}, line {number}")
            if num_lines is None:
                return
            tail = _read_tail(lines, self.path.stat().st_size)[-num_lines:]
            for before_end, line in zip(range(len(tail) - 1, -1, -1), tail, strict=True):
                if line.strip():
                    yield _try_parse(line, f"{self.path}, {before_end} lines before its end")

    @cached_property
    def _index(self) -> tuple[array, array]:
        """Byte offset and line number of each document."""
        offsets, numbers = array("q"), array("q")
        offset = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    offsets.append(offset)
                    numbers.append(number)
                offset += len(line)
        return offsets, numbers

    def __len__(self) -> int:
        return len(self._index[0])

    def __getitem__(self, index: int) -> dict[str, Any]:
        offsets, numbers = self._index
        with self.path.open("rb") as file:
            file.seek(offsets[index])
            return _parse(file.readline(), f"{self.path}, line {numbers[index]}")


class PlainTextFile(DocumentFile):
    """A whole UTF-8 file as one document."""

    def scan(self) -> Iterator[Record]:
        yield Record(self[0], str(self.path), self.path.stat().st_size)

    def probe(self, num_lines: int | None) -> Iterator[Record | SampleError]:
        try:
            yield from self.scan()
        except SampleError as error:
            yield error

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index not in (0, -1):
            raise IndexError(f"document {index} of {self.path}, which is a single document")
        try:
            # The marker that some editors put first is no text.
            return {"text": self.path.read_bytes().decode("utf-8-sig")}
        except UnicodeDecodeError as error:
            raise SampleError(
                f"{self.path}, byte {error.start}: not UTF-8 text ({error.reason}). Convert the "
                "file or leave it out."
            ) from error


def _read_tail(file: BinaryIO, size_bytes: int) -> list[bytes]:
    """The lines at the end of ``file``, none of those already read."""
    already_read = file.tell()
    start = max(already_read, size_bytes - _TAIL_BYTES)
    file.seek(start)
    lines = file.read().removesuffix(b"\n").split(b"\n")
    # A start in the middle of the file is likely the middle of a line.
    return lines if start == already_read else lines[1:]


def _parse(line: bytes, location: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:  # The latter: thousands of open brackets.
        raise SampleError(f"{location}: not JSON ({error}). Correct or remove the line.") from error
    if not isinstance(fields, dict):
        raise SampleError(
            f"{location}: a JSON {type(fields).__name__}, not an object with fields. Write "
            'each document as {"text": "..."}.'
        )
    return fields


def _try_parse(line: bytes, location: str) -> Record | SampleError:
    try:
        return Record(_parse(line, location), location, len(line))
    except SampleError as error:
        return error
