"""The last line of a run, from what was typed and what lies on the disk."""

import os
import shlex

import pytest
from torchtitan.farewell import Command, last_line, only_told, read_command, was_raised_inside

SECTIONS = ["checkpoint", "training", "dataloader", "activation_checkpoint"]


def go_on(typed: str, steps: int | None = None) -> str:
    return Command(start="run", arguments=shlex.split(typed)).to_go_on(SECTIONS, steps)


@pytest.mark.parametrize(
    "typed",
    [
        "--checkpoint.load_step 40",
        "--checkpoint.load-step=40",
        "--checkpoint.load_step -1",
        "--checkpoint.create_seed_checkpoint",
        "--checkpoint.create-seed-checkpoint",
        "--checkpoint.no_create_seed_checkpoint",
        "--checkpoint.no-create-seed-checkpoint",
        "--checkpoint.exclude_from_loading optimizer,dataloader",
        "--checkpoint.exclude-from-loading=optimizer",
        "--checkpoint.initial_load_path '/a folder/step-7'",
        "--checkpoint.initial-load-path=/a/step-7",
        "--checkpoint.initial_load_model_only",
        "--checkpoint.no-initial-load-model-only",
        "--checkpoint.initial_load_in_hf",
        "--checkpoint.no_initial_load_in_hf_quantized",
    ],
)
def test_what_chose_the_beginning_of_the_run_is_not_repeated(typed: str) -> None:
    assert go_on(f"--a 1 {typed} --b=2") == "run --a 1 --b=2"
    assert go_on(typed) == "run"


def test_what_chose_a_beginning_that_no_checkpoint_holds_is_repeated() -> None:
    kept = "--checkpoint.load_step 40 --checkpoint.exclude-from-loading=optimizer --a x:y"
    command = Command(
        start="run", arguments=[*shlex.split(kept), "--checkpoint.create_seed_checkpoint"]
    )
    assert command.to_go_on(SECTIONS, begins_as_told=True) == f"run {kept}"
    assert command.to_go_on(SECTIONS, 9, begins_as_told=True) == f"run {kept} --training.steps 9"


def test_everything_else_is_repeated_as_it_was_typed() -> None:
    kept = (
        "--checkpoint.no-enable --checkpoint.load_only --checkpoint.interval=3 --dump_folder 'two words' "
        "--training.steps 50 --dataloader.files 'a b:c' ''"
    )
    assert go_on(kept) == f"run {kept}"


@pytest.mark.parametrize(
    "typed",
    ["--training.steps 50", "--training.steps=50", "--training.steps 20 --training.steps=5"],
)
def test_a_new_number_of_steps_takes_the_place_of_the_old_one(typed: str) -> None:
    assert go_on(f"{typed} --a", 100) == "run --a --training.steps 100"
    assert go_on("", 100) == "run --training.steps 100"


@pytest.mark.parametrize("name", ["activation-checkpoint", "activation_checkpoint", "dataloader.x"])
def test_flags_of_the_run_stay_before_a_subcommand(name: str) -> None:
    subcommand = f"{name}:full --{name}.load-step 4"
    typed = f"--training.steps 50 --checkpoint.load_step 4 --a x:y {subcommand}"
    assert go_on(typed, 100) == f"run --a x:y --training.steps 100 {subcommand}"
    assert go_on(subcommand, 100) == f"run --training.steps 100 {subcommand}"


def test_the_command_is_what_the_user_typed_ready_for_a_shell() -> None:
    typed = "'NGPU=4' 'TORCHRUN_ARGS=--max-restarts 3' './a clone/run_train.sh' '--a' 'it'\\''s' ''"
    command = read_command({"TORCHTITAN_COMMAND": typed}, ["not", "these"])
    assert command.to_go_on([]) == (
        "NGPU=4 TORCHRUN_ARGS='--max-restarts 3' './a clone/run_train.sh' --a 'it'\"'\"'s' ''"
    )


@pytest.mark.parametrize("unusable", ["", "NGPU=4", "an 'open quote"])
def test_ranks_started_by_hand_are_told_their_own_arguments(unusable: str) -> None:
    for environment in ({}, {"TORCHTITAN_COMMAND": unusable}):
        command = read_command(environment, ["--dump_folder", "two words"])
        expected = "torchrun ... -m torchtitan.train --dump_folder 'two words'"
        assert command.to_go_on(SECTIONS) == expected


def test_the_newest_full_checkpoint_is_named_with_the_command_that_takes_it() -> None:
    line = last_line("/run/checkpoint/step-8", None, command="run --a")
    assert line == "Newest checkpoint: /run/checkpoint/step-8. To go on from it: run --a"


@pytest.mark.parametrize(
    ("load_step", "excluded", "told"),
    [
        (8, [], "go back to step 8"),
        (0, [], "go back to step 0"),
        (-1, ["dataloader", "rank_state"], "leave out dataloader, rank_state"),
        (8, ["dataloader"], "go back to step 8 and to leave out dataloader"),
        # What any start would do need not be told it.
        (-1, [], ""),
        (16, [], ""),
    ],
)
def test_what_only_the_command_knows_of_the_beginning_is_told(
    load_step: int, excluded: list[str], told: str
) -> None:
    newest = "/run/checkpoint/step-16"
    assert only_told(newest, load_step=load_step, excluded=excluded) == told


def test_what_was_told_in_vain_so_far_is_told_again_and_nothing_newer_is_offered() -> None:
    newest, command = "/run/checkpoint/step-16", "run --checkpoint.load_step 8"
    line = last_line(newest, None, command=command, told="go back to step 8")
    assert line == (
        "No full checkpoint was saved since this run was told to go back to step 8. To do that again: "
        "run --checkpoint.load_step 8"
    )


def test_an_export_is_named_as_what_it_is_beside_the_full_one() -> None:
    line = last_line("/run/checkpoint/step-8", "/run/checkpoint/step-10", command="run")
    assert line == (
        "Exported /run/checkpoint/step-10 (weights only, cannot be resumed from). "
        "Newest checkpoint: /run/checkpoint/step-8. To go on from it: run"
    )


def test_with_an_export_alone_no_command_is_offered_that_would_be_refused() -> None:
    line = last_line(None, "out/checkpoint/step-10", command="run --a")
    assert "To go on" not in line and "run --a" not in line
    assert line.startswith("Only weights were saved: out/checkpoint/step-10.")
    path = os.path.abspath("out/checkpoint/step-10")
    assert f"--checkpoint.initial_load_path {path} and a new --dump_folder" in line
    assert "--checkpoint.no-last-save-model-only" in line


def test_a_seed_is_there_to_begin_from_until_there_is_more() -> None:
    expected = "To begin from the seed checkpoint: run"
    assert last_line(None, None, command="run", has_seed=True) == expected
    assert last_line(None, "/run/checkpoint/step-0", command="run") == expected
    line = last_line("/run/checkpoint/step-8", None, command="run", has_seed=True)
    assert line.startswith("Newest checkpoint: /run/checkpoint/step-8.")


def test_without_any_checkpoint_it_says_so() -> None:
    assert last_line(None, None, command="run") == "No checkpoint was saved."


def test_an_error_tells_where_it_came_from() -> None:
    def inner() -> None:
        raise ValueError

    def outer() -> None:
        inner()

    def other() -> None:
        pass

    with pytest.raises(ValueError) as raised:
        outer()
    assert was_raised_inside(raised.value, inner.__code__)
    assert was_raised_inside(raised.value, outer.__code__)
    assert not was_raised_inside(raised.value, other.__code__)
