from hypothesis import given, strategies as st
from torchtitan.components.checkpointer.schedule import SaveSchedule


def due(up_to: int, **settings: bool | int) -> list[int]:
    schedule = SaveSchedule(**settings)  # pyrefly: ignore[bad-argument-type]  (ints and bools)
    return [step for step in range(up_to + 1) if schedule.is_due(step)]


def test_multiples_of_the_interval_are_saved_and_so_is_step_0() -> None:
    assert due(9, interval=3) == [0, 3, 6, 9]


def test_an_interval_of_one_saves_every_step() -> None:
    assert due(3, interval=1) == [0, 1, 2, 3]


def test_the_first_step_is_step_1_and_only_when_asked() -> None:
    assert due(4, interval=100) == [0]
    assert due(4, interval=100, first_step=True) == [0, 1]


def test_the_last_step_is_saved_wherever_it_falls() -> None:
    assert all(SaveSchedule(interval=10).is_due(step, last_step=True) for step in (0, 7, 10))


@given(st.integers(0, 10**9), st.integers(1, 10**6), st.booleans(), st.booleans())
def test_load_only_saves_nothing_at_all(step: int, interval: int, first: bool, last: bool) -> None:
    schedule = SaveSchedule(interval=interval, first_step=first, load_only=True)
    assert not schedule.is_due(step, last_step=last)
