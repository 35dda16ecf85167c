"""Where a run starts from when its folder, or the path it was given, holds another back end's checkpoints.

The rows of the table in docs/checkpoint.md that test_start_table.py leaves out: every cell, for a run
of either back end. A run never begins again beside them, and each error says what to pass.
"""

import pytest
from torchtitan.components.checkpointer.discovery import Finder, OwnFolder
from torchtitan.components.checkpointer.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from torchtitan.components.checkpointer.formats import Format, FORMATS, TORCH_CHECKPOINTING
from torchtitan.components.checkpointer.source import find_start

from tests.unit_tests.components.checkpointer.fakes import MemoryStorage
from tests.unit_tests.components.checkpointer.mixed_folders import finder_of, OTHER, put
from tests.unit_tests.components.checkpointer.test_source import request_for

Outcome = str | tuple[type[Exception], str]

# Step -> whose and what: of the run's own back end, or of the other one.
FOLDERS: dict[str, dict[int, str]] = {
    "full ones of the other": {7: "other full", 9: "other full"},
    "a newer full one of the other": {5: "own full", 7: "own full", 9: "other full"},
    "older full ones of the other": {5: "other full", 7: "other full", 9: "own full"},
    "newer weights of the other": {7: "own full", 9: "other weights"},
    "only weights, the newest of the other": {7: "own weights", 9: "other weights"},
    "only weights of the other": {7: "other weights", 20: "other weights"},
    "newer damage of the other": {7: "own full", 9: "other damaged"},
    "only damage of the other": {7: "other damaged"},
    "a seed of the other": {0: "other weights"},
    "a seed, and weights of the other": {0: "own weights", 7: "other weights"},
    "a save of the other that died": {7: "other died"},
}
PATHS = {"none": None, "good": "/given/step-3", "other": "/given/step-4", "around": "/elsewhere"}


def loaded(step: int, reason: str) -> tuple[Outcome, ...]:
    """Own checkpoints are loaded whatever path was given, and the line says that it is ignored."""
    line = f"Loading the checkpoint /run/step-{step} ({reason}"
    ignored = "; ignored, as the run has checkpoints of its own: --checkpoint.initial_load_path"
    return f"{line}).", *(f"{line}{ignored} {path})." for path in PATHS.values() if path)


def refused(
    *parts: str, error: type[CheckpointError] = CheckpointMismatchError
) -> tuple[Outcome, ...]:
    return ((error, " ".join(parts)),) * len(PATHS)


def of_the_other(
    what: str, step: int, *, asked: str, back_to: int | None = None
) -> tuple[Outcome, ...]:
    back = (
        ""
        if back_to is None
        else f" --checkpoint.load_step {back_to} to go back to step-{back_to},"
    )
    return refused(
        f"{asked}, but /run/step-{step} is {what} of OTHER, and this run uses OWN, which cannot read it.",
        f"Pass --checkpoint.backend OTHER to go on from it,{back}",
        "or another --checkpoint.folder to leave it alone.",
    )


def no_step(step: int, there: str) -> tuple[Outcome, ...]:
    return refused(
        f"--checkpoint.load_step={step} was asked for, but /run holds no complete checkpoint of that",
        f"step; complete steps: {there}. Set --checkpoint.load_step to one of them, or to -1 for the",
        "newest full one.",
        error=CheckpointNotFoundError,
    )


def only_the_model(step: int, backend: str = "") -> tuple[Outcome, ...]:
    return refused(
        f"--checkpoint.load_step={step} was asked for, but /run/step-{step} holds only the model, and a",
        f"run needs optimizer and data position to go on. Load its weights with {backend}"
        "--checkpoint.initial_load_path and a new --checkpoint.folder instead.",
        error=CheckpointNotFoundError,
    )


def only_weights(steps: str, backend: str, newest: int) -> tuple[Outcome, ...]:
    def sentence(path: str | None) -> str:
        unused = f" --checkpoint.initial_load_path {path} does not change that." if path else ""
        return (
            f"/run holds only model-only checkpoints (steps {steps}); a run needs a full one to go "
            f"on.{unused} To train on from such weights pass {backend}"
            f"--checkpoint.initial_load_path=/run/step-{newest} (as an absolute path) together with "
            "a new --checkpoint.folder; to begin again choose a new --checkpoint.folder. Set "
            "--checkpoint.no-last-save-model-only to save full ones."
        )

    return tuple((CheckpointNotFoundError, sentence(path)) for path in PATHS.values())


ASKED_NEWEST = "/run was looked into for the newest checkpoint"
ASKED_7, ASKED_0 = (
    "--checkpoint.load_step=7 was asked for",
    "--checkpoint.load_step=0 was asked for",
)
NOTHING_FULL = "/run holds nothing full to go on from"
FULL, WEIGHTS = "a full checkpoint", "a checkpoint of weights"
DAMAGED = "a checkpoint, with an index that cannot be read,"
STEP_7 = loaded(7, "--checkpoint.load_step=7")
ON_THE_OTHER = "--checkpoint.backend OTHER, "

# (what lies in the folder, load_step) -> the outcome for each of PATHS.
TABLE: dict[tuple[str, int], tuple[Outcome, ...]] = {
    ("full ones of the other", -1): of_the_other(FULL, 9, asked=ASKED_NEWEST),
    ("full ones of the other", 0): no_step(0, "[7, 9] (of OTHER: [7, 9])"),
    ("full ones of the other", 7): of_the_other(FULL, 7, asked=ASKED_7),
    ("a newer full one of the other", -1): of_the_other(FULL, 9, asked=ASKED_NEWEST, back_to=7),
    ("a newer full one of the other", 0): no_step(0, "[5, 7, 9] (of OTHER: [9])"),
    ("a newer full one of the other", 7): STEP_7,
    ("older full ones of the other", -1): loaded(9, "newest full checkpoint"),
    ("older full ones of the other", 0): no_step(0, "[5, 7, 9] (of OTHER: [5, 7])"),
    ("older full ones of the other", 7): of_the_other(FULL, 7, asked=ASKED_7, back_to=9),
    ("newer weights of the other", -1): loaded(
        7, "newest full checkpoint; passed over: step-9 (weights only)"
    ),
    ("newer weights of the other", 0): no_step(0, "[7, 9] (of OTHER: [9])"),
    ("newer weights of the other", 7): STEP_7,
    ("only weights, the newest of the other", -1): only_weights("[7, 9]", ON_THE_OTHER, 9),
    ("only weights, the newest of the other", 0): no_step(0, "[7, 9] (of OTHER: [9])"),
    ("only weights, the newest of the other", 7): only_the_model(7),
    ("only weights of the other", -1): only_weights("[7, 20]", ON_THE_OTHER, 20),
    ("only weights of the other", 0): no_step(0, "[7, 20] (of OTHER: [7, 20])"),
    ("only weights of the other", 7): only_the_model(7, ON_THE_OTHER),
    ("newer damage of the other", -1): loaded(
        7, "newest full checkpoint; passed over: step-9 (its index cannot be read)"
    ),
    ("newer damage of the other", 0): no_step(0, "[7, 9] (of OTHER: [9])"),
    ("newer damage of the other", 7): STEP_7,
    ("only damage of the other", -1): of_the_other(DAMAGED, 7, asked=NOTHING_FULL),
    ("only damage of the other", 0): no_step(0, "[7] (of OTHER: [7])"),
    ("only damage of the other", 7): of_the_other(DAMAGED, 7, asked=ASKED_7),
    ("a seed of the other", -1): of_the_other("a seed", 0, asked=NOTHING_FULL),
    ("a seed of the other", 0): of_the_other("a seed", 0, asked=ASKED_0),
    ("a seed of the other", 7): no_step(7, "[0] (of OTHER: [0])"),
    ("a seed, and weights of the other", -1): loaded(
        0, "seed checkpoint; passed over: step-7 (weights only)"
    ),
    ("a seed, and weights of the other", 0): loaded(0, "--checkpoint.load_step=0"),
    ("a seed, and weights of the other", 7): only_the_model(7, ON_THE_OTHER),
}
# What died is not a checkpoint of anybody's, so it keeps no run from starting; see below.
DIED = "a save of the other that died"


def looked_into(folder: str, chosen: Format) -> tuple[Finder, OwnFolder]:
    storage = MemoryStorage("/run")
    for step, content in FOLDERS[folder].items():
        whose, _, what = content.partition(" ")
        put(storage, chosen if whose == "own" else OTHER[chosen], "/run", step, what)
    put(storage, chosen, "/given", 3, "full")
    put(storage, OTHER[chosen], "/given", 4, "full")
    put(storage, OTHER[chosen], "/elsewhere/checkpoint", 6, "full")
    put(storage, OTHER[chosen], "/elsewhere/checkpoint", 8, "full")
    where = finder_of(chosen, storage)
    return where, where.look_into("/run")


def outcome_of(folder: str, load_step: int, initial: str, chosen: Format) -> Outcome:
    where, own = looked_into(folder, chosen)
    try:
        return find_start(request_for(load_step, PATHS[initial]), own, where).line
    except (CheckpointError, ValueError) as error:
        return type(error), str(error)


def named(text: str, chosen: Format) -> str:
    return text.replace("OWN", chosen.backend).replace("OTHER", OTHER[chosen].backend)


both_back_ends = pytest.mark.parametrize("chosen", FORMATS, ids=lambda chosen: chosen.backend)


@both_back_ends
@pytest.mark.parametrize("folder,load_step", TABLE)
def test_every_cell_has_one_outcome(folder: str, load_step: int, chosen: Format) -> None:
    for initial, expected in zip(PATHS, TABLE[folder, load_step], strict=True):
        outcome = outcome_of(folder, load_step, initial, chosen)
        if isinstance(expected, str):
            assert outcome == expected
        else:
            assert outcome == (expected[0], named(expected[1], chosen))


def test_the_table_has_every_cell() -> None:
    assert set(TABLE) == {(name, step) for name in FOLDERS if name != DIED for step in (-1, 0, 7)}


@both_back_ends
def test_a_path_to_a_checkpoint_of_the_other_is_refused_with_what_to_pass(chosen: Format) -> None:
    given = {
        initial: outcome_of(DIED, -1, initial, chosen) for initial in ("good", "other", "around")
    }
    assert str(given["good"]).startswith("Loading the checkpoint /given/step-3")
    expected = {
        "other": "--checkpoint.initial_load_path names /given/step-4, which is a full checkpoint of "
        "OTHER, and this run uses OWN, which cannot read it; pass --checkpoint.backend OTHER as well, "
        "or another path.",
        "around": "--checkpoint.initial_load_path names /elsewhere, which is not a checkpoint but a "
        "folder around checkpoints (steps [6, 8]); pass one of them, the newest is "
        "/elsewhere/checkpoint/step-8 and needs --checkpoint.backend OTHER.",
    }
    for initial, text in expected.items():
        assert given[initial] == (ValueError, named(text, chosen))


@both_back_ends
def test_a_folder_around_checkpoints_of_both_names_the_newest_that_can_be_read(
    chosen: Format,
) -> None:
    where, own = looked_into(DIED, chosen)
    assert isinstance(where.storage, MemoryStorage)
    put(where.storage, chosen, "/elsewhere/checkpoint", 6, "full")
    with pytest.raises(
        ValueError, match=r"steps \[6\]\); .* newest is /elsewhere/checkpoint/step-6\."
    ):
        find_start(request_for(-1, "/elsewhere"), own, where)


@both_back_ends
def test_the_way_back_leads_to_the_newest_own_one_that_can_be_resumed_from(chosen: Format) -> None:
    storage = MemoryStorage("/run")
    for step, what in {5: "full", 6: "full", 7: "weights", 8: "damaged"}.items():
        put(storage, chosen, "/run", step, what)
    put(storage, OTHER[chosen], "/run", 9, "full")
    where = finder_of(chosen, storage)
    with pytest.raises(CheckpointMismatchError, match="load_step 6 to go back to step-6, or"):
        find_start(request_for(-1, None), where.look_into("/run"), where)


@both_back_ends
def test_a_path_to_a_save_that_died_is_refused_whoever_s_it_is(chosen: Format) -> None:
    where, own = looked_into(DIED, chosen)
    assert isinstance(where.storage, MemoryStorage)
    put(where.storage, TORCH_CHECKPOINTING, "/given", 5, "died")
    with pytest.raises(
        ValueError, match="names /given/tmp_step-5, which a save left behind that did"
    ):
        find_start(request_for(-1, "/given/tmp_step-5"), own, where)


@both_back_ends
def test_what_the_other_left_of_a_save_that_died_keeps_no_run_from_starting(chosen: Format) -> None:
    line = outcome_of(DIED, -1, "none", chosen)
    assert str(line).startswith(
        "No checkpoint was provided, this is a fresh start. In /run these do"
    )
    _, own = looked_into(DIED, chosen)
    # Under a staging name it is nobody's whom this run knows; under its own, what a save left.
    staged = chosen.backend == "dcp"
    assert own.foreign == (("tmp_step-7",) if staged else ())
    assert dict(own.unfinished) == ({} if staged else {"step-7": 7})


@both_back_ends
def test_weights_that_the_other_saved_last_end_the_run_as_own_ones_do(chosen: Format) -> None:
    exports = {name: looked_into(name, chosen)[1].export_step() for name in FOLDERS}
    assert {name: step for name, step in exports.items() if step != -1} == {
        "newer weights of the other": 9,
        "only weights, the newest of the other": 9,
        "only weights of the other": 20,
        "a seed, and weights of the other": 7,
    }
