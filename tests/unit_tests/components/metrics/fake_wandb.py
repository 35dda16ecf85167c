"""A stand-in for the package wandb: one server, in memory, that holds runs by id.

It keeps to what the real one does as far as a run notices: steps only rise, a run that is resumed
knows its last step, a rewind cuts its history.
"""

from typing import Any

HISTORIES: dict[str, dict[int, dict[str, Any]]] = {}
STARTS: list[dict[str, Any]] = []
EXIT_CODES: list[int] = []


def init(**arguments: Any) -> "Run":
    if arguments["entity"] == "refused":
        raise ValueError("No API key configured.")
    STARTS.append({name: value for name, value in arguments.items() if value is not None})
    run_id = arguments.get("id") or arguments["resume_from"].partition("?")[0]
    history = HISTORIES.setdefault(run_id, {})
    if arguments.get("resume_from"):
        last = int(arguments["resume_from"].partition("=")[2])
        HISTORIES[run_id] = {step: history[step] for step in history if step <= last}
    return Run(run_id)


class Run:
    def __init__(self, run_id: str) -> None:
        self.id = run_id
        self.step = max(HISTORIES[run_id], default=-1) + 1

    def log(self, metrics: dict[str, Any], step: int) -> None:
        assert step >= self.step, "the real one warns and drops it"
        self.step = step
        HISTORIES[self.id].setdefault(step, {}).update(metrics)

    def finish(self, exit_code: int) -> None:
        EXIT_CODES.append(exit_code)
