"""Programs planted in a checkpoint: pickles that make a directory when they are loaded.

PLANTS -> plant(step, trace) -> (the file, what it takes to run the program)
"""

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torchtitan.components.checkpointer.integrity.digests import digest_of
from torchtitan.components.checkpointer.integrity.manifest import MANIFEST, parse, render

Plant = Callable[[Path, Path], tuple[str, Callable[[], Any]]]


class Harmful:
    """Makes the directory ``trace`` when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = str(trace)

    def __reduce__(self) -> Any:
        return os.makedirs, (self.trace, 0o777, True)


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def run_saved(content: bytes) -> Callable[[], Any]:
    """Loads what ``torch.save`` wrote as one may not."""
    return lambda: torch.load(io.BytesIO(content), weights_only=False)


def in_index_of_dcp(step: Path, trace: Path) -> tuple[str, Callable[[], Any]]:
    file = step / ".metadata"
    index = pickle.loads(file.read_bytes())
    index.planner_data["more"] = Harmful(trace)
    file.write_bytes(pickle.dumps(index))
    return file.name, lambda: pickle.loads(file.read_bytes())


def in_entry(fqn: str, make: Callable[[Harmful], bytes]) -> Plant:
    """In the place of the last piece of entry ``fqn`` of DCP."""

    def plant(step: Path, trace: Path) -> tuple[str, Callable[[], Any]]:
        file = step / ".metadata"
        index = pickle.loads(file.read_bytes())
        [*_, key] = [key for key in index.storage_data if key.fqn == fqn]
        name, content = index.storage_data[key].relative_path, make(Harmful(trace))
        before = (step / name).read_bytes()
        (step / name).write_bytes(before + content)
        index.storage_data[key] = _StorageInfo(name, len(before), len(content))
        file.write_bytes(pickle.dumps(index))
        is_archive = content.startswith(b"PK")
        return name, run_saved(content) if is_archive else lambda: pickle.loads(content)

    return plant


def in_index_of_tc(step: Path, trace: Path) -> tuple[str, Callable[[], Any]]:
    file = step / "metadata.pkl"
    index = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps({**index, "more": Harmful(trace)}))
    return file.name, lambda: pickle.loads(file.read_bytes())


def in_file_of_tc(name: str) -> Plant:
    """In a file of torch_checkpointing, beside what it holds."""

    def plant(step: Path, trace: Path) -> tuple[str, Callable[[], Any]]:
        file = step / name
        tree = torch.load(file, weights_only=False)
        tree[next(iter(tree))] = [tree[next(iter(tree))], Harmful(trace)]
        file.write_bytes(saved({**tree, "more": Harmful(trace)}))
        return name, run_saved(file.read_bytes())

    return plant


def bare_pickle(name: str) -> Plant:
    """Instead of a whole file, in no archive."""

    def plant(step: Path, trace: Path) -> tuple[str, Callable[[], Any]]:
        content = pickle.dumps(Harmful(trace), protocol=2)  # the one that torch reads
        (step / name).write_bytes(content)
        return name, lambda: pickle.loads(content)

    return plant


def _value(harmful: Harmful) -> bytes:
    return saved({"row": 3, "more": [harmful]})


def _tensor(harmful: Harmful) -> bytes:
    return saved([torch.ones(2, 2), harmful])


def _bare(harmful: Harmful) -> bytes:
    return pickle.dumps(harmful, protocol=2)


_DCP = {
    "index": in_index_of_dcp,
    "value": in_entry("dataloader.inner.row", _value),
    "step": in_entry("train_state.inner.step", _value),
    "value of the optimizer": in_entry("optimizer.param_groups.weight.lr", _value),
    "tensor": in_entry("weight", _tensor),
    "tensor of the optimizer": in_entry("optimizer.state.weight.exp_avg", _tensor),
    "bare pickle as a value": in_entry("dataloader.inner.row", _bare),
    "bare pickle as a tensor": in_entry("weight", _bare),
    "bare pickle": bare_pickle(".metadata"),
    "manifest": bare_pickle(MANIFEST),
}
_DCP_OF_RANK_1 = {
    "value": in_entry("rank_state.rank_1.python", _value),
    "tensor": in_entry("weight", _tensor),
}
_TC = {
    "index": in_index_of_tc,
    **{
        key: in_file_of_tc(f"{key}_0.pt")
        for key in ("model", "optimizer", "dataloader", "train_state", "lr_scheduler", "rank_state")
    },
    "bare pickle as the index": bare_pickle("metadata.pkl"),
    "bare pickle": bare_pickle("model_0.pt"),
    "bare pickle of values": bare_pickle("dataloader_0.pt"),
    "manifest": bare_pickle(MANIFEST),
}
_TC_OF_RANK_1 = {key: in_file_of_tc(f"{key}_1.pt") for key in ("model", "optimizer", "rank_state")}
PLANTS: dict[str, dict[str, Plant]] = {
    "dcp": _DCP,
    "dcp of rank 1": _DCP_OF_RANK_1,
    "tc": _TC,
    "tc of rank 1": _TC_OF_RANK_1,
}
"""By back end, and by place."""


def sign(step: Path) -> None:
    """Make the manifest fit the files as they are now, which needs no secret."""
    before = parse((step / MANIFEST).read_bytes(), str(step / MANIFEST))
    files = {name: digest_of((step / name).read_bytes()) for name in before.files}
    (step / MANIFEST).write_bytes(render(replace(before, files=files)))
