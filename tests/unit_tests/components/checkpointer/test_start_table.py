"""Where a run starts from: every cell of the table in docs/checkpoint.md, written out.

What lies in the run's folder x --checkpoint.load_step x --checkpoint.initial_load_path, for a run of
either back end. test_start_beside_others.py has the rows with checkpoints of the other one. Of what is
damaged it is known here what a start has found out by reading it; test_starting.py has the reading.
"""

import pytest
from torchtitan.components.checkpointer.discovery import Finder
from torchtitan.components.checkpointer.errors import CheckpointNotFoundError, CheckpointReadError
from torchtitan.components.checkpointer.formats import DCP, Format, FORMATS
from torchtitan.components.checkpointer.source import find_start

from tests.unit_tests.components.checkpointer import mixed_folders
from tests.unit_tests.components.checkpointer.fakes import MemoryStorage
from tests.unit_tests.components.checkpointer.test_source import request_for

JUNK_FILES = {
    "/run/notes.txt": b"text",
    "/run/step-07/.metadata": b"full",
    "/run/step-7.bak/metadata.pkl": b"full",
    "/run/step-9": b"a file",
    "/run/superseded/step-7/.metadata": b"full",
    "/run/.nfs01": b"",
}
FOLDERS: dict[str, dict[int, str]] = {
    "absent": {},
    "empty": {},
    "junk": {},
    "valid": dict.fromkeys((5, 7, 9), "full"),
    "only unfinished": dict.fromkeys((7, 9), "died"),
    "only weights": dict.fromkeys((7, 9), "weights"),
    "weights of the last step": dict.fromkeys((7, 20), "weights"),
    "a damaged newest": dict.fromkeys((5, 7, 9), "full"),
    "all damaged": dict.fromkeys((7, 9), "full"),
    "all damaged, and a seed": {0: "weights", 7: "full", 9: "full"},
    "a step that was saved again": {7: "full", 9: "died"},
    "a history that was left, by record": dict.fromkeys((7, 9), "full"),
}
WRONG = "a file is damaged: expected a, found b."
DAMAGED = {
    "a damaged newest": (9,),
    "all damaged": (7, 9),
    "all damaged, and a seed": (7, 9),
}
"""What a start with load_step -1 has found out when it chooses for the last time."""
PATHS = {"none": None, "good": "/given/step-3", "bad": "/nowhere"}

FRESH = "No checkpoint was provided, this is a fresh start."
GIVEN = "Loading the checkpoint /given/step-3 (--checkpoint.initial_load_path, weights only)."
IGNORED = "; ignored, as the run has checkpoints of its own: --checkpoint.initial_load_path "
JUNK = (
    " In /run these do not count: notes.txt, step-07, step-7.bak, step-9 (no names of checkpoints)."
)
DIED = " In /run these do not count: step-7, step-9 (saves that did not finish)."
NEWEST = "Loading the checkpoint /run/step-9 (newest full checkpoint"
NEWEST_7 = "Loading the checkpoint /run/step-7 (newest full checkpoint"
STEP_7 = "Loading the checkpoint /run/step-7 (--checkpoint.load_step=7"


def own(line: str) -> tuple[str, str, str]:
    """An own checkpoint is loaded whatever path was given; the line says that the path is ignored."""
    return f"{line}).", f"{line}{IGNORED}/given/step-3).", f"{line}{IGNORED}/nowhere)."


def always(error: type[Exception], text: str) -> tuple[tuple[type[Exception], str], ...]:
    return ((error, text),) * 3


BAD_PATH = (ValueError, "initial_load_path names /nowhere, which is not a directory")
NO_STEP = always(ValueError, "--checkpoint.load_step=-2 is not a step")
NO_SEED = always(
    CheckpointNotFoundError, "--checkpoint.load_step=0 was asked for, but /run holds no"
)
NO_7 = always(CheckpointNotFoundError, "load_step=7 was asked for, .* complete steps: none")
NO_8 = always(CheckpointNotFoundError, "load_step=8 was asked for, .* complete steps: none")
DIED_7 = always(CheckpointNotFoundError, r"load_step=7 was asked .* \(its save did not finish\)")
NOT_8 = always(CheckpointNotFoundError, r"load_step=8 was asked for, .* steps: \[5, 7, 9\]")
WEIGHTS_7 = always(CheckpointNotFoundError, "load_step=7 was asked for, .* holds only the model")
NO_8_BUT_SEED = always(
    CheckpointNotFoundError, r"load_step=8 was asked for, .* complete steps: \[0, 7, 9\]"
)
NO_8_BUT = always(CheckpointNotFoundError, r"load_step=8 was asked for, .* complete steps: \[7, ")
NONE_GOOD = always(
    CheckpointReadError,
    "/run holds no full checkpoint that is not damaged. "
    "step-9: a file is damaged: expected a, found b; step-7: a file",
)
SEED = "Loading the checkpoint /run/step-0 (--checkpoint.load_step=0"
WEIGHTS_ONLY = always(CheckpointNotFoundError, "/run holds only model-only checkpoints")

# (what lies in the folder, load_step): the outcomes without a path, with a good and with a bad one.
# An outcome is the line that is logged, or the error; "8" stands for a step that is not there.
TABLE: dict[tuple[str, int], tuple[str | tuple[type[Exception], str], ...]] = {
    ("absent", -1): (FRESH, GIVEN, BAD_PATH),
    ("absent", 0): NO_SEED,
    ("absent", 7): NO_7,
    ("absent", 8): NO_8,
    ("absent", -2): NO_STEP,
    ("empty", -1): (FRESH, GIVEN, BAD_PATH),
    ("empty", 0): NO_SEED,
    ("empty", 7): NO_7,
    ("empty", 8): NO_8,
    ("empty", -2): NO_STEP,
    ("junk", -1): (FRESH + JUNK, GIVEN + JUNK, BAD_PATH),
    ("junk", 0): NO_SEED,
    ("junk", 7): NO_7,
    ("junk", 8): NO_8,
    ("junk", -2): NO_STEP,
    ("valid", -1): own(NEWEST),
    ("valid", 0): NO_SEED,
    ("valid", 7): own(STEP_7),
    ("valid", 8): NOT_8,
    ("valid", -2): NO_STEP,
    ("only unfinished", -1): (FRESH + DIED, GIVEN + DIED, BAD_PATH),
    ("only unfinished", 0): NO_SEED,
    ("only unfinished", 7): DIED_7,
    ("only unfinished", 8): NO_8,
    ("only unfinished", -2): NO_STEP,
    ("only weights", -1): WEIGHTS_ONLY,
    ("only weights", 0): NO_SEED,
    ("only weights", 7): WEIGHTS_7,
    ("only weights", 8): NO_8_BUT,
    ("only weights", -2): NO_STEP,
    # What a run of 20 steps does about these is decided before anything is loaded.
    ("weights of the last step", -1): WEIGHTS_ONLY,
    ("weights of the last step", 0): NO_SEED,
    ("weights of the last step", 7): WEIGHTS_7,
    ("weights of the last step", 8): NO_8_BUT,
    ("weights of the last step", -2): NO_STEP,
    ("a damaged newest", -1): own(f"{NEWEST_7}; passed over: step-9 (damaged)"),
    ("a damaged newest", 0): NO_SEED,
    ("a damaged newest", 7): own(STEP_7),
    ("a damaged newest", 8): NOT_8,
    ("a damaged newest", -2): NO_STEP,
    # Of a step that is asked for nothing is known; if it is damaged its load fails.
    ("all damaged", -1): NONE_GOOD,
    ("all damaged", 0): NO_SEED,
    ("all damaged", 7): own(STEP_7),
    ("all damaged", 8): NO_8_BUT,
    ("all damaged", -2): NO_STEP,
    ("all damaged, and a seed", -1): NONE_GOOD,
    ("all damaged, and a seed", 0): own(SEED),
    ("all damaged, and a seed", 7): own(STEP_7),
    ("all damaged, and a seed", 8): NO_8_BUT_SEED,
    ("all damaged, and a seed", -2): NO_STEP,
    ("a step that was saved again", -1): own(
        "Loading the checkpoint /run/replaced/step-9 (newest full checkpoint"
    ),
    ("a step that was saved again", 0): NO_SEED,
    ("a step that was saved again", 7): own(STEP_7),
    ("a step that was saved again", 8): NO_8_BUT,
    ("a step that was saved again", -2): NO_STEP,
    ("a history that was left, by record", -1): own(NEWEST_7),
    ("a history that was left, by record", 0): NO_SEED,
    ("a history that was left, by record", 7): own(STEP_7),
    ("a history that was left, by record", 8): always(
        CheckpointNotFoundError, r"load_step=8 was asked for, .* complete steps: \[7\]"
    ),
    ("a history that was left, by record", -2): NO_STEP,
}


def finder_of(folder: str, chosen: Format) -> Finder:
    storage = MemoryStorage()
    if folder != "absent":
        storage.add("/run")
    for path, content in JUNK_FILES.items() if folder == "junk" else ():
        storage.add(path, content)
    for step, what in FOLDERS[folder].items():
        mixed_folders.put(storage, chosen, "/run", step, what)
    mixed_folders.put(storage, chosen, "/given", 3, "full")
    if folder == "a step that was saved again":
        mixed_folders.put(storage, chosen, "/run/replaced", 9, "full")
    if folder == "a history that was left, by record":
        storage.add("/run/superseded.json", b'{"superseded": ["step-9"]}')
    return mixed_folders.finder_of(chosen, storage)


def named(text: str, chosen: Format) -> str:
    """``text`` with the names under which saves that died lie there."""
    return text if chosen is DCP else text.replace(DIED, DIED.replace(" step-", " tmp_step-"))


@pytest.mark.parametrize("chosen", FORMATS, ids=lambda chosen: chosen.backend)
@pytest.mark.parametrize("folder,load_step", TABLE)
@pytest.mark.parametrize("initial", PATHS)
def test_every_cell_has_one_outcome(
    folder: str, load_step: int, initial: str, chosen: Format
) -> None:
    outcome = TABLE[folder, load_step][list(PATHS).index(initial)]
    where, request = finder_of(folder, chosen), request_for(load_step, PATHS[initial])
    damaged = DAMAGED.get(folder, ()) if load_step == -1 else ()
    found = where.look_into("/run", {f"/run/step-{number}": WRONG for number in damaged})
    if isinstance(outcome, str):
        start = find_start(request, found, where)
        assert start.line == named(outcome, chosen)
        assert "\n" not in start.line
        loaded = "nothing" if start.source is None else start.source.path
        assert outcome.startswith(
            FRESH if loaded == "nothing" else f"Loading the checkpoint {loaded} "
        )
        return
    error, text = outcome
    with pytest.raises(error, match=text):
        find_start(request, found, where)


def test_the_table_has_every_cell() -> None:
    assert set(TABLE) == {(folder, step) for folder in FOLDERS for step in (-2, -1, 0, 7, 8)}


@pytest.mark.parametrize("chosen", FORMATS, ids=lambda chosen: chosen.backend)
def test_weights_of_the_last_step_end_the_run_and_those_before_it_do_not(chosen: Format) -> None:
    exports = {name: finder_of(name, chosen).look_into("/run").export_step() for name in FOLDERS}
    assert {name for name, step in exports.items() if step >= 20} == {"weights of the last step"}
    assert exports["only weights"] == 9
