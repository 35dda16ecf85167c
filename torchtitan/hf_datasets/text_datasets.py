"""Text datasets by name, ready to be packed in a recipe.

The one fact to know: a name stands for documents, not for rows, and nothing is loaded before a
recipe that uses it is checked. Paths are relative to the repository.

    DATASETS["c4_test"] -> ConcatThenSplitPackingConfig(dataset=...) -> GrainDataLoader.Config
"""

from torchtitan.components.data import (
    ChatProcessor,
    HuggingFaceRandomAccessSource,
    HuggingFaceStreamingSource,
    SingleDatasetConfig,
    TextProcessor,
)

__all__ = ["ChatProcessor", "DATASETS", "TextProcessor"]

_C4 = "allenai/c4"

DATASETS: dict[str, SingleDatasetConfig] = {
    "c4": SingleDatasetConfig(
        source=HuggingFaceStreamingSource.Config(path=_C4, name="en", split="train"),
        processor=TextProcessor.Config(),
    ),
    "c4_test": SingleDatasetConfig(
        source=HuggingFaceRandomAccessSource.Config(
            path="json",
            split="train",
            load_dataset_kwargs={"data_files": "tests/assets/c4_test/data.json"},
        ),
        processor=TextProcessor.Config(),
    ),
    "c4_validation": SingleDatasetConfig(
        source=HuggingFaceStreamingSource.Config(path=_C4, name="en", split="validation"),
        processor=TextProcessor.Config(),
    ),
}
"""``c4`` and ``c4_validation`` are read from the hub as streams, ``c4_test`` is a part of the
Jargon File that comes with the repository."""
