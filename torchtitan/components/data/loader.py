"""Hand a rank its microbatches, and say and restore exactly where the data stands.

The loader is one number, the global position of the next microbatch; everything else follows from
it. The one fact to know: the position counts what was handed out on all ranks, not what was read
ahead, so a run that is resumed, also on other ranks or with other microbatches, goes on with the
very next row.

    RowDataset + Share -> engine (read ahead) -> __next__ -> trainer
    state_dict / load_state_dict <-> position.py
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from sys import maxsize
from typing import Annotated, Any

import tyro

from torchtitan.components.data.collators import Collator, TextCollator
from torchtitan.components.data.dataset import DatasetConfig, SingleDatasetConfig
from torchtitan.components.data.engine import read_ahead, ReadAhead, ReadOptions
from torchtitan.components.data.order import Share
from torchtitan.components.data.packing import ConcatThenSplitPackingConfig
from torchtitan.components.data.position import decode_position, encode_position
from torchtitan.components.data.processors import TextProcessor
from torchtitan.components.data.sources import LocalFilesSource
from torchtitan.components.data.token_cache import cache_root, write_problem
from torchtitan.components.data.types import (
    BaseDataLoader,
    DatasetBuildContext,
    DatasetIterationPolicy,
    RowDataset,
    TextSequence,
    TrainerBatch,
)
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.violations import reject
from torchtitan.tools.logging import logger


def packed_text(files: Sequence[str], text_field: str = "text") -> DatasetConfig:
    """The text of local ``files`` (paths or globs, .jsonl or .txt) in rows of the full context."""
    return ConcatThenSplitPackingConfig(
        dataset=SingleDatasetConfig(
            source=LocalFilesSource.Config(patterns=list(files)),
            processor=TextProcessor.Config(text_field=text_field),
        )
    )


@dataclass(frozen=True, slots=True)
class _RankRows:
    """The rows of one rank by number, counted from a global position."""

    rows: RowDataset
    share: Share
    start: int
    num_microbatches: int

    def __len__(self) -> int:
        return min(self.num_microbatches * self.share.rows_per_microbatch, maxsize)

    def __getitem__(self, index: int) -> TextSequence:
        return self.rows.row_at(self.share.position_of(self.start, index))


class GrainDataLoader(BaseDataLoader):
    """Microbatches of globally ordered rows; iterate over it once, it is its own iterator."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        dataset: Annotated[DatasetConfig | None, tyro.conf.Suppress] = None
        """The data of the recipe; None needs ``files``."""

        files: list[str] = field(default_factory=list)
        """Your own text in place of the recipe's data: paths or globs, comma separated, seen from the
        current directory. .jsonl files hold one JSON object a line, a .txt file is one document.
        Empty keeps the recipe's data."""

        text_field: str = "text"
        """Field of the objects in the .jsonl ``files`` that holds the text."""

        collator: Annotated[Collator.Config, tyro.conf.Suppress] = field(
            default_factory=TextCollator.Config
        )
        """What makes a microbatch of rows."""

        seed: int = 42
        """Decides the order of the rows, at least 0. A run that is resumed needs the same one."""

        shuffle: bool = True
        """Take the rows of each epoch in a new random order; off takes them as they lie in the files."""

        repeat: bool = True
        """Start the next epoch when the rows are used up; off ends the training there."""

        read_options: Annotated[ReadOptions, tyro.conf.Suppress] = field(
            # Rows come from mapped memory in microseconds; more threads only fight over the GIL.
            default_factory=lambda: ReadOptions(num_threads=0, prefetch_buffer_size=0)
        )
        """How rows are read; threads help only where reading a row waits for something."""

        num_prefetch_batches: int = 2
        """Microbatches made ahead on a thread; 0 makes each when it is asked for."""

        cache_dir: str = ""
        """Folder for the tokens of the data, kept over runs. Empty takes $TORCHTITAN_CACHE_DIR, else
        $XDG_CACHE_HOME/torchtitan, else ~/.cache/torchtitan."""

        def __post_init__(self) -> None:
            if not 0 <= self.seed < 2**32:
                reject(
                    f"dataloader.seed is {self.seed}, but must lie between 0 and {2**32 - 1}. "
                    "Choose another one."
                )
            if self.text_field != "text" and not self.files:
                reject(
                    f"dataloader.text_field is {self.text_field!r} but dataloader.files is empty: "
                    "the recipe's data has a field of its own. Give --dataloader.files too."
                )
            if self.num_prefetch_batches < 0:
                reject(
                    f"dataloader.num_prefetch_batches is {self.num_prefetch_batches}, but must be "
                    "at least 0. Set 0 to read nothing ahead."
                )

        def chosen_dataset(self) -> DatasetConfig:
            """``files`` where given, else the recipe's data. Raises ValueError without either."""
            if self.files:
                return packed_text(self.files, self.text_field)
            if self.dataset is None:
                raise ValueError(
                    "no training data: the recipe names none and dataloader.files is empty. Give "
                    "--dataloader.files with the paths of your text."
                )
            return self.dataset

        def check(self, *, max_context_length: int, num_tokens_per_batch: int) -> list[str]:
            """What would keep the loader from running, one message each.

            Reads the data files (whole up to 256 MiB, the ends of larger ones), writes nothing.
            """
            problems = []
            if uneven := _uneven_batch(num_tokens_per_batch, max_context_length):
                problems.append(uneven)
            try:
                problems += self.chosen_dataset().check()
            except ValueError as error:
                problems.append(str(error))
            if unwritable := write_problem(cache_root(self.cache_dir)):
                problems.append(unwritable)
            return problems

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        max_context_length: int,
        num_tokens_per_batch: int,
    ) -> None:
        """Raises ValueError and OSError for data that cannot be read or makes no batch."""
        if uneven := _uneven_batch(num_tokens_per_batch, max_context_length):
            raise ValueError(uneven)
        self.config = config
        context = DatasetBuildContext(
            tokenizer=tokenizer,
            max_context_length=max_context_length,
            num_tokens_per_batch=num_tokens_per_batch,
            cache_dir=config.cache_dir,
        )
        policy = DatasetIterationPolicy(
            seed=config.seed,
            shuffle=config.shuffle,
            repeat=config.repeat,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
        )
        rows = config.chosen_dataset().build(context=context, dataset_iteration_policy=policy)
        if not isinstance(rows, RowDataset):
            raise ValueError(
                f"dataloader.dataset makes {type(rows).__name__}, not rows of one length. Wrap it "
                "in ConcatThenSplitPackingConfig."
            )
        self._rows = rows
        self._collate: Collator = config.collator.build(context=context)
        self._share = Share(self._collate.num_rows_per_batch(), dp_rank, dp_world_size)
        self._position = 0
        self._read_ahead: ReadAhead[TrainerBatch] | None = None
        self._closed = False
        if not config.repeat and len(rows) < self._share.global_rows:
            raise ValueError(
                f"without repeat the data makes no batch: found {len(rows)} rows, one batch over "
                f"{dp_world_size} ranks takes {self._share.global_rows}. Lower the batch size or "
                "drop --dataloader.no-repeat."
            )
        if dp_rank == 0:
            logger.info(f"data: {rows.summary()}")

    def __iter__(self) -> Iterator[TrainerBatch]:
        return self

    def __next__(self) -> TrainerBatch:
        if self._closed:
            raise RuntimeError("the data loader is closed. Build a new one to go on.")
        if self._microbatches_left() == 0:
            self._log_end()
            raise StopIteration
        if self._read_ahead is None:
            self._read_ahead = self._open()
        try:
            batch = next(self._read_ahead)
        except Exception:
            # Its thread may have gone past the failure; a second try has to meet the same row.
            self._stop_reading()
            raise
        self._position += self._share.global_rows
        return batch

    def _microbatches_left(self) -> int:
        if self.config.repeat:
            return maxsize
        return max(0, len(self._rows) - self._position) // self._share.global_rows

    def _log_end(self) -> None:
        self._stop_reading()
        if self._share.dp_rank == 0:
            left = max(0, len(self._rows) - self._position)
            logger.info(
                f"data: repeat is off and the {len(self._rows):,} rows are used up; {left} rows "
                f"that fill no batch of {self._share.global_rows} are left out"
            )

    def _open(self) -> ReadAhead[TrainerBatch]:
        share = self._share
        mine = _RankRows(self._rows, share, self._position, self._microbatches_left())
        return read_ahead(
            mine,
            self._collate,
            rows_per_batch=share.rows_per_microbatch,
            num_batches=self.config.num_prefetch_batches,
            read_options=self.config.read_options,
        )

    def _stop_reading(self) -> None:
        if self._read_ahead is not None:
            self._read_ahead.close()
            self._read_ahead = None

    def state_dict(self) -> dict[str, Any]:
        """Where the data stands after the microbatches handed out; the same on all ranks."""
        return encode_position(self._position, len(self._rows), self._rows.fingerprint)

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Go to a saved position without reading what lies before it.

        An empty state or None is the beginning. Raises ValueError where the state is of other
        data, naming what changed; the loader then stays where it was.
        """
        position = decode_position(state_dict, len(self._rows), self._rows.fingerprint)
        self._stop_reading()
        self._position = position

    def close(self) -> None:
        self._closed = True
        self._stop_reading()


def _uneven_batch(num_tokens_per_batch: int, max_context_length: int) -> str | None:
    if num_tokens_per_batch > 0 and num_tokens_per_batch % max_context_length == 0:
        return None
    return (
        f"a microbatch of {num_tokens_per_batch} tokens cannot be made of rows of "
        f"{max_context_length} tokens (training.max_context_length). Make it a multiple of the row."
    )
