"""Translate state dicts between our parameter names and those of Hugging Face checkpoints.

save: model.state_dict -> to_hf -> safetensors files, spread as fqn_to_index_mapping says
load: to_hf gives the names and shapes to read -> reader fills them -> from_hf -> load_state_dict
"""

import json
import os
import re
from abc import ABC, abstractmethod
from typing import Any

from torch.distributed.checkpoint import HuggingFaceStorageReader, StorageReader

from torchtitan.protocols.model import BaseModel
from torchtitan.tools.logging import logger

INDEX_FILE = "model.safetensors.index.json"


class BaseStateDictAdapter(ABC):
    """What a checkpointer asks of a translation; values may be plain tensors or DTensors."""

    fqn_to_index_mapping: dict[str, int] | None
    """Hugging Face key -> number of the file it belongs to; None when there is no index to follow."""

    hf_assets_path: str | None

    @abstractmethod
    def __init__(self, model_config: BaseModel.Config, hf_assets_path: str | None) -> None: ...

    @abstractmethod
    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Our names and layout -> theirs."""

    @abstractmethod
    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Their names and layout -> ours."""

    @abstractmethod
    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> StorageReader:
        """A reader of the safetensors files in the folder ``path``."""


class StateDictAdapter(BaseStateDictAdapter):
    """The parts that all models share: the file index, the default reader and the rope check."""

    def __init__(self, model_config: BaseModel.Config, hf_assets_path: str | None) -> None:
        self.model_config: Any = model_config
        self.hf_assets_path = hf_assets_path
        self.fqn_to_index_mapping = None if hf_assets_path is None else _read_index(hf_assets_path)

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> StorageReader:
        if from_quantized:
            logger.warning(
                f"{type(self).__name__} cannot dequantize: {path} is read as it is. "
                "If its tensors are quantized, convert them to plain weights first."
            )
        return HuggingFaceStorageReader(path)

    def _validate_hf_rope_config(self, cls: type) -> None:
        """Raise ``ValueError`` unless every layer's rope config is a ``cls``.

        The order of rows in the query and key weights depends on the kind of rotary embedding.
        """
        others = {
            type(layer.attention.rope).__qualname__
            for layer in self.model_config.layers
            if not isinstance(layer.attention.rope, cls)
        }
        if others:
            raise ValueError(
                f"{type(self).__name__} translates weights for {cls.__qualname__}, but the model has "
                f"{', '.join(sorted(others))}. Use that rope, or an adapter made for this one."
            )


def _read_index(hf_assets_path: str) -> dict[str, int] | None:
    path = os.path.join(hf_assets_path, INDEX_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            weight_map = json.load(file)["weight_map"]
    except FileNotFoundError:
        logger.warning(f"no {INDEX_FILE} in {hf_assets_path}: exported weights go into one file.")
        return None
    # "model-00003-of-00030.safetensors" -> 3
    numbers = {key: re.search(r"\d+", name) for key, name in weight_map.items()}
    return {key: int(found.group()) for key, found in numbers.items() if found}
