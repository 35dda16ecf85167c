"""Text files in, microbatches out; see ``types`` for the path between them."""

from torchtitan.components.data.collators import Collator, TextCollator
from torchtitan.components.data.dataset import DatasetConfig, SingleDatasetConfig
from torchtitan.components.data.loader import GrainDataLoader, packed_text
from torchtitan.components.data.packing import ConcatThenSplitPackingConfig
from torchtitan.components.data.processors import SampleProcessor, TextProcessor
from torchtitan.components.data.sources import (
    IndexedJsonlSource,
    LocalFilesSource,
    RandomAccessDataSource,
    SourceConfig,
)
from torchtitan.components.data.types import (
    BaseDataLoader,
    DataloaderExhaustedError,
    DatasetBuildContext,
    DatasetIterationPolicy,
    TextSequence,
    TrainerBatch,
)

__all__ = [
    "BaseDataLoader",
    "Collator",
    "ConcatThenSplitPackingConfig",
    "DataloaderExhaustedError",
    "DatasetBuildContext",
    "DatasetConfig",
    "DatasetIterationPolicy",
    "GrainDataLoader",
    "IndexedJsonlSource",
    "LocalFilesSource",
    "RandomAccessDataSource",
    "SampleProcessor",
    "SingleDatasetConfig",
    "SourceConfig",
    "TextCollator",
    "TextProcessor",
    "TextSequence",
    "TrainerBatch",
    "packed_text",
]
