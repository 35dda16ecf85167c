"""What every test starts from: no settings of a launcher, one thread, the same random examples.

Runs before any test module imports torch, which reads the number of threads once.
"""

import os
from typing import Any

import pytest
from hypothesis import settings

# Left in a shell by an earlier run, any of these would turn a test into another one.
for _name in list(os.environ):
    if _name in (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "NGPU", "NNODES", "LOG_RANK", "MODULE", "CONFIG"),
        *("COMM_MODE", "TORCHRUN_ARGS", "TORCHTITAN_COMMAND", "TORCHTITAN_DRY_RUN"),
        "TORCHTITAN_LAUNCHER_PID",
        # It would hide output that a pipe holds back.
        "PYTHONUNBUFFERED",
    ) or _name.startswith("TORCHELASTIC_"):
        del os.environ[_name]
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test may reach the network; the library looks at this once, when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

# A failure seen once has to be seen again, and a loaded machine is no failure.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")


_FEW_CRASH_POINTS = 1200
"""So many in all are tried unless more are asked for: over a thousand in about two minutes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let more crash points be tried than there is time for each day (tests/crash)."""
    parser.addoption(
        "--crash-points",
        type=lambda text: text if text == "all" else int(text),
        default=_FEW_CRASH_POINTS,
        metavar="NUMBER",
        help="how many states that a crash leaves are started from, about; or all of them",
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Tell what a test failed with that passed when it was tried again (run_tests.sh in CI).

    And how many crash points were tried.
    """
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"{report.nodeid} failed at first with")
        terminalreporter.line(report.longreprtext)
    _tell_crash_points(terminalreporter, is_long=config.getoption("--crash-points") == "all")


_TRIED = {
    "crash_points": "states that crashes leave were tried.",
    "faults": "errors of a disk or a store were tried, each at one operation of a run.",
}


def _tell_crash_points(terminalreporter: Any, *, is_long: bool) -> None:
    tried = [
        (name, value)
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        if report.when == "call"
        for name, value in report.user_properties
        if name in _TRIED
    ]
    if not tried:
        return
    terminalreporter.section("crash points")
    for name, words in _TRIED.items():
        cases = [value for kind, value in tried if kind == name]
        num_tried, num_there = (sum(each[place] for each in cases) for place in (1, 2))
        if cases:
            terminalreporter.line(f"{num_tried} of {num_there} {words}")
        for case, number, there in cases if is_long else ():
            terminalreporter.line(f"{number:6} of {there:6}  {case}")
