"""Import modules in processes that hold nothing of ours yet, and tell what went wrong.

Run as a program: a JSON list of lists of module names comes in, a list of tracebacks goes out
("" for a list that could be imported in its order). Each list gets a fork of a process that has
loaded the third-party packages only, which costs a tenth of a new interpreter.

    test_imports.py -> python fresh_imports.py -> fork -> import a, import b, ... -> traceback or ""
"""

import importlib
import json
import os
import sys
import traceback

# Slow to load and needed by nearly every module. A package that is absent is a finding of the fork.
PRELOADED = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "tyro",
    "grain",
    "tokenizers",
]
# Packages that a machine without a GPU may lack.
GPU_ONLY = ["triton", "pynvml", "cupy"]


def import_all(names: list[str]) -> str:
    """Import ``names`` in order and return the traceback of the first failure."""
    import torch

    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit):
            return traceback.format_exc()
    if torch.cuda.is_initialized():
        return f"importing {names} initialised CUDA"
    return ""


def in_fork(names: list[str]) -> str:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, import_all(names).encode()[-60_000:])
        # Not sys.exit: what the parent registered for its end is not the child's to run.
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        outcome = pipe.read()
    _, status = os.waitpid(child, 0)
    return outcome or (f"importing {names} ended the process: {status}" if status else "")


def main() -> None:
    cases: list[list[str]] = json.load(sys.stdin)
    for name in GPU_ONLY:
        # None makes the import statement raise ImportError, as where it is not installed.
        sys.modules[name] = None  # type: ignore[assignment] the documented way to bar an import
    for name in PRELOADED:
        try:
            importlib.import_module(name)
        except ImportError:
            pass
    json.dump([in_fork(names) for names in cases], sys.stdout)


if __name__ == "__main__":
    main()
