"""A structured logger that no other test has touched."""

from collections.abc import Iterator

import pytest
from torchtitan.observability.structured_logger import api, state


@pytest.fixture
def fresh_structured_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uninitialised during the test, with no step and no tags; as before afterwards."""
    monkeypatch.delenv(api.HANDLERS_VARIABLE, raising=False)
    monkeypatch.setattr(api, "_disabled", False)
    monkeypatch.setattr(api, "_is_initialized", False)
    monkeypatch.setattr(api, "_arguments", None)
    _forget_step()
    # pytest itself adds and removes handlers here while a test runs: touch none but those of the test.
    foreign = [*api._structured_logger.handlers]
    yield
    api._forwarding.remove()
    for handler in [*api._structured_logger.handlers]:
        if handler not in foreign and not type(handler).__module__.startswith("_pytest"):
            api._structured_logger.removeHandler(handler)
            handler.close()
    _forget_step()


def _forget_step() -> None:
    state.clear_step_tags()
    state._STEP_GLOBAL = state._RELATIVE_STEP_GLOBAL = None
    state._STEP_CV.set(None)
    state._RELATIVE_STEP_CV.set(None)
