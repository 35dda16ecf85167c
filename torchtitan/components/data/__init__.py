"""Text in, microbatches out; see ``types`` for the path between them."""

from torchtitan.components.data.chat import ChatProcessor
from torchtitan.components.data.collators import Collator, TextCollator
from torchtitan.components.data.dataset import DatasetConfig, SingleDatasetConfig
from torchtitan.components.data.huggingface import (
    HuggingFaceRandomAccessSource,
    HuggingFaceStreamingSource,
)
from torchtitan.components.data.loader import GrainDataLoader, packed_text
from torchtitan.components.data.mix import DatasetConcatConfig, DatasetMixConfig, WeightedDataset
from torchtitan.components.data.packing import ConcatThenSplitPackingConfig, FirstFitPackingConfig
from torchtitan.components.data.processors import SampleProcessor, TextProcessor
from torchtitan.components.data.sources import (
    IndexedJsonlSource,
    LocalFilesSource,
    RandomAccessDataSource,
    SourceConfig,
    StreamingDataSource,
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
    "ChatProcessor",
    "Collator",
    "ConcatThenSplitPackingConfig",
    "DataloaderExhaustedError",
    "DatasetBuildContext",
    "DatasetConcatConfig",
    "DatasetConfig",
    "DatasetIterationPolicy",
    "DatasetMixConfig",
    "FirstFitPackingConfig",
    "GrainDataLoader",
    "HuggingFaceRandomAccessSource",
    "HuggingFaceStreamingSource",
    "IndexedJsonlSource",
    "LocalFilesSource",
    "RandomAccessDataSource",
    "SampleProcessor",
    "SingleDatasetConfig",
    "SourceConfig",
    "StreamingDataSource",
    "TextCollator",
    "TextProcessor",
    "TextSequence",
    "TrainerBatch",
    "WeightedDataset",
    "packed_text",
]
