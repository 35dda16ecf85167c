"""Where documents come from.

A source is a sequence of documents (dicts of fields) with a digest of its content, or a stream of
them that is only read forward. The one fact to know: files are taken in sorted order, so the same
files are the same corpus, however the patterns that name them are spelt.

    patterns -> files -> RandomAccessDataSource -> processors -> token_cache
    huggingface.py    -> RandomAccessDataSource, StreamingDataSource -> document_stream
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from torchtitan.components.data.digests import digest_files, watch_files
from torchtitan.components.data.files import (
    DocumentFile,
    expand_patterns,
    JsonlFile,
    PlainTextFile,
    Record,
    SampleError,
)
from torchtitan.components.data.types import DatasetIterationPolicy
from torchtitan.config import Configurable

_JSONL_SUFFIXES = (".jsonl", ".ndjson")
_TEXT_SUFFIXES = (".txt", ".text", ".md")
# A corpus up to this size is checked line by line before a run, a larger one at its files' ends.
_CHECK_ALL_BYTES = 256 * 1024 * 1024
_CHECK_LINES = 1000


@dataclass(kw_only=True, slots=True)
class SourceConfig(Configurable.Config):
    """Base of the sources' configs: built with ``dataset_iteration_policy=``."""

    def probe(self) -> Iterator[Record | SampleError] | None:
        """Documents to check before a run, the broken ones as errors; None checks nothing.

        Raises OSError or ValueError when there is nothing to read.
        """
        return None


class RandomAccessDataSource(Configurable, ABC):
    """Documents by number, and all of them in order."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @abstractmethod
    def digest(self, cache_folder: Path) -> str:
        """A digest of the documents and their order; may keep notes in ``cache_folder``."""

    def watch(self) -> Callable[[], None]:
        """A check to call later: raises ValueError if the documents have changed since ``watch``."""
        return lambda: None

    @abstractmethod
    def size_bytes(self) -> int:
        """What the records' ``size_bytes`` add up to, for the progress bar."""

    @abstractmethod
    def scan(self) -> Iterator[Record]:
        """All documents in order."""


class DocumentCursor(ABC):
    """Documents of a stream from some place on, in order."""

    def __iter__(self) -> "DocumentCursor":
        return self

    @abstractmethod
    def __next__(self) -> Record: ...

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The place behind the last document that was read, in JSON types."""


class StreamingDataSource(Configurable, ABC):
    """Documents that can only be read forward, from the beginning or from a place once reached."""

    @abstractmethod
    def describe(self) -> str:
        """What is read, for the fingerprint. The content itself cannot be covered."""

    @abstractmethod
    def open(self, state: dict[str, Any] | None) -> DocumentCursor:
        """The documents from the beginning, or from the place ``state`` of a cursor."""


class _FileSource(RandomAccessDataSource):
    """Documents of several files, one file after the other."""

    def __init__(self, files: list[DocumentFile]) -> None:
        self.files = files

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(file) for file in self.files))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        which = bisect_right(self._ends, number)
        first = self._ends[which - 1] if which else 0
        return self.files[which][number - first]

    def digest(self, cache_folder: Path) -> str:
        kinds = [(type(file).__name__, file.path) for file in self.files]
        return digest_files(kinds, cache_folder)

    def watch(self) -> Callable[[], None]:
        return watch_files([file.path for file in self.files])

    def size_bytes(self) -> int:
        return sum(file.path.stat().st_size for file in self.files)

    def scan(self) -> Iterator[Record]:
        for file in self.files:
            yield from file.scan()


def _probe(files: list[DocumentFile]) -> Iterator[Record | SampleError]:
    total = sum(file.path.stat().st_size for file in files)
    for file in files:
        yield from file.probe(None if total <= _CHECK_ALL_BYTES else _CHECK_LINES)


class IndexedJsonlSource(_FileSource):
    """JSON-lines files, one document a line, reached by byte offset."""

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        patterns: tuple[str, ...]
        """Paths or globs of the files, seen from the current directory; each must match a file."""

        def open_files(self) -> list[DocumentFile]:
            return [JsonlFile(path) for path in expand_patterns(self.patterns)]

        def probe(self) -> Iterator[Record | SampleError]:
            return _probe(self.open_files())

    def __init__(self, config: Config, *, dataset_iteration_policy: DatasetIterationPolicy) -> None:
        super().__init__(config.open_files())


class LocalFilesSource(_FileSource):
    """Files of several kinds, told apart by suffix: JSON lines, or plain text as one document."""

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        patterns: list[str] = field(default_factory=list)
        """Paths or globs of .jsonl and .txt files, seen from the current directory."""

        def open_files(self) -> list[DocumentFile]:
            return _open_by_suffix(expand_patterns(self.patterns))

        def probe(self) -> Iterator[Record | SampleError]:
            return _probe(self.open_files())

    def __init__(self, config: Config, *, dataset_iteration_policy: DatasetIterationPolicy) -> None:
        super().__init__(config.open_files())


def _open_by_suffix(paths: list[Path]) -> list[DocumentFile]:
    unknown = [str(path) for path in paths if path.suffix not in _JSONL_SUFFIXES + _TEXT_SUFFIXES]
    if unknown:
        raise ValueError(
            f"cannot tell from the name how to read {', '.join(unknown)}. Use "
            f"{', '.join(_JSONL_SUFFIXES)} for one JSON object a line, or "
            f"{', '.join(_TEXT_SUFFIXES)} for plain text."
        )
    return [
        JsonlFile(path) if path.suffix in _JSONL_SUFFIXES else PlainTextFile(path) for path in paths
    ]
