"""Reading metadata.pkl: plain values or an error, and never a call."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, HealthCheck, settings, strategies as st
from torch_checkpointing.checkpoint_layout import default_torch_layout_info
from torch_checkpointing.default_metadata import DefaultShardingMetadata
from torch_checkpointing.distributed_metadata import (
    DistributedItemMetadata,
    DistributedMetadata,
    GlobalObjectMetadata,
)
from torchtitan.components.checkpointer.errors import CheckpointDamagedError
from torchtitan.components.checkpointer.tc.metadata_file import parse_metadata, read_metadata


def real() -> dict[str, Any]:
    """What the library has to tell of a checkpoint of one tensor that two ranks share."""
    tensor = DefaultShardingMetadata(
        global_shape=(4,),
        global_offsets=((0,),),
        local_offsets=((0,),),
        local_sizes=((2,),),
        dtype="torch.float32",
    )
    item = DistributedItemMetadata(
        nested_path_to_metadata={("weight",): [GlobalObjectMetadata(tensor, (0, 1))]},
        rank_to_layout_info={rank: default_torch_layout_info("model", rank) for rank in (0, 1)},
    )
    return DistributedMetadata(metadata={"model": item}, world_size=2).to_dict()


def test_what_the_library_writes_is_plain_and_comes_back_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(real()))
    found = read_metadata(str(tmp_path))
    assert found == real()
    assert DistributedMetadata.from_dict(found).to_dict() == real()


class Harmful:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_pickle_that_would_call_something_is_refused_and_calls_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    content = pickle.dumps({"metadata": {}, "version": Harmful(str(trace))})
    with pytest.raises(CheckpointDamagedError, match="asks for posix.mkdir, .* holds no code"):
        parse_metadata("/run/step-1", content)
    assert not trace.exists()
    pickle.loads(content)
    assert trace.exists()


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_name_of_a_class_among_the_values_is_refused_and_imports_nothing(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace"
    (tmp_path / f"armed_{version[0]}.py").write_text(
        f"import os\nos.mkdir({str(trace)!r})\nclass Found: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cls = f"armed_{version[0]}.Found"
    layout = {
        "file_path": "model_0.json",
        "serialization_format": {"type": "JsonSerialization", "cls": cls},
    }
    of_ranks = {"rank_to_layout_info": {0: layout}, "nested_path_to_metadata": {}}
    armed: dict[str, Any] = {"version": version, "world_size": 1, "metadata": {"model": of_ranks}}
    if version == "1.0":
        armed |= {"metadata": {}, "rank_to_layout_info_mappings": {0: {"model": layout}}}
    said = f"it asks for {cls}, and the index of a checkpoint holds no code"
    with pytest.raises(CheckpointDamagedError, match=said):
        parse_metadata("/run/step-1", pickle.dumps(armed))
    assert not trace.exists()
    # The library does import it, in the middle of a load.
    DistributedMetadata.from_dict(armed)
    assert trace.exists()


@pytest.mark.parametrize("content", [b"", b"junk", b"cno_such_module\nName\n.", b"0.", b"h\x07."])
def test_damage_is_named_with_the_file_and_what_to_do(content: bytes) -> None:
    with pytest.raises(CheckpointDamagedError) as caught:
        parse_metadata("/run/step-1", content)
    text = str(caught.value)
    assert text.startswith("The index /run/step-1/metadata.pkl cannot be read: ")
    assert text.endswith(
        "The path must be one checkpoint, a step-N directory; if it is damaged, move it away."
    )


@pytest.mark.parametrize("value", [1, [], {}, {"metadata": 3}, {"model": {}}])
def test_plain_values_that_are_no_metadata_are_refused(value: Any) -> None:
    with pytest.raises(
        CheckpointDamagedError, match="not one that torch_checkpointing writes; if it"
    ):
        parse_metadata("/run/step-1", pickle.dumps(value))


@given(data=st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damaged_bytes_are_never_another_error(data: st.DataObject) -> None:
    intact = pickle.dumps(real())
    damaged = bytearray(intact[: data.draw(st.integers(0, len(intact)))])
    for _ in range(data.draw(st.integers(0, 3)) if damaged else 0):
        # Memo and size bytes may ask for gigabytes; that is a MemoryError, caught as well.
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        assert isinstance(parse_metadata("/run/step-1", bytes(damaged)), dict)
    except CheckpointDamagedError:
        pass


def test_a_path_without_the_file_is_told_what_it_must_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "gone", tmp_path / "file"):
        with pytest.raises(CheckpointDamagedError, match=f"no index {path}/metadata.pkl.*step-N"):
            read_metadata(str(path))


def test_a_disk_that_does_not_answer_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "metadata.pkl").mkdir()
    with pytest.raises(IsADirectoryError):
        read_metadata(str(tmp_path))
