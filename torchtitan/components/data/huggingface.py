"""Documents from Hugging Face datasets, whole or as a stream.

The names are those of ``datasets.load_dataset``: of a dataset on the hub, or of a format such as
``json`` with files named in ``load_dataset_kwargs``. The one fact to know: the digest of a dataset is
that of its rows, so the same rows are the same corpus on every machine and under every version of
the library.

    load_dataset -> Dataset         -> HuggingFaceRandomAccessSource -> token_cache
                 -> IterableDataset -> HuggingFaceStreamingSource    -> document_stream
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from torchtitan.components.data.digests import remembered_digest
from torchtitan.components.data.files import Record, SampleError
from torchtitan.components.data.progress import byte_progress
from torchtitan.components.data.sources import (
    DocumentCursor,
    RandomAccessDataSource,
    SourceConfig,
    StreamingDataSource,
)
from torchtitan.components.data.types import DatasetIterationPolicy
from torchtitan.config.violations import reject

_BATCH_ROWS = 1000
# Rows of a stream that are looked at before a run: a stream may come over the network.
_PROBE_STREAM_ROWS = 20
_OWN_SETTINGS = ("name", "revision", "split", "streaming")


@dataclass(kw_only=True, slots=True)
class HuggingFaceConfig(SourceConfig):
    """What ``datasets.load_dataset`` is asked for."""

    path: str
    """Name of a dataset on the hub, a local folder, or a format such as json or parquet."""

    split: str
    """Split of the dataset, such as train or train[:10%]."""

    name: str | None = None
    """Configuration of the dataset, such as en; None takes its default."""

    revision: str | None = None
    """Version of the dataset on the hub. None takes the newest, which may change under a run."""

    load_dataset_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keywords of load_dataset, such as data_files."""

    def __post_init__(self) -> None:
        if repeated := sorted(set(self.load_dataset_kwargs) & set(_OWN_SETTINGS)):
            reject(
                f"settings of the source are repeated in kwargs: {', '.join(repeated)} in "
                "load_dataset_kwargs. Set each in the source's own field; whether it streams follows "
                "from the class."
            )

    def describe(self) -> str:
        details = {"revision": self.revision} if self.revision else {}
        named = sorted({**details, **self.load_dataset_kwargs}.items())
        return " ".join([self.place(), *(f"{key}={value!r}" for key, value in named)])

    def place(self) -> str:
        """How a message names the data."""
        named = f"{self.path}/{self.name}" if self.name else self.path
        return f"{named} [{self.split}]"


def _load(config: HuggingFaceConfig, *, streaming: bool) -> Any:
    """What ``load_dataset`` makes of ``config``. Raises ValueError, or TypeError for another kind."""
    # Takes most of a second, and most runs read other sources.
    import datasets

    kind = datasets.IterableDataset if streaming else datasets.Dataset
    try:
        found = datasets.load_dataset(
            config.path,
            name=config.name,
            split=config.split,
            revision=config.revision,
            streaming=streaming,
            **config.load_dataset_kwargs,
        )
    except StopIteration as error:
        # From a stream whose files hold no row to learn the columns from.
        raise ValueError(_empty(config)) from error
    # The library raises errors of its own, of the network, of the file system and of pyarrow.
    except Exception as error:
        raise ValueError(
            f"cannot load the dataset {config.place()}: {_reason(error)}. Correct path, "
            "name and split of the source, or give it local files."
        ) from error
    if not isinstance(found, kind):
        raise TypeError(
            f"the source requires one {kind.__name__}, but {config.place()} is a "
            f"{type(found).__name__}. Name a single split."
        )
    return found


def _reason(error: Exception) -> str:
    """What is wrong; the library puts that into the cause of an error that only says something is."""
    cause = f", caused by {error.__cause__}" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {error}{cause}"


class HuggingFaceRandomAccessSource(RandomAccessDataSource):
    """A Hugging Face dataset on this machine, downloaded once if it is not local."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceConfig):
        def probe(self) -> Iterator[Record | SampleError]:
            rows = _load(self, streaming=False)
            if len(rows) == 0:
                raise ValueError(_empty(self))
            yield from islice(_records(rows, self.place()), _BATCH_ROWS)

    def __init__(self, config: Config, *, dataset_iteration_policy: DatasetIterationPolicy) -> None:
        """Raises ValueError when the data cannot be loaded, TypeError for more than one split."""
        self._place = config.place()
        self._rows = _load(config, streaming=False)
        if len(self._rows) == 0:
            raise ValueError(_empty(config))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return self._rows[number]

    def digest(self, cache_folder: Path) -> str:
        files = [Path(item["filename"]) for item in self._rows.cache_files]
        # A split such as train[:10%] is another choice from the same files.
        choice = f"{self._place} {len(self._rows)}"
        return remembered_digest(files, choice, cache_folder, self._digest_rows)

    def _digest_rows(self) -> str:
        digest = hashlib.sha256()
        total = self.size_bytes()
        with byte_progress(total, f"reading {self._place}", delay_seconds=2) as bar:
            for record in self.scan():
                row = json.dumps(record.fields, sort_keys=True, default=repr)
                digest.update(f"{row}\n".encode())
                bar.update(record.size_bytes)
        return digest.hexdigest()[:32]

    def size_bytes(self) -> int:
        return int(self._rows.data.nbytes)

    def scan(self) -> Iterator[Record]:
        return _records(self._rows, self._place, self.size_bytes() // len(self._rows))


def _records(rows: Any, place: str, size_bytes: int = 0) -> Iterator[Record]:
    number = 0
    for batch in rows.iter(batch_size=_BATCH_ROWS):
        columns = list(batch)
        for values in zip(*batch.values(), strict=True):
            fields = dict(zip(columns, values, strict=True))
            yield Record(fields, f"{place}, row {number}", size_bytes)
            number += 1


def _empty(config: HuggingFaceConfig) -> str:
    return f"the dataset {config.place()} is empty: found no row. Name a split that holds rows."


class HuggingFaceStreamingSource(StreamingDataSource):
    """A Hugging Face dataset that is read while training, without a copy on this machine."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceConfig):
        def probe(self) -> Iterator[Record | SampleError]:
            found = list(
                islice(_Cursor(_load(self, streaming=True), self.place(), 0), _PROBE_STREAM_ROWS)
            )
            if not found:
                raise ValueError(_empty(self))
            return iter(found)

    config: Config

    def __init__(self, config: Config, *, dataset_iteration_policy: DatasetIterationPolicy) -> None:
        self.config = config

    def describe(self) -> str:
        return self.config.describe()

    def open(self, state: dict[str, Any] | None) -> DocumentCursor:
        # A stream of its own: the library keeps the position in the stream object.
        rows = _load(self.config, streaming=True)
        number = 0
        if state is not None:
            rows.load_state_dict(state["stream"])
            number = state["number"]
        return _Cursor(rows, self.config.place(), number)


class _Cursor(DocumentCursor):
    """Rows of a stream, counted from its beginning."""

    def __init__(self, rows: Any, place: str, number: int) -> None:
        self._rows = rows
        self._place = place
        self._number = number
        self._iterator = iter(rows)

    def __next__(self) -> Record:
        location = f"{self._place}, row {self._number}"
        try:
            fields = next(self._iterator)
        except StopIteration:
            raise
        # Of the network, of the file system, of pyarrow; none of them names the data.
        except Exception as error:
            raise SampleError(
                f"{location}: cannot be read, nor the rows read together with it: {_reason(error)}. "
                "Correct the data or start again when its place can be reached."
            ) from error
        record = Record(dict(fields), location, 0)
        self._number += 1
        return record

    def state(self) -> dict[str, Any]:
        return {"number": self._number, "stream": self._rows.state_dict()}
