"""The table of cases can be carried out: its names lead somewhere, its settings are taken."""

import dataclasses
import importlib
from pathlib import Path

import pytest
from benchmarks.checkpoint import cells_of, CheckpointOptions, PARTS
from benchmarks.saving.cases import (
    Case,
    CASES,
    DIGEST_CASES,
    LIBRARY,
    LOAD_CASES,
    MANAGER,
    TABLES,
    VERIFY_CASES,
)
from benchmarks.saving.save import bytes_by_rank
from torchtitan.components.checkpointer.integrity.manifest import MANIFEST
from torchtitan.components.checkpointer.integrity.verification import Verify


@pytest.mark.parametrize("name", list(CASES))
def test_a_case_names_a_library_call_and_settings_of_its_manager(name: str) -> None:
    case = CASES[name]
    assert case.sides == ((LIBRARY,) if case.manager is None else (LIBRARY, MANAGER))
    if case.obstacle() is not None or case.manager is None:
        return
    module, _, manager = case.manager.partition(":")
    config = getattr(importlib.import_module(module), manager).Config(enable=True, **case.settings)
    assert {key: getattr(config, key) for key in case.settings} == case.settings


def test_every_mode_of_the_manager_is_a_case() -> None:
    modes = {case.settings.get("async_mode") for case in CASES.values() if case.manager}
    assert {"disabled", "async", "async_with_pinned_mem"} <= modes
    without = (dataclasses.replace(case, second_how=None) for case in LOAD_CASES.values())
    assert all(case in CASES.values() for case in without)


def test_what_is_missing_is_left_out_with_a_reason() -> None:
    case = dataclasses.replace(CASES["dcp-async"], needs="no_such_package")
    assert case.obstacle() == "the package no_such_package is not installed"
    case = dataclasses.replace(CASES["dcp-async"], manager="torchtitan.no_such_module:Manager")
    assert case.obstacle() == "there is no torchtitan.no_such_module.Manager in this version"
    assert CASES["dcp-async"].obstacle() is None


def test_every_mode_is_measured_with_digests_and_every_check_over_none() -> None:
    assert DIGEST_CASES.keys() == CASES.keys() and VERIFY_CASES.keys() == LOAD_CASES.keys()
    assert all(variants.case.manager for variants in DIGEST_CASES.values())
    assert {mode for variants in VERIFY_CASES.values() for mode in variants.sides} == set(Verify)
    assert all(variants.sides[0] == Verify.OFF for variants in VERIFY_CASES.values())


def test_a_save_that_has_digests_where_it_should_not_is_not_measured(tmp_path: Path) -> None:
    variants = DIGEST_CASES["dcp-async"]
    variants.check("without", tmp_path)
    with pytest.raises(RuntimeError, match="has no manifest.json, so this would measure nothing"):
        variants.check("with", tmp_path)
    (tmp_path / MANIFEST).touch()
    variants.check("with", tmp_path)
    with pytest.raises(RuntimeError, match="has a manifest.json, so this would measure nothing"):
        variants.check("without", tmp_path)


def test_cells_are_those_of_the_parts_and_cases_that_were_asked_for() -> None:
    options = CheckpointOptions(ranks=(1,), parts=PARTS, cases=("tc-async", "dcp-pinned"))
    by_part: dict[str, list[str]] = {}
    for cell in cells_of(options):
        assert cell.case in TABLES[cell.part]
        by_part.setdefault(cell.part, []).append(cell.case)
    modes, formats = ["dcp-pinned", "tc-async"], ["dcp", "tc"]
    assert {part: sorted(cases) for part, cases in by_part.items()} == {
        "save": modes,
        "growth": modes,
        "digests": modes,
        "load": formats,
        "verify": formats,
    }


@pytest.mark.parametrize(
    ("case", "files"),
    [
        (CASES["dcp-async"], {"__0_0.distcp": 3, "__1_0.distcp": 5, ".metadata": 1}),
        (CASES["tc-sync"], {"model_0.pt": 3, "model_1.pt": 4, "rank_1.pt": 1, "metadata.pkl": 1}),
    ],
    ids=["dcp", "tc"],
)
def test_bytes_are_those_of_the_rank_in_the_name(
    case: Case, files: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    for name, size in files.items():
        (folder / name).write_bytes(b"x" * size)
    assert bytes_by_rank(folder, case.rank_pattern, 2) == [4, 5]
