"""What is read back from the logs of a run: all of the time, each step once, and honest gaps."""

from pathlib import Path

import pytest
from hypothesis import given, HealthCheck, settings, strategies as st
from torchtitan.observability import structured_logger as sl
from torchtitan.observability.run_log import read_rank_log, read_run, run as run_module

from tests.unit_tests.observability.written import BACKGROUND, MAIN, Rank, two_starts, writer_of

LOSS = "loss_metrics/global_avg_loss"
SPANS = ["step", "fetching_batch", "fwd_bwd", "optim", "checkpoint_save", "eval", "unlisted"]


def test_time_belongs_to_the_innermost_listed_span(tmp_path: Path) -> None:
    log = Rank(tmp_path)
    log.now += 3
    log.takes("model_parallelism_init", 2)
    log.takes("checkpoint_load", 4)
    log.begin_step(1)
    with log.span("step", 0.5):
        log.takes("fetching_batch", 1)
        with log.span("optim", 2):
            log.takes("checkpoint_wait_staging", 0.25)
        with log.span("eval", 3):
            log.takes("Loader.Config.build", 5)
        log.takes("mine", 7)
    log.now += 6
    log.end()
    found = read_rank_log(log.path)
    assert dict(found.seconds_by_part) == {
        "start-up": 5,
        "checkpoint load": 4,
        "data": 1,
        "update": 2,
        "checkpoint wait": 0.25,
        "validation": 8,
        "mine": 7,
        "rest of the step": 0.5,
        "outside of the steps": 6,
    }
    assert found.seconds == 33.75 and found.step_seconds == {1: 18.75}
    assert found.closed_in_order and not found.open_spans


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.sampled_from(SPANS), st.booleans(), st.integers(-2, 9)), max_size=40))
def test_the_parts_add_up_to_the_whole_whatever_was_cut_off(tmp_path: Path, moves) -> None:
    log = Rank(tmp_path)
    for index, (name, opens, seconds) in enumerate(moves):
        log.now += seconds  # a clock may be set back
        log.begin_step(index)
        log.write("event", f"{name}_{'start' if opens else 'end'}")
    found = read_rank_log(log.path)
    assert sum(found.seconds_by_part.values()) == pytest.approx(found.seconds)
    assert min(found.seconds_by_part.values(), default=0) >= 0


def test_other_threads_and_instants_take_no_time(tmp_path: Path) -> None:
    log = Rank(tmp_path)
    log.write("event", "optim_start", tid=BACKGROUND)
    log.write("instant", "training_start")
    log.now += 1
    log.scalar("checkpoint/step", 3, thread=BACKGROUND)
    log.write("instant", "optim_start")
    log.now += 1
    log.write("instant", "training_start")
    assert dict(read_rank_log(log.path).seconds_by_part) == {"start-up": 2}


def test_what_a_kill_leaves_is_read_up_to_there(tmp_path: Path) -> None:
    log = Rank(tmp_path)
    log.begin_step(1)
    log.write("event", "step_start")
    log.write("event", "checkpoint_save_start")
    log.now += 2
    log.scalar(LOSS, 5.0)
    log.cut_off()
    found = read_rank_log(log.path)
    assert found.seconds_by_part["checkpoint save"] == 2
    assert found.open_spans == ["step", "checkpoint_save"] and not found.step_seconds
    assert (found.broken.cut_off, found.broken.damaged) == (1, 0)


def test_damaged_lines_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    log = Rank(tmp_path)
    log.damage()
    log.train(range(1, 3))
    found = read_rank_log(log.path)
    assert (found.broken.cut_off, found.broken.damaged) == (0, 2)
    assert found.scalars[LOSS] == {1: 1, 2: 2}


def test_the_first_error_is_kept_with_its_place(tmp_path: Path) -> None:
    log = Rank(tmp_path)
    log.begin_step(1)
    log.write("event", "step_start")
    for name in ("fwd_bwd", "step"):
        log.write("event", f"{name}_error", message=f"{name} error ValueError: row 7")
        log.write("event", f"{name}_end")
    found = read_rank_log(log.path)
    assert found.error == "ValueError: row 7 (in fwd_bwd)" and not found.step_seconds
    log.train(range(2, 3))  # somebody caught it and went on
    assert read_rank_log(log.path).error is None


def test_only_a_step_that_updated_the_parameters_counts(tmp_path: Path) -> None:
    log = Rank(tmp_path)
    log.train(range(1, 3))
    log.begin_step(3)
    with log.span("step", 1):  # the data is used up
        log.takes("fetching_batch", 1)
    assert sorted(read_rank_log(log.path).step_seconds) == [1, 2]


def test_values_of_saves_belong_to_the_save_of_their_thread(tmp_path: Path) -> None:
    log = Rank(tmp_path)
    log.scalar("checkpoint/step", 4, thread=1)
    log.scalar("checkpoint/step", 5, thread=2)
    log.scalar("checkpoint/size(MiB)", 44, thread=1)
    log.scalar("checkpoint/failed", 1, thread=2)
    four, five = read_run(tmp_path).saves()
    assert (four.step, four.size_mebibytes, four.failed) == (4, 44, False)
    assert (five.step, five.size_mebibytes, five.failed) == (5, None, True)


def test_the_age_of_the_newest_checkpoint_is_a_curve_and_no_part_of_a_save(tmp_path: Path) -> None:
    log = Rank(tmp_path)
    log.train(range(4, 5))
    log.save(4, thread=MAIN, blocked=0.5)  # training waited for it, so both come from one thread
    log.begin_step(5)
    log.scalar("checkpoint/age(steps)", 1)
    assert read_run(tmp_path).curve("checkpoint/age(steps)") == {5: 1}


def test_a_later_start_replaces_what_it_did_again(tmp_path: Path) -> None:
    two_starts(tmp_path)
    run = read_run(tmp_path)
    assert [(s.resumed_after, s.last_step, sorted(s.ranks)) for s in run.starts] == [
        (0, 7, [0, 1]),
        (4, 10, [0, 1]),
    ]
    assert run.curve(LOSS) == {n: n + 0.5 * (n > 4) for n in range(1, 11)}
    assert run.curve("throughput(tps)") == dict.fromkeys(range(1, 11), 100.5)
    num_lost, seconds = run.lost_steps()
    assert num_lost == 3 and seconds == pytest.approx(3 * 1.3)
    assert [s.closed_in_order for s in run.starts] == [False, True]


def test_a_start_that_went_back_cuts_the_curve(tmp_path: Path) -> None:
    Rank(tmp_path, at=1000).train(range(1, 10))
    Rank(tmp_path, at=1100).train(range(4, 6))
    Rank(tmp_path, at=1200)  # found nothing to do, so it replaces nothing
    assert sorted(read_run(tmp_path).curve(LOSS)) == [1, 2, 3, 4, 5]


def test_a_rank_that_is_late_makes_the_others_wait(tmp_path: Path) -> None:
    for rank, data in ((0, 0.1), (1, 0.4)):
        Rank(tmp_path, rank).train(range(1, 2), data=data)
    (start,) = read_run(tmp_path).starts
    assert start.waits() == pytest.approx({0: 0.3, 1: 0.0})


def test_restarts_with_other_ranks_are_starts_of_their_own(tmp_path: Path) -> None:
    Rank(tmp_path, 0, at=1000).train(range(1, 3))
    for rank in (1, 0):  # the first to write is a rank that the start before did not have
        Rank(tmp_path, rank, at=1100 - rank / 8).train(range(3, 5))
    assert [sorted(start.ranks) for start in read_run(tmp_path).starts] == [[0], [0, 1]]


def test_a_rank_is_in_a_start_once_also_if_the_clocks_disagree(tmp_path: Path) -> None:
    Rank(tmp_path, 0, at=1000).train(range(1, 9))
    Rank(tmp_path, 0, at=1005).train(range(9, 11))
    assert [start.last_step for start in read_run(tmp_path).starts] == [8, 10]


def test_a_process_that_works_for_a_rank_is_no_start_and_takes_no_time_of_it(
    tmp_path: Path,
) -> None:
    two_starts(tmp_path)
    alone = read_run(tmp_path)
    for rank in (0, 1):
        writer_of(tmp_path, rank, at=1001)
        writer_of(tmp_path, rank, at=1101)
    together = read_run(tmp_path)
    assert together.starts == alone.starts and together.names() == alone.names()
    assert sorted(log.rank for log in together.helpers) == [0, 0, 1, 1] and not alone.helpers


def test_a_damaged_file_of_a_helper_is_counted(tmp_path: Path) -> None:
    Rank(tmp_path).train(range(1, 2))
    Rank(tmp_path, source="training.writer").damage()
    assert sum(broken.damaged for broken in read_run(tmp_path).broken()) == 2


def test_a_source_with_a_dot_that_works_for_nobody_is_a_start(tmp_path: Path) -> None:
    Rank(tmp_path, source="my.program").train(range(1, 2))
    run = read_run(tmp_path)
    assert len(run.starts) == 1 and not run.helpers


def test_events_of_a_library_in_the_main_thread_leave_the_parts_as_they_were(
    tmp_path: Path,
) -> None:
    log = Rank(tmp_path)
    log.begin_step(1)
    with log.span("step", 1), log.span("checkpoint_save", 2):
        log.write("event", "checkpoint_staging_start")  # it failed, and nothing says that it ended
        log.now += 4
        log.write("event", "log_metric", event_name="gather.latency_ms", value=4000)
    found = read_rank_log(log.path)
    assert dict(found.seconds_by_part) == {
        "start-up": 0,
        "checkpoint save": 6,
        "rest of the step": 1,
    }
    assert not found.open_spans and not found.scalars


def test_a_folder_without_logs_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no structured logs in {tmp_path}"):
        read_run(tmp_path)


def test_files_of_another_kind_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a document"}\n')
    with pytest.raises(FileNotFoundError, match=f"no record of a run in data.jsonl in {tmp_path}"):
        read_run(tmp_path)


def test_large_logs_are_read_by_several_processes(tmp_path: Path, monkeypatch) -> None:
    two_starts(tmp_path)
    alone = read_run(tmp_path)
    monkeypatch.setattr(run_module, "_ALONE_BYTES", 0)
    assert read_run(tmp_path) == alone


@pytest.mark.usefixtures("fresh_structured_logger")
def test_the_real_logger_writes_what_is_read(tmp_path: Path) -> None:
    sl.init_structured_logger("training", str(tmp_path), rank=3)
    sl.set_step(8, relative_step=2)

    @sl.log_trace_span("step")
    def step() -> None:
        for name in ("fetching_batch", "optim"):
            with sl.log_trace_span(name):
                pass
        sl.add_step_tag("gc")
        sl.log_trace_scalar({LOSS: 2.5, "checkpoint/step": 6, "checkpoint/durable(s)": 0.5})
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        step()
    ((rank, log),) = read_run(tmp_path).starts[0].ranks.items()
    assert rank == 3 and log.resumed_after == 6 and list(log.step_seconds) == [8]
    assert log.scalars[LOSS] == {8: 2.5} and log.step_tags == {8: ["gc"]}
    assert log.error == "ValueError: mine (in step)"
    assert [(save.step, save.durable_seconds) for save in log.saves] == [(6, 0.5)]
    assert set(log.seconds_by_part) >= {"rest of the step", "data"}
