"""Read back what the structured logger of a run wrote: where the time went, curves, saves.

records (lines of one file) -> rank_log (one rank in one start) -> run (all starts of a run)
"""

from torchtitan.observability.run_log.rank_log import RankLog, read_rank_log, Save
from torchtitan.observability.run_log.records import BrokenLines, log_files, read_records
from torchtitan.observability.run_log.run import read_run, Run, Start

__all__ = [
    "BrokenLines",
    "RankLog",
    "Run",
    "Save",
    "Start",
    "log_files",
    "read_rank_log",
    "read_records",
    "read_run",
]
