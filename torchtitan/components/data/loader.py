"""Hand a rank its microbatches, and say and restore exactly where the data stands.

The loader is one position, that of the next microbatch; everything else follows from it. The one
fact to know: the position counts what was handed out on all ranks, not what was read ahead, so a
run that is resumed, also on other ranks or with other microbatches, goes on with the very next row.

    RowDataset or RowStream -> feed.py (share of a rank, reading ahead) -> __next__ -> trainer
    state_dict / load_state_dict <-> feed.py <-> position.py
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from torchtitan.components.data.array_cache import cache_root, write_problem
from torchtitan.components.data.collators import Collator, TextCollator
from torchtitan.components.data.dataset import DatasetConfig, SingleDatasetConfig
from torchtitan.components.data.engine import read_in_turn, ReadOptions
from torchtitan.components.data.feed import Feed, feed_of, FeedOptions, Opened
from torchtitan.components.data.order import Share
from torchtitan.components.data.packing import ConcatThenSplitPackingConfig
from torchtitan.components.data.processors import TextProcessor
from torchtitan.components.data.sources import LocalFilesSource
from torchtitan.components.data.types import (
    BaseDataLoader,
    DatasetBuildContext,
    DatasetIterationPolicy,
    TrainerBatch,
)
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config.violations import reject
from torchtitan.tools.logging import logger

_STREAM_BUFFER = 1000


def packed_text(files: Sequence[str], text_field: str = "text") -> DatasetConfig:
    """The text of local ``files`` (paths or globs, .jsonl or .txt) in rows of the full context."""
    return ConcatThenSplitPackingConfig(
        dataset=SingleDatasetConfig(
            source=LocalFilesSource.Config(patterns=list(files)),
            processor=TextProcessor.Config(text_field=text_field),
        )
    )


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

        streaming_shuffle_buffer_size: int = _STREAM_BUFFER
        """Documents of a stream that are shuffled among each other, and read again after a resume.
        Corpora are shuffled as a whole."""

        allow_changed_degree: bool = False
        """Go on in a stream with another number of data-parallel ranks than the checkpoint's. Corpora
        need no permission; a stream may have changed unnoticed."""

        num_workers: int = 0
        """Processes of each rank, and of each stream of a mix, that make rows; 0 makes them in the
        rank itself, which is enough for corpora."""

        read_options: Annotated[ReadOptions, tyro.conf.Suppress] = field(
            default_factory=read_in_turn
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
            for name in ("num_workers", "streaming_shuffle_buffer_size"):
                least = 0 if name == "num_workers" else 1
                if (value := getattr(self, name)) < least:
                    reject(f"dataloader.{name} is {value}, but must be at least {least}. Raise it.")
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

        def check(
            self,
            *,
            max_context_length: int,
            num_tokens_per_batch: int,
            tokenizer: BaseTokenizer | None = None,
        ) -> list[str]:
            """What would keep the loader from running, one message each.

            Reads the data files (whole up to 256 MiB, the ends of larger ones), writes nothing.
            Hugging Face datasets are loaded, which downloads them into the cache of their library.
            """
            problems = []
            if uneven := _uneven_batch(num_tokens_per_batch, max_context_length):
                problems.append(uneven)
            try:
                dataset = self.chosen_dataset()
                problems += [] if dataset.is_streamed() else self._idle_stream_settings()
                problems += dataset.check(tokenizer)
            except ValueError as error:
                problems.append(str(error))
            if unwritable := write_problem(cache_root(self.cache_dir)):
                problems.append(unwritable)
            return problems

        def _idle_stream_settings(self) -> list[str]:
            changed = {
                "streaming-shuffle-buffer-size": self.streaming_shuffle_buffer_size
                != _STREAM_BUFFER,
                "allow-changed-degree": self.allow_changed_degree,
            }
            return [
                f"--dataloader.{flag} has no effect, because none of the data is a stream; leave it out."
                for flag, is_changed in changed.items()
                if is_changed
            ]

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
            read_options=config.read_options,
            cache_dir=config.cache_dir,
        )
        policy = DatasetIterationPolicy(
            seed=config.seed,
            shuffle=config.shuffle,
            repeat=config.repeat,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            streaming_shuffle_buffer_size=config.streaming_shuffle_buffer_size,
            num_workers=config.num_workers,
        )
        options = FeedOptions(
            repeat=config.repeat,
            num_workers=config.num_workers,
            num_prefetch_batches=config.num_prefetch_batches,
            allow_changed_degree=config.allow_changed_degree,
        )
        rows = config.chosen_dataset().build(context=context, dataset_iteration_policy=policy)
        rows_per_batch = config.collator.build(context=context).num_rows_per_batch()
        share = Share(rows_per_batch, dp_rank, dp_world_size)
        self._feed: Feed[Any] = feed_of(rows, share, config.collator, context, options)
        self._position = self._feed.start()
        self._opened: Opened | None = None
        self._ended = self._closed = False
        self._speaks = dp_rank == 0
        if self._speaks:
            logger.info(f"data: {rows.summary()}")

    def __iter__(self) -> Iterator[TrainerBatch]:
        return self

    def __next__(self) -> TrainerBatch:
        if self._closed:
            raise RuntimeError("the data loader is closed. Build a new one to go on.")
        if self._ended:
            raise StopIteration
        if self._opened is None:
            self._opened = self._feed.open(self._position)
        try:
            batch, self._position = next(self._opened)
        except StopIteration:
            self._end()
            raise
        except Exception:
            # Its thread may have gone past the failure; a second try has to meet the same row.
            self._stop_reading()
            raise
        return batch

    def _end(self) -> None:
        self._stop_reading()
        self._ended = True
        if self._speaks:
            logger.info(f"data: {self._feed.end_of(self._position)}")

    def _stop_reading(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def state_dict(self) -> dict[str, Any]:
        """Where the data stands after the microbatches handed out; the same on all ranks."""
        return self._feed.encode(self._position)

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Go to a saved position without reading what lies before it.

        An empty state or None is the beginning. Raises ValueError where the state is of other
        data, naming what changed, and for a stream also where the number of data-parallel ranks
        changed unasked; the loader then stays where it was.
        """
        position = self._feed.decode(state_dict)
        self._stop_reading()
        self._position = position
        self._ended = False

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
