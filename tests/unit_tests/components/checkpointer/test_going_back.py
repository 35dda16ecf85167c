"""A run that goes back to an older step has that in its folder only from its first save on."""

from pathlib import Path

import pytest

from tests.unit_tests.components.checkpointer.runs import build_run
from tests.unit_tests.components.checkpointer.ways import ASYNC, DISABLED, over, TC_WAITING, Way

pytestmark = pytest.mark.usefixtures("one_rank")


@over(DISABLED, ASYNC, TC_WAITING)
def test_what_a_run_has_saved_is_told_from_what_it_has_found_under_the_same_name(
    tmp_path: Path, way: Way
) -> None:
    first = build_run(tmp_path, **way.settings)
    first.train(3)
    first.manager.close()
    path = str(tmp_path / "checkpoint/step-3")
    assert first.manager.has_saved(path)

    back = build_run(tmp_path, **way.settings)
    assert back.manager.load(2)
    assert back.manager.newest_checkpoint() == path and not back.manager.has_saved(path)
    back.train(3)
    back.manager.close()
    assert back.manager.newest_checkpoint() == path and back.manager.has_saved(path)
    assert not back.manager.has_saved(str(tmp_path / "checkpoint/step-2"))
