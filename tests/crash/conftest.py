"""What the crash tests share: seeds that can be set, the states that a run goes through, one rank.

KILLS_SEED=7 repeats one seed, and KILLS_SEED=100-149 tries fifty others.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.crash.killed_runs import LAST_STEPS, NUM_SAVES, PATIENCE, undisturbed
from tests.ranks.pool import run_on_ranks

SEED = "KILLS_SEED"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what draws moments once for each seed."""
    if "kills_seed" in metafunc.fixturenames:
        metafunc.parametrize("kills_seed", _seeds(metafunc.config), ids=lambda it: f"{SEED}={it}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give what tries more points than there is time for each day the time for that."""
    if config.getoption("--crash-points") != "all":
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(4 * 3600))


def _seeds(config: pytest.Config) -> list[int]:
    first, _, last = os.environ.get(SEED, "").partition("-")
    if first:
        return list(range(int(first), int(last or first) + 1))
    return list(range(1, 6)) if config.getoption("--crash-points", None) == "all" else [1]


@pytest.fixture(scope="session")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The digests of the state after each step on each rank, whoever has trained up to there."""
    until = NUM_SAVES + 10 * LAST_STEPS
    folder = tmp_path_factory.mktemp("undisturbed")
    found: list[list[str]] = run_on_ranks(2, undisturbed, folder, until, **PATIENCE)
    assert all(len(set(states)) == until + 1 for states in found)
    return found


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone, in which what crashes have left is looked at."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # Each check looks for garbage, and need not look at all of torch for that.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    dist.destroy_process_group()
