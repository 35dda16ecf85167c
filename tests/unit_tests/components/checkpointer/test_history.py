import pytest
from torchtitan.components.checkpointer.errors import CheckpointDamagedError, CheckpointReadError
from torchtitan.components.checkpointer.history import (
    put_aside,
    renames,
    supersede,
    supersede_newer,
    superseded_names,
)
from torchtitan.components.checkpointer.storage import FilesystemStorage

from tests.unit_tests.components.checkpointer.fakes import folder_of


def test_newer_steps_move_aside_newest_first_and_older_ones_stay() -> None:
    storage = folder_of("step-10", "step-20", "step-30")
    steps = {n: f"/run/step-{n}" for n in (10, 20, 30)}
    moved = supersede_newer(storage, "/run", steps, than=10)
    assert moved == ["/run/superseded/step-30", "/run/superseded/step-20"]
    assert sorted(storage.listdir("/run")) == ["step-10", "superseded"]
    assert storage.isfile("/run/superseded/step-20/done")


def test_nothing_moves_when_nothing_is_newer() -> None:
    storage = folder_of("step-10")
    assert supersede_newer(storage, "/run", {10: "/run/step-10"}, than=10) == []
    assert storage.calls == []


def test_what_was_superseded_earlier_is_never_overwritten() -> None:
    storage = folder_of("step-7", "superseded/step-7", "superseded/step-7.2")
    assert supersede(storage, "/run", "/run/step-7") == "/run/superseded/step-7.3"
    assert len(storage.listdir("/run/superseded")) == 3


def test_what_is_saved_again_is_never_moved_onto_something() -> None:
    storage = folder_of("step-7", "replaced/step-7")
    # What has been replaced already makes room for the newer one.
    storage.entries["/run/replaced/step-7/done"] = b"old"
    assert put_aside(storage, "/run", "/run/step-7") == "/run/replaced/step-7"
    assert storage.entries["/run/superseded/step-7/done"] == b"old"
    assert storage.entries["/run/replaced/step-7/done"] == b"1"
    storage = folder_of("step-7", "replaced/step-8")
    assert put_aside(storage, "/run", "/run/step-7") == "/run/replaced/step-7"


def test_only_where_a_move_is_a_copy_a_record_takes_its_place() -> None:
    storage = FilesystemStorage()
    assert renames(storage, "/data/run") and not renames(storage, "s3://bucket/run")


@pytest.mark.parametrize(
    "content", [b"", b"junk", b"[]", b"{}", b'{"superseded": 7}', b'{"superseded": [7]}']
)
def test_a_record_that_cannot_be_read_stops_a_run_and_no_older_checkpoint_is_taken(
    content: bytes,
) -> None:
    storage = folder_of("step-7")
    storage.add("/run/superseded.json", content)
    with pytest.raises(CheckpointReadError, match="/run/superseded.json cannot be read") as caught:
        superseded_names(storage, "/run")
    assert not isinstance(caught.value, CheckpointDamagedError)
