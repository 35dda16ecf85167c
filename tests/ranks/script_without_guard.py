"""A user's program, to be run as it is: it has no ``if __name__ == "__main__"`` around what it does.

python -m tests.ranks.script_without_guard <folder> -> one JSON line
"""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from tests.ranks.pinned_runs import writer_pid
from tests.ranks.traps import run_with
from tests.unit_tests.components.checkpointer.runs import message_of
from tests.unit_tests.components.checkpointer.ways import saves_in_background


class OfThisProgram:
    """Something that no other program can import."""

    rows = 3


# It is data: to make one runs nothing.
torch.serialization.add_safe_globals([OfThisProgram])

folder = Path(sys.argv[1])
with (folder / "runs of the program").open("a") as runs:
    runs.write("one\n")

# As a user may not raise it again: for each tensor of a save to have a descriptor, it is too low.
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
tensors = {f"tensor {number}": torch.tensor([number, -number]) for number in range(1500)}
run = run_with(folder, extra={"many": tensors})
extra = run.manager.states["extra"]
run.train(1)
first = writer_pid(run)
extra.values["call"] = lambda: 1
message = message_of(run.train, 2)
if message == "nothing was raised":
    message = message_of(run.manager.maybe_wait_for_saving)  # a thread has begun that save
del extra.values["call"]
run.train(3)
run.manager.maybe_wait_for_saving()
is_background = saves_in_background(run.manager), writer_pid(run) == first
extra.values["own"] = OfThisProgram()
run.train(4)
run.manager.maybe_wait_for_saving()

other = run_with(folder, seed=2, extra={"many": {}})
other.manager.load()
loaded: dict[str, Any] = other.manager.states["extra"].values
print(
    json.dumps(
        {
            "message": message,
            "saves in the background": is_background,
            "step": other.step,
            "same": other.snapshot() == run.snapshot(),
            "many": loaded["many"]["tensor 1499"].tolist(),
            "own": loaded["own"].rows,
            "writer": first,
        }
    )
)
# It ends without closing anything.
