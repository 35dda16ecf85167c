from torchtitan.tools.errors import portable


class NeedsTwoError(Exception):
    """Can be written and not made again from its arguments."""

    def __init__(self, first: str, second: str) -> None:  # noqa: B042 (the fault under test)
        super().__init__(f"{first} {second}")


def test_errors_that_do_not_survive_pickling_travel_as_text() -> None:
    class LocalError(Exception):
        pass

    assert repr(portable(LocalError("why"))) == "RuntimeError('LocalError: why')"
    assert str(portable(NeedsTwoError("a", "b"))) == "NeedsTwoError: a b"
    assert str(portable(LocalError("why"), "on rank 0")) == "LocalError on rank 0: why"


def test_other_errors_travel_as_they_are() -> None:
    error = OSError(28, "No space left on device")
    assert portable(error) is error
