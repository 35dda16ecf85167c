"""What every test starts from: no settings of a launcher, one thread, the same random examples.

Runs before any test module imports torch, which reads the number of threads once.
"""

import os
from typing import Any

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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tell what a test failed with that passed when it was tried again (run_tests.sh in CI)."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"{report.nodeid} failed at first with")
        terminalreporter.line(report.longreprtext)
