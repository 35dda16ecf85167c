"""Which lines of libraries the console leaves out, because this program says the same in fewer.

Only the console: the structured log takes the events of these libraries from the root logger, and so does
whoever adds a handler there. Libraries are known by the names of their loggers, none is imported.

    library -> root logger -> BriefFilter -> stdout
"""

import logging
import os

# It tells every part of every save and load in dozens of lines; the checkpoint manager tells each in one.
_CHECKPOINT_LIBRARY = "torch_checkpointing"

# Logger -> beginnings of its warnings that come with every save or load and ask nothing of the user.
_UNHELPFUL_WARNINGS = {
    # What a run needs is compared with what a checkpoint holds before anything is read, and what is
    # missing or has another shape is one error. Which rank owns a plain tensor is written down, too.
    f"{_CHECKPOINT_LIBRARY}.default_resharder": (
        "Found ",
        "Missing source metadata for path",
        "No source DTensor shard intersects target shard",
        "DefaultResharder.load: no load plans generated",
    ),
    f"{_CHECKPOINT_LIBRARY}.checkpoint_reader": ("Missing ",),
    # For each tensor in a process that writes checkpoints: it has no process groups and compiles nothing.
    "torch.distributed.device_mesh": ("It seems like pickling/unpickling of the DeviceMesh",),
}


class BriefFilter(logging.Filter):
    """Stops what the lines of this program say already."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is to be shown."""
        if record.levelno < logging.WARNING:
            return not _is_of_checkpoint_library(record)
        if record.levelno == logging.WARNING:
            return not str(record.msg).startswith(_UNHELPFUL_WARNINGS.get(record.name, ()))
        return True


def _is_of_checkpoint_library(record: logging.LogRecord) -> bool:
    if record.name == "root":
        # Some of its modules use the root logger: only the file tells.
        return os.path.basename(os.path.dirname(record.pathname)) == _CHECKPOINT_LIBRARY
    return record.name.partition(".")[0] == _CHECKPOINT_LIBRARY
