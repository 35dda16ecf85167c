"""A damaged checkpoint of DCP is found while it is read, before an object of the run has changed."""

import errno
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torchtitan.components.checkpointer import dcp_index, dcp_reader, MODEL
from torchtitan.components.checkpointer.dcp_reader import (
    PlainLoadPlanner,
    reading_through,
    VerifyingReader,
)
from torchtitan.components.checkpointer.dcp_writer import DurableFileSystemWriter
from torchtitan.components.checkpointer.errors import CheckpointDamagedError, CheckpointReadError
from torchtitan.components.checkpointer.integrity.digests import BLOCK_BYTES
from torchtitan.components.checkpointer.integrity.manifest import head_of
from torchtitan.components.checkpointer.integrity.verification import Verification, Verify
from torchtitan.components.checkpointer.storage import FilesystemStorage

from tests.unit_tests.components.checkpointer.runs import build_run, objects_of
from tests.unit_tests.components.checkpointer.test_screening import full_host

DATA, INDEX, MANIFEST = "__0_0.distcp", ".metadata", "manifest.json"


def saved(folder: Path) -> Path:
    """The only checkpoint of a run."""
    run = build_run(folder)
    run.train(1)
    run.manager.close()
    return folder / "checkpoint/step-1"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def error_of_load(folder: Path, **settings: Any) -> CheckpointReadError:
    """What loading step 1 fails with; no object may have changed."""
    run = build_run(folder, seed=3, **settings)
    before = objects_of(run)
    with (
        patch.object(run.manager.states[MODEL], "load_state_dict") as model,
        pytest.raises(CheckpointReadError) as failed,
    ):
        run.manager.load(1)
    model.assert_not_called()
    assert objects_of(run) == before
    run.manager.close()
    return failed.value


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "extended": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "flipped at its start": lambda path: flip(path, 0),
    "flipped in its middle": lambda path: flip(path, path.stat().st_size // 2),
    "flipped at its end": lambda path: flip(path, -1),
    "empty": lambda path: path.write_bytes(b""),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_the_data_is_named_and_changes_nothing(tmp_path: Path, damage: str) -> None:
    step = saved(tmp_path)
    DAMAGES[damage](step / DATA)
    error = error_of_load(tmp_path)
    assert isinstance(error, CheckpointDamagedError) and DATA in str(error)
    assert str(step) in str(error)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("damage", ["truncated", "extended", "flipped in its middle"])
@pytest.mark.parametrize("name", [INDEX, MANIFEST])
def test_damage_of_what_describes_it_is_found_too(tmp_path: Path, name: str, damage: str) -> None:
    step = saved(tmp_path)
    DAMAGES[damage](step / name)
    error = error_of_load(tmp_path)
    assert isinstance(error, CheckpointDamagedError)
    assert str(step) in str(error) and name in str(error)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "a directory"])
def test_without_digests_it_is_damage_however_it_shows(
    tmp_path: Path, verify: str, damage: str
) -> None:
    step = saved(tmp_path)
    if verify == "full":
        (step / MANIFEST).unlink()
    DAMAGES[damage](step / DATA)
    error = error_of_load(tmp_path, verify=verify)
    assert isinstance(error, CheckpointDamagedError) and str(step / DATA) in str(error)


BROKEN = [errno.EIO, errno.ESTALE, errno.EACCES]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("number", BROKEN)
def test_a_disk_that_fails_in_the_data_is_no_damage(tmp_path: Path, number: int) -> None:
    class Failing(io.FileIO):
        def readinto(self, buffer: Any) -> Any:
            raise OSError(number, "the disk fails")

    real, step = Path.open, saved(tmp_path)

    def open_path(path: Path, *args: Any, **kwargs: Any) -> Any:
        return Failing(path) if path.name == DATA else real(path, *args, **kwargs)

    with patch.object(Path, "open", open_path):
        error = error_of_load(tmp_path)
    assert not isinstance(error, CheckpointDamagedError)
    assert "the disk fails" in str(error) and str(step / DATA) in str(error)


@pytest.mark.parametrize("number", BROKEN)
def test_a_disk_that_fails_in_the_index_is_no_damage(tmp_path: Path, number: int) -> None:
    path = save_alone(tmp_path / "step-1", {"w": torch.ones(3)})
    verification = verification_of(path)
    failing = patch.object(
        dcp_index, "open", side_effect=OSError(number, "the disk fails"), create=True
    )
    with failing, pytest.raises(CheckpointReadError, match="the disk fails") as failed:
        dcp_index.read_outline(str(path), verification=verification)
    assert not isinstance(failed.value, CheckpointDamagedError)
    reading = reading_through(verification)
    with failing, pytest.raises(torch_dcp.CheckpointException) as told:
        torch_dcp.load({"w": torch.zeros(3)}, checkpoint_id=str(path), no_dist=True, **reading)
    error = dcp_reader.read_error(str(path), told.value)
    assert not isinstance(error, CheckpointDamagedError) and "the disk fails" in str(error)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize(
    "shortage", [torch.OutOfMemoryError("full"), MemoryError("full"), full_host()], ids=repr
)
def test_a_shortage_of_memory_is_no_damage(
    tmp_path: Path, shortage: Exception, verify: str
) -> None:
    step = saved(tmp_path)
    with patch.object(PlainLoadPlanner, "resolve_tensor", side_effect=shortage):
        error = error_of_load(tmp_path, verify=verify)
    assert not isinstance(error, CheckpointDamagedError)
    assert str(shortage) in str(error) and str(step / DATA) in str(error)


@pytest.mark.usefixtures("one_rank")
def test_an_equal_size_is_enough_where_only_that_is_asked_for(tmp_path: Path) -> None:
    step = saved(tmp_path)
    # In the record of a tensor; its neighbours would not be an archive any more.
    at = (step / DATA).read_bytes().index(torch.ones(1).numpy().tobytes())
    flip(step / DATA, at)
    for verify in ("size", "off"):
        run = build_run(tmp_path, seed=3, verify=verify)
        assert run.manager.load(1)
        run.manager.close()
    assert isinstance(error_of_load(tmp_path), CheckpointDamagedError)


def save_alone(path: Path, state: dict[str, Any]) -> Path:
    writer = DurableFileSystemWriter(str(path), head=head_of(1, "full", "dcp", 1, None))
    torch_dcp.save(state, storage_writer=writer, checkpoint_id=str(path), no_dist=True)
    return path


def verification_of(path: Path) -> Verification:
    return Verification.begin(FilesystemStorage(), str(path), Verify.FULL)


def test_every_byte_is_checked_and_none_twice(tmp_path: Path) -> None:
    # Small entries before and behind large ones, which are asked for in another order.
    state = {f"{i:02}": torch.rand(BLOCK_BYTES // 6 if i % 2 else 3) for i in range(24)}
    path = save_alone(tmp_path / "step-1", state)
    verification = verification_of(path)
    reader = VerifyingReader(verification)
    wanted = {name: torch.zeros_like(value) for name, value in state.items()}

    class InAnotherOrder(PlainLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            plan.items.sort(key=lambda item: item.dest_index.fqn[::-1])
            return plan

    torch_dcp.load(wanted, storage_reader=reader, planner=InAnotherOrder(reader), no_dist=True)
    assert all(torch.equal(wanted[name], value) for name, value in state.items())
    assert verification.manifest is not None
    files = verification.manifest.files.values()
    assert verification.checked_bytes == sum(digest.size_bytes for digest in files)


ENTRIES = {"a": torch.full((9,), 7.0), "n": {"b": torch.full((9,), 8.0)}, "value": 123454321}


@pytest.mark.parametrize("verify", Verify)
@pytest.mark.parametrize("entry", ["a", "n.b", "value"])
def test_damage_names_the_entry_that_was_read(tmp_path: Path, entry: str, verify: Verify) -> None:
    path = save_alone(tmp_path / "step-1", ENTRIES)
    verification = verification_of(path)
    reading = reading_through(Verification(str(path), verification.manifest, verify))
    stored = dcp_index.read_index(str(path)).storage_data
    assert stored is not None
    [place] = [info for key, info in stored.items() if key.fqn == entry]
    for at in range(place.offset, place.offset + place.length):
        flip(path / DATA, at)
    # All files of this size are one block, which the first entry would be read with.
    wanted = {
        "a": {"a": torch.zeros(9)},
        "n.b": {"n": {"b": torch.zeros(9)}},
        "value": {"value": 0},
    }
    with pytest.raises(torch_dcp.CheckpointException) as told:
        torch_dcp.load(wanted[entry], checkpoint_id=str(path), no_dist=True, **reading)
    error = dcp_reader.read_error(str(path), told.value)
    assert isinstance(error, CheckpointDamagedError)
    assert f"the entry {entry} " in str(error).lower() and str(path / DATA) in str(error)
    assert str(error).lower().count("the entry") == 1
    if verify is Verify.FULL:
        assert "bytes 0.." in str(error) and "expected xxh3" in str(error)


def test_a_file_that_is_gone_is_blamed_on_no_entry(tmp_path: Path) -> None:
    path = save_alone(tmp_path / "step-1", ENTRIES)
    reading = reading_through(verification_of(path))
    (path / DATA).unlink()
    with pytest.raises(torch_dcp.CheckpointException, match="it is missing") as told:
        torch_dcp.load({"a": torch.zeros(9)}, checkpoint_id=str(path), no_dist=True, **reading)
    assert "entry" not in str(dcp_reader.read_error(str(path), told.value))


def test_the_error_of_an_index_keeps_its_class_on_the_way_through_dcp(tmp_path: Path) -> None:
    path = save_alone(tmp_path / "step-1", {"w": torch.ones(3)})
    reading = reading_through(verification_of(path))
    flip(path / INDEX, 100)
    with pytest.raises(torch_dcp.CheckpointException) as failed:
        torch_dcp.load({"w": torch.zeros(3)}, checkpoint_id=str(path), no_dist=True, **reading)
    error = dcp_reader.read_error(str(path), failed.value)
    assert isinstance(error, CheckpointDamagedError) and f"{path}/{INDEX}" in str(error)


def test_damage_on_one_rank_outweighs_a_failing_disk_on_another() -> None:
    damage = CheckpointDamagedError("step-1/__2_0.distcp is damaged")
    failures: Any = {0: (OSError(5, "broken"), None), 2: (damage, None), 3: (damage, None)}
    error = dcp_reader.read_error("step-1", torch_dcp.CheckpointException("read", failures))
    assert isinstance(error, CheckpointDamagedError)
    assert str(error).startswith("Rank 2 ") and "__2_0.distcp" in str(error)


def test_dcp_is_left_alone_where_there_is_no_index(tmp_path: Path) -> None:
    assert reading_through(verification_of(tmp_path)) == {}
    (tmp_path / INDEX).touch()
    assert reading_through(verification_of(tmp_path)) == {}
    (tmp_path / "file").touch()
    assert reading_through(Verification(str(tmp_path / "file"), None, Verify.FULL)) == {}


def test_an_index_that_a_disk_does_not_show_is_not_read_unchecked(tmp_path: Path) -> None:
    # Whoever asks for it gets an error of the disk, as on a mount that has become stale.
    (tmp_path / INDEX).symlink_to(INDEX)
    reading = reading_through(Verification(str(tmp_path), None, Verify.FULL))
    with pytest.raises(torch_dcp.CheckpointException) as told:
        torch_dcp.load({"w": torch.zeros(3)}, checkpoint_id=str(tmp_path), no_dist=True, **reading)
    error = dcp_reader.read_error(str(tmp_path), told.value)
    assert type(error) is CheckpointReadError and "symbolic links" in str(error)
    assert isinstance(reading["storage_reader"], VerifyingReader)


@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_an_index_that_one_rank_does_not_see_is_not_read_unchecked(
    tmp_path: Path, damage: str
) -> None:
    path = save_alone(tmp_path / "step-1", {"w": torch.ones(3)})
    verification = verification_of(path)
    DAMAGES[damage](path / INDEX)
    reading = reading_through(verification)
    with pytest.raises(torch_dcp.CheckpointException) as told:
        torch_dcp.load({"w": torch.zeros(3)}, checkpoint_id=str(path), no_dist=True, **reading)
    error = dcp_reader.read_error(str(path), told.value)
    assert isinstance(error, CheckpointDamagedError) and f"{path}/{INDEX}" in str(error)


@pytest.mark.usefixtures("one_rank")
def test_what_is_read_without_a_start_is_checked_as_well(tmp_path: Path) -> None:
    step = saved(tmp_path)
    run = build_run(tmp_path)
    flip(step / DATA, -1)
    with pytest.raises(torch_dcp.CheckpointException, match="expected xxh3"):
        run.manager.dcp_load(
            {"scale": torch.zeros(1)}, str(step), from_hf=False, from_quantized=False
        )
    run.manager.close()


@pytest.mark.parametrize("verify", Verify)
@pytest.mark.parametrize("kind", ["alike", "another dtype", "turned", "odd"])
def test_tensors_get_to_their_places_in_any_layout(
    tmp_path: Path, verify: Verify, kind: str
) -> None:
    saved = torch.arange(24.0).view(4, 6)
    state = {"a": saved.to(torch.float8_e4m3fn) if kind == "odd" else saved, "none": saved[:0]}
    path = save_alone(tmp_path / "step-1", state)
    targets = {
        "alike": torch.zeros(4, 6),
        "another dtype": torch.zeros(4, 6, dtype=torch.float64),
        "turned": torch.zeros(6, 4).t(),
        "odd": torch.zeros(4, 6).to(torch.float8_e4m3fn),
    }
    wanted = {"a": targets[kind], "none": torch.zeros(0, 6)}
    reading = reading_through(Verification(str(path), verification_of(path).manifest, verify))
    torch_dcp.load(wanted, checkpoint_id=str(path), no_dist=True, **reading)
    assert torch.equal(wanted["a"].to(torch.float64), state["a"].to(torch.float64))


@pytest.mark.parametrize("place", [(2, 1), (1, 2), (0, 0)])
def test_a_part_is_read_from_its_place_and_only_from_within(tmp_path: Path, place: Any) -> None:
    saved = torch.arange(24.0).view(4, 6)
    path = save_alone(tmp_path / "step-1", {"a": saved})
    wanted = torch.zeros(2, 5)

    class OfAPart(PlainLoadPlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            [item] = plan.items
            lengths = wanted.size()
            part = replace(item, storage_offsets=torch.Size(place), lengths=lengths)
            return replace(plan, items=[part])

        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return wanted

    reader = VerifyingReader(verification_of(path))
    planner = OfAPart(reader)
    if place == (1, 2):
        with pytest.raises(torch_dcp.CheckpointException):
            torch_dcp.load(
                {"a": torch.zeros(4, 6)}, storage_reader=reader, planner=planner, no_dist=True
            )
        assert not wanted.any()
        return
    torch_dcp.load({"a": torch.zeros(4, 6)}, storage_reader=reader, planner=planner, no_dist=True)
    row, column = place
    assert torch.equal(wanted, saved[row : row + 2, column : column + 5])
