"""What torch_checkpointing does to a state without a word, and that it does not here.

    what it does if left alone                         what shows that it does not reach a user
    -------------------------------------------------  -----------------------------------------------
    values beside shards are lost in another layout    test_every_kind_of_state...: "beside shards"
    so are the values in a list that has shards        the same: "in lists"
    a mesh of another name is another layout           the same: meshes are named after their seed
    of views that begin at one address, one is read    the same: "rows of a large table"
    no place may change its type                       the same: "changes", "only in"
    a parameter cannot be read into                    the same: "learned"
    all saves get the metadata of the first            the same: the second has another state
    part of a state is read some time after the save   the same: it is spoiled right after the save
    a tensor that rank 0 lacks is left as it was       test_what_only_some_ranks_have...: "step", "stage"
    a tensor that differs between ranks is anybody's   the same: "not alike", the lowest rank's always
    the loader's state is missing on further ranks     the same: "dp_rank_<r>"
    meshes of two dimensions, replicas                 test_a_tensor_in_any_layout_of_two_dimensions...
    what is loaded has to be required, or the reverse  test_weights_alone_are_loaded_from_a_full_...
    an optimizer that keeps no tensors                 the same
    a dict that only one rank has something in         the same: "empty elsewhere"
    a view takes as much as what it is a view of       test_a_view_takes_what_it_shows...
    tied tensors                                       the same
    a warning for each mesh and each tied tensor       test_nothing_is_said_of_all_this

What is refused instead stands in test_traps_refused.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.pool import end_of_ranks
from tests.ranks.traps import Held, held, of_all_kinds, on_meshes, on_some_ranks, run_with
from tests.unit_tests.components.checkpointer.runs import Run

pytestmark = pytest.mark.ranks


def spoil(run: Run) -> None:
    """Change everything as early as a run may."""
    extra = run.manager.states["extra"].values
    extra["beside shards"]["set"].add("too late")
    extra["in lists"][0]["rate"].append("too late")
    extra["in lists"][0]["part"].to_local().fill_(-1.0)
    extra["floats"][0].fill_(-1.0)
    run.progress.values["step"] = run.dataloader.values["row"] = -1
    run.lr_schedulers.step()
    with torch.no_grad():
        run.model.get_buffer("seen").fill_(-1)
        run.manager.maybe_wait_for_staging()
        for parameter in run.model.parameters():
            parameter.fill_(-1.0)


def save_on_two(folder: Path) -> dict[int, Any]:
    """Two saves in the background, of two states; the second state once more at the end."""
    run = run_with(folder, extra=of_all_kinds(1), some=on_some_ranks())
    run.train(1)
    run.train(2, save=False)
    extra = run.manager.states["extra"]
    extra.values = of_all_kinds(2)
    saved = {2: held(run)}
    run.manager.save(2)
    assert run.manager.save_future is not None
    spoil(run)
    extra.values, run.progress.values = of_all_kinds(2), {"step": 2}
    run.train(3, save=False)
    saved[3] = held(run)
    run.manager.save(3, last_step=True)
    run.manager.close()
    return saved


def load_from_two(folder: Path) -> dict[int, Any]:
    """What each of the two holds, by step; each loaded into a run of other values."""
    found = {}
    for step in (2, 3):
        run = run_with(folder, seed=5, extra=of_all_kinds(4), some=on_some_ranks())
        assert run.manager.load(step)
        found[step] = held(run)
        run.manager.close()
    return found


def save_on_four(folder: Path) -> Any:
    run = run_with(folder, meshes=on_meshes(1), some=on_some_ranks())
    run.manager.states["optimizer"] = Held({"groups.all.lr": 0.5, "groups.all.betas": (0.1, 0.2)})
    run.train(1, last_step=1)
    run.manager.close()
    return held(run)


def load_from_four(folder: Path) -> Any:
    run = run_with(folder, seed=6, meshes=on_meshes(2), some={})
    run.manager.states["optimizer"] = Held({"groups.all.lr": 0.1, "groups.all.betas": (0.5, 0.5)})
    assert run.manager.load()
    run.manager.close()
    return held(run)


def load_model_of_two(folder: Path) -> Any:
    """What a run that begins with the weights of a step has, and that did not load."""
    path = str(folder / "two/checkpoint/step-2")
    states = {"extra": of_all_kinds(4), "some": {}, "new": {"of this run": 1}}
    runs = [
        run_with(folder / "new", seed=5, settings={"initial_load_path": name}, **states)
        for name in (path, None)
    ]
    assert [run.manager.load() for run in runs] == [True, False]
    for run in runs:
        run.manager.close()
    return [held(run) for run in runs]


def load_both(folder: Path) -> Any:
    found = load_from_two(folder / "two"), load_from_four(folder / "four")
    return *found, load_model_of_two(folder)


def load_one_save_other(folder: Path) -> Any:
    found = load_from_two(folder / "two"), save_on_four(folder / "four")
    return *found, load_model_of_two(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traps")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Any]:
    """What was saved on 2 and on 4 ranks, and what runs on 1, 2 and 4 ranks load of it; by rank."""
    logs: list[str] = []

    def on_ranks(num_ranks: int, run: Callable[..., Any], where: Path) -> list[Any]:
        ends = end_of_ranks(num_ranks, run, where, timeout_seconds=240.0)
        assert all(end.how == "returned" for end in ends), ends
        logs.extend(end.log for end in ends)
        return [end.value for end in ends]

    found: dict[str, Any] = {"saved on 2": on_ranks(2, save_on_two, folder / "two"), "logs": logs}
    on_four = on_ranks(4, load_one_save_other, folder)
    found["2 on 4"], found["saved on 4"], found["model on 4"] = zip(*on_four, strict=True)
    for num_ranks in (1, 2):
        both = on_ranks(num_ranks, load_both, folder)
        names = (f"2 on {num_ranks}", f"4 on {num_ranks}", f"model on {num_ranks}")
        found |= dict(zip(names, zip(*both, strict=True), strict=True))
    return found


def without(state: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in keys}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("step", [2, 3])
def test_every_kind_of_state_comes_back_on_any_number_of_ranks(
    runs: dict[str, Any], step: int, num_ranks: int
) -> None:
    saved = without(runs["saved on 2"][0][step], "some")
    assert len(saved["extra"]) == 15 and len(saved) > 20
    for found in runs[f"2 on {num_ranks}"]:
        found = without(found[step], "some")
        extra, expected = found.pop("extra"), saved["extra"]
        assert {key for key in extra | expected if extra.get(key) != expected.get(key)} == set()
        assert found == without(saved, "extra")


def all_parts(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks have together; of what several have, that of the lowest."""
    together: dict[str, Any] = {}
    for part in reversed(of_ranks):
        together |= {name: value for name, value in part.items() if value != {}}
    return together


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_only_some_ranks_have_is_there_for_all_that_ask(
    runs: dict[str, Any], num_ranks: int
) -> None:
    saved = all_parts([state[2]["some"] for state in runs["saved on 2"]])
    assert {"stage 0", "stage 1", "step 0", "step 1", "of the last", "dp_rank_1"} <= set(saved)
    for rank, found in enumerate(runs[f"2 on {num_ranks}"]):
        others = {f"dp_rank_{other}" for other in (0, 1) if other != rank}
        assert found[2]["some"] == without(saved, *others)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_tensor_in_any_layout_of_two_dimensions_comes_back_in_another(
    runs: dict[str, Any], num_ranks: int
) -> None:
    saved = all_parts([state["some"] for state in runs["saved on 4"]])
    assert {"stage 3", "step 3", "dp_rank_3"} <= set(saved)
    for found in runs[f"4 on {num_ranks}"]:
        assert len(found["meshes"]) == 9
        assert found["meshes"] == runs["saved on 4"][0]["meshes"]
        assert found["optimizer"] == {"groups.all.lr": 0.5, "groups.all.betas": (0.1, 0.2)}
        assert found["some"] == saved


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_weights_alone_are_loaded_from_a_full_checkpoint(
    runs: dict[str, Any], num_ranks: int
) -> None:
    for found, fresh in runs[f"model on {num_ranks}"]:
        weights = {key for key in found if key.startswith("model.")}
        assert len(weights) == 7
        assert {key: found[key] for key in weights} == {
            key: runs["saved on 2"][0][2][key] for key in weights
        }
        assert without(found, *weights) == without(fresh, *weights)


def test_a_view_takes_what_it_shows_however_it_is_saved(folder: Path, runs: dict[str, Any]) -> None:
    sizes = {}
    for step in (2, 3):
        files = (folder / f"two/checkpoint/step-{step}").glob("*_*.pt")
        sizes[step] = {path.name: path.stat().st_size for path in files}
        file = folder / f"two/checkpoint/step-{step}/extra_0.pt"
        first, second, shard, other = torch.load(file, weights_only=False)["twice"]
        assert first.data_ptr() == second.data_ptr()
        assert shard.to_local().data_ptr() == other.to_local().data_ptr()
    # By a process from shared memory, and by the training thread, where views may share memory. What
    # is said of the layout of shards is shared in the one and not in the other.
    assert sizes[2].keys() == sizes[3].keys()
    assert all(abs(size - sizes[2][name]) < 2_000 for name, size in sizes[3].items())
    assert sizes[2]["extra_0.pt"] < 20_000


def test_nothing_is_said_of_all_this(runs: dict[str, Any]) -> None:
    log = "\n".join(runs["logs"])
    for words in ("DeviceMesh occurred", "plain tensors", "aliased target", "Offset reads"):
        assert words not in log, log
