"""Which of several own checkpoints a run takes, and what it takes without one.

test_start_table.py holds the table over what can lie in the folder.
"""

import itertools
import os
import pickle
import re

import pytest
from torchtitan.components.checkpointer.dcp_index import parse_entry
from torchtitan.components.checkpointer.discovery import Finder, Kind, OwnFolder
from torchtitan.components.checkpointer.errors import CheckpointError, CheckpointNotFoundError
from torchtitan.components.checkpointer.source import find_start, Request, Source, Start
from torchtitan.components.checkpointer.source_text import is_inside

from tests.unit_tests.components.checkpointer.fakes import MemoryStorage

F, M, U = Kind.FULL, Kind.MODEL_ONLY, Kind.UNREADABLE

# What discovery finds: folder absent, empty, full of junk and only half-written steps are all {}.
FOLDERS: dict[str, dict[int, Kind]] = {
    "nothing complete": {},
    "full": {5: F, 7: F, 9: F},
    "one full": {7: F},
    "full under an export": {7: F, 9: M},
    "full under damage": {7: F, 9: U},
    "full under damage and an export": {7: F, 8: M, 9: U},
    "only exports": {7: M, 9: M},
    "only a seed": {0: M},
    "a full seed": {0: F},
    "seed and export": {0: M, 9: M},
    "seed and full": {0: M, 7: F},
    "all damaged": {7: U, 9: U},
    "damage and export": {7: M, 9: U},
    "damage and seed": {0: M, 9: U},
}

# The step that is loaded for load_step -1; None goes on to the initial path, an error class raises.
NEWEST: dict[str, int | None | type[Exception]] = {
    "nothing complete": None,
    "full": 9,
    "one full": 7,
    "full under an export": 7,
    "full under damage": 7,
    "full under damage and an export": 7,
    "only exports": CheckpointNotFoundError,
    "only a seed": 0,
    "a full seed": 0,
    "seed and export": 0,
    "seed and full": 7,
    "all damaged": 9,
    "damage and export": 9,
    "damage and seed": 9,
}
INITIAL = {"no path": None, "good path": "/given/step-3", "bad path": "/nowhere"}


def request_for(load_step: int, initial: str | None, **settings: bool | str) -> Request:
    values: dict[str, object] = {
        "initial_load_model_only": True,
        "initial_load_in_hf": False,
        "initial_load_in_hf_quantized": False,
        "hf_assets_path": None,
        **settings,
    }
    return Request(
        load_step=load_step,
        initial_load_path=initial,
        **values,  # pyrefly: ignore[bad-argument-type]  (as the callers wrote them)
    )


def start(kinds: dict[int, Kind], request: Request, unfinished: tuple[int, ...] = ()) -> Start:
    paths = {step: f"/run/step-{step}" for step in kinds}
    by_path = {path: kinds[step] for step, path in paths.items()}
    by_path |= {"/given/step-3": F, "/given/step-2": M, "/dump/checkpoint/step-11": F}
    own = OwnFolder(
        path="/run",
        step_paths=paths,
        kind_of=by_path.__getitem__,
        unfinished={f"tmp_step-{step}": step for step in unfinished},
    )
    finder = Finder(
        storage=MemoryStorage(*by_path, "/weights", "/run"),
        parse=parse_entry,
        is_complete=by_path.__contains__,
        kind_by_index=by_path.__getitem__,
    )
    return find_start(request, own, finder)


def find(kinds: dict[int, Kind], request: Request) -> Source | None:
    return start(kinds, request).source


def expected(folder: str, load_step: int, initial: str) -> object:
    """A step, a path, None (fresh start) or the error."""
    if load_step != -1:
        kind = FOLDERS[folder].get(load_step)
        missing = kind is None or (kind is M and load_step != 0)
        return CheckpointNotFoundError if missing else load_step
    if NEWEST[folder] is not None:
        return NEWEST[folder]
    return {"no path": None, "good path": "/given/step-3", "bad path": ValueError}[initial]


@pytest.mark.parametrize("folder,load_step", list(itertools.product(FOLDERS, (-1, 0, 7, 8))))
def test_the_source_of_every_combination(folder: str, load_step: int) -> None:
    for initial, path in INITIAL.items():
        request, outcome = request_for(load_step, path), expected(folder, load_step, initial)
        if isinstance(outcome, type):
            with pytest.raises(outcome):
                find(FOLDERS[folder], request)
            continue
        source = find(FOLDERS[folder], request)
        if outcome is None:
            assert source is None
            continue
        assert source is not None
        if isinstance(outcome, str):
            assert (source.path, source.step, source.model_only) == (outcome, None, True)
        else:
            assert source.path == f"/run/step-{outcome}"
            assert source.step == outcome and source.model_only == (outcome == 0)
            assert not source.from_hf and not source.from_quantized


def test_an_explicit_step_never_falls_back_and_says_what_is_there() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        find(FOLDERS["full"], request_for(8, "/given/step-3"))
    text = str(caught.value)
    assert "--checkpoint.load_step=8" in text and "[5, 7, 9]" in text and "/run" in text
    with pytest.raises(FileNotFoundError, match="--checkpoint.load_step=8 .*none"):
        find({}, request_for(8, None))


def test_an_explicit_export_is_refused_with_the_way_to_use_it() -> None:
    with pytest.raises(FileNotFoundError, match="--checkpoint.load_step=9 .*initial_load_path"):
        find(FOLDERS["full under an export"], request_for(9, None))


def test_a_folder_of_exports_is_an_error_that_says_how_to_go_on() -> None:
    with pytest.raises(CheckpointError, match=r"steps \[7, 9\].*initial_load_path=/run/step-9"):
        find(FOLDERS["only exports"], request_for(-1, "/given/step-3"))


def test_damage_that_was_passed_over_is_named_in_the_line() -> None:
    line = start(FOLDERS["full under damage"], request_for(-1, None)).line
    assert "(newest full checkpoint; passed over: step-9 (its index cannot be read))" in line


def test_without_fallback_an_index_that_cannot_be_read_is_not_passed_over() -> None:
    request = request_for(-1, None, on_damaged="fail")
    begun = start(FOLDERS["full under damage and an export"], request)
    assert begun.source is not None and begun.source.step == 9
    assert "(the newest, although its index cannot be read)" in begun.line
    assert start(FOLDERS["full under an export"], request).source == Source(
        path="/run/step-7", step=7
    )


def test_own_checkpoints_silence_every_initial_setting() -> None:
    request = request_for(
        -1, "/nowhere", initial_load_in_hf=True, initial_load_in_hf_quantized=True
    )
    chosen = start(FOLDERS["full"], request)
    assert chosen.source == Source(path="/run/step-9", step=9)
    assert chosen.line == (
        "Loading the checkpoint /run/step-9 (newest full checkpoint; ignored, as the run has "
        "checkpoints of its own: --checkpoint.initial_load_path /nowhere, "
        "--checkpoint.initial_load_in_hf, --checkpoint.initial_load_in_hf_quantized)."
    )


def test_what_lies_above_the_chosen_step_is_told_in_the_order_of_the_steps() -> None:
    unfinished = (3, *range(20, 26))
    line = start({7: F, 9: M, 8: U}, request_for(-1, None), unfinished).line
    assert line == (
        "Loading the checkpoint /run/step-7 (newest full checkpoint; passed over: step-8 (its "
        "index cannot be read), step-9 (weights only), step-20 (its save did not finish), step-21 "
        "(its save did not finish), step-22 (its save did not finish) and 3 more)."
    )
    line = start({7: F, 9: M}, request_for(-1, None), (9,)).line
    assert line.endswith("passed over: step-9 (weights only)).")
    line = start({0: M, 9: M}, request_for(-1, None)).line
    assert line.endswith("(seed checkpoint; passed over: step-9 (weights only)).")


def test_settings_that_a_fresh_start_has_no_use_for_are_told() -> None:
    chosen = start({}, request_for(-1, None, initial_load_model_only=False))
    assert chosen.source is None and chosen.line == (
        "No checkpoint was provided, this is a fresh start. Nothing to load for "
        "--checkpoint.no-initial-load-model-only."
    )


@pytest.mark.parametrize(
    "path,model_only,text",
    [
        ("/given", True, r"folder around checkpoints \(steps \[2, 3\]\).* newest is /given/step-3"),
        ("/given/", True, "the newest is /given/step-3"),
        ("/dump", True, "the newest is /dump/checkpoint/step-11"),
        ("/weights", True, "/weights, a directory without the index of a checkpoint; it must be"),
        ("/run", True, "/run, a directory .* in the folder of this run; it must be one complete"),
        ("/run/step-5", True, "/run/step-5, which is not a directory; it must be one checkpoint"),
        ("/given/step-2", False, "holds only the model, but --checkpoint.no-initial-load-model"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_refused_with_the_one_to_pass(
    path: str, model_only: bool, text: str
) -> None:
    request = request_for(-1, path, initial_load_model_only=model_only)
    with pytest.raises(ValueError, match=f"--checkpoint.initial_load_path names {path}") as caught:
        find({}, request)
    assert re.search(text, str(caught.value))
    assert find({7: F}, request) == Source(path="/run/step-7", step=7)


def test_a_step_whose_save_died_is_told_so() -> None:
    with pytest.raises(FileNotFoundError, match=r"of that step \(its save did not finish\)"):
        start({5: F}, request_for(7, None), (7,))


def test_a_path_is_found_inside_a_folder_by_name() -> None:
    inside = [("/run/step-5", "/run"), ("run/x", f"{os.getcwd()}/run/"), ("s3://a/b/c", "s3://a/b")]
    outside = [("/running/step-5", "/run"), ("/", "/run"), ("s3://a/bc", "s3://a/b")]
    assert all(is_inside(*pair) for pair in inside)
    assert not any(is_inside(*pair) for pair in outside)


@pytest.mark.parametrize("model_only", [True, False])
def test_the_initial_path_is_loaded_as_asked(model_only: bool) -> None:
    source = find({}, request_for(-1, "/given/step-3", initial_load_model_only=model_only))
    assert source is not None and source.model_only == model_only and not source.from_hf


def test_hugging_face_weights_come_from_the_path_or_else_from_the_assets() -> None:
    both = request_for(-1, "/given/step-3", initial_load_in_hf=True, hf_assets_path="/weights")
    assets = request_for(-1, None, initial_load_in_hf=True, hf_assets_path="/weights")
    sources = [find({}, both), find({}, assets)]
    assert [source and source.path for source in sources] == ["/given/step-3", "/weights"]
    assert all(source and source.from_hf for source in sources)


def test_hugging_face_weights_without_a_place_are_an_error_that_names_both_settings() -> None:
    with pytest.raises(ValueError, match="initial_load_path nor --hf_assets_path"):
        find({}, request_for(-1, None, initial_load_in_hf=True))
    with pytest.raises(ValueError, match="--hf_assets_path names /gone, which is not a directory"):
        find({}, request_for(-1, None, initial_load_in_hf=True, hf_assets_path="/gone"))


def test_errors_cross_process_boundaries_whole() -> None:
    with pytest.raises(CheckpointNotFoundError) as caught:
        find({}, request_for(8, None))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is CheckpointNotFoundError and str(copy) == str(caught.value)
