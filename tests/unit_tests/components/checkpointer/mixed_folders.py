"""Folders in memory that hold checkpoints of both back ends, and how a run of either sees them."""

from dataclasses import replace

from torchtitan.components.checkpointer.discovery import Finder, Kind, step_name
from torchtitan.components.checkpointer.formats import DCP, finder, Format, TORCH_CHECKPOINTING

from tests.unit_tests.components.checkpointer.fakes import MemoryStorage

OTHER = {DCP: TORCH_CHECKPOINTING, TORCH_CHECKPOINTING: DCP}


def put(storage: MemoryStorage, chosen: Format, folder: str, step: int, what: str) -> None:
    """Add what ``chosen`` leaves of a save that is full, holds weights, is damaged, or died."""
    path = f"{folder}/{step_name(step)}"
    if chosen is DCP:
        storage.add(f"{path}/__0_0.distcp", b"data")
        if what != "died":
            storage.add(f"{path}/.metadata", what.encode())
        return
    if what == "died":
        path = f"{folder}/tmp_{step_name(step)}"
    storage.add(f"{path}/metadata.pkl", b"" if what == "damaged" else b"plain")
    storage.add(f"{path}/model_0.pt", b"data")
    if what in ("full", "damaged"):
        storage.add(f"{path}/optimizer_0.pt", b"data")


def finder_of(chosen: Format, storage: MemoryStorage) -> Finder:
    """How a run of ``chosen`` finds checkpoints there; the index of DCP's is the word that was put."""
    kinds = {b"full": Kind.FULL, b"weights": Kind.MODEL_ONLY, b"damaged": Kind.UNREADABLE}

    def readable(each: Finder) -> Finder:
        if each.backend != DCP.backend:
            return each

        def kind_of(path: str) -> Kind:
            return kinds.get(storage.entries.get(f"{path}/.metadata") or b"", Kind.MODEL_ONLY)

        return replace(each, kind_by_index=kind_of)

    found = finder(chosen, storage, {"optimizer"})
    return replace(readable(found), others=tuple(readable(each) for each in found.others))
