from torchtitan.components.checkpointer.history import supersede, supersede_newer

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
