"""Whether a run can write where it is told to."""

import os
import tempfile
from collections.abc import Iterator

from torchtitan.tools import filesystem
from torchtitan.trainer import Trainer


def folder_problems(config: Trainer.Config) -> Iterator[str]:
    """Folders and files in which nothing can be written, each under the flag that names it."""
    yield from _home_problems(config)
    base = config.dump_folder
    if filesystem.is_remote(base):
        return  # refused as such
    if problem := write_problem("--dump_folder", base):
        yield problem
        return  # what lies below it has the same fault
    metrics, profiler = config.metrics, config.profiler
    below = {
        "--metrics.save_tb_folder": (metrics.enable_tensorboard, metrics.save_tb_folder),
        "--profiler.save_traces_folder": (profiler.enable_profiling, profiler.save_traces_folder),
        "--profiler.save_memory_snapshot_folder": (
            profiler.enable_memory_snapshot,
            profiler.save_memory_snapshot_folder,
        ),
    }
    for flag, (is_used, folder) in below.items():
        if is_used and (problem := write_problem(flag, os.path.join(base, folder))):
            yield problem
    if config.debug.save_config_file:
        yield from _config_file_problems(base, config.debug.save_config_file)


def _home_problems(config: Trainer.Config) -> Iterator[str]:
    # A shell expands it only at the start of a word, so not in --dump_folder=~/x.
    paths = {"--dump_folder": config.dump_folder, "--hf_assets_path": config.hf_assets_path}
    if config.checkpoint.enable:
        paths["--checkpoint.folder"] = config.checkpoint.folder
        paths["--checkpoint.initial_load_path"] = config.checkpoint.initial_load_path or ""
    for flag, path in paths.items():
        if path.startswith("~"):
            yield f"{flag} {path} starts with ~, which is not expanded; write the path out."


def write_problem(flag: str, folder: str) -> str | None:
    """Why no file can be made in ``folder``, or where ``folder`` would be made; None if one can."""
    existing = os.path.abspath(folder)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    try:
        # Permissions alone do not tell: a file system may be mounted read-only, or be full.
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return (
            f"{flag} {folder} cannot be written ({existing}: {error.strerror}); choose "
            "another one or make it writable."
        )


def _config_file_problems(base: str, name: str) -> Iterator[str]:
    flag, path = "--debug.save_config_file", os.path.abspath(os.path.join(base, name))
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        yield f"{flag} {name}: {path} is a folder; name a file."
    elif os.path.exists(path) and not os.access(path, os.W_OK):
        yield f"{flag} {name}: {path} cannot be written; name another file."
    elif folder != os.path.abspath(base) and not os.path.isdir(folder):
        yield (
            f"{flag} {name}: the folder {folder} does not exist; make it, or name a file directly "
            "in the dump folder."
        )
    elif problem := write_problem(flag, folder):
        yield problem
