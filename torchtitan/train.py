"""Entry point of a rank: ``python -m torchtitan.train --module llama3 --config llama3_jargon``.

    parse and check -> build the trainer -> train -> close -> exit code

Exit codes: 0 the run is done, 1 it failed, 2 its settings cannot be used, 128 + n ended by signal n.
"""

import dataclasses
import os
import signal
import sys

if __name__ == "__main__":
    # Ctrl-C during the seconds that the imports below take: the end, but no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch.distributed as dist

from torchtitan import __version__, farewell
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer.waiting import leave_if_given_up
from torchtitan.observability import structured_logger as sl
from torchtitan.preflight import parse_or_exit
from torchtitan.tools.lasting_output import fill_closed_descriptors
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.signals import stop_with_launcher, StopRequested, StopSignals
from torchtitan.trainer import Trainer


def main() -> None:
    """Train as the command line says; the exit code says how it ended."""
    fill_closed_descriptors()
    init_logger()
    with StopSignals() as signals:
        stop_with_launcher()
        try:
            run(_prepare())
        except StopRequested as stop:
            sys.exit(stop.exit_code)
        except Exception:
            # A rank that was inside a collective feels the stop of the others before its own.
            if signals.received is not None:
                sys.exit(signals.received.exit_code)
            raise


def _prepare() -> Trainer.Config:
    config = parse_or_exit()
    logger.info(f"torchtitan {__version__}")
    sl.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        # A process that plays a rank is no start of the run whose folder it borrows.
        enable=config.debug.enable_structured_logging and config.comm.mode == "default",
    )
    sl.log_trace_instant("structured_logger_started")
    return config


def run(config: Trainer.Config) -> None:
    """Build, train and close one trainer; of several errors the first is raised."""
    trainer = config.build()
    try:
        if config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            logger.info("Created seed checkpoint")
        else:
            trainer.train()
        trainer.close()
    except BaseException as error:
        _close_after(error, trainer)
        raise
    last_line = _last_line(trainer, has_seed=config.checkpoint.create_seed_checkpoint)
    trainer.peers.close()
    with sl.log_trace_span("torch_distributed_teardown"):
        dist.destroy_process_group()
    logger.info("Process group destroyed")
    _say(last_line)


def _close_after(first: BaseException, trainer: Trainer) -> None:
    try:
        # Again, if closing was what failed: a part that is closed already does nothing.
        trainer.close()
    except Exception as error:
        # The error that came first is the one to raise; this one must not hide it.
        logger.error(f"Closing after the error failed as well: {error}")
    failure = trainer.peers.first_failure()
    if isinstance(first, StopRequested):
        logger.warning(f"Stopped by {first}.")
    elif failure is not None and failure.is_stop:
        # What this rank felt is only that another one stopped before it.
        logger.warning(f"Stopped by {failure.reason}.")
    # The same command would fail to load again; that error says what to type instead.
    load = BaseCheckpointManager.load.__code__
    if not (isinstance(first, Exception) and farewell.was_raised_inside(first, load)):
        _say(_last_line(trainer))


def _say(line: str | None) -> None:
    if line is not None:
        logger.info(line)


def _last_line(trainer: Trainer, *, has_seed: bool = False) -> str | None:
    checkpointer, chosen = trainer.checkpointer, trainer.config.checkpoint
    if not checkpointer.enable or dist.get_rank() != 0:
        return None
    try:
        newest, export = checkpointer.newest_checkpoint(), checkpointer.exported_checkpoint()
    except Exception as error:
        # What the run did is done and saved; it ends as it would have without this look.
        logger.warning(f"Could not look for the newest checkpoint: {error!r}")
        return None
    told = ""
    if newest is not None and not checkpointer.has_saved(newest):
        found = newest if export is None or checkpointer.has_saved(export) else export
        excluded = chosen.exclude_from_loading
        told = farewell.only_told(found, load_step=chosen.load_step, excluded=excluded)
    # A start that is not told a step takes the weights of a later one for the end of the run.
    reached = max(trainer.step, farewell.step_of(export) if chosen.load_step == -1 else 0)
    command = farewell.read_command(os.environ, sys.argv[1:]).to_go_on(
        [field.name for field in dataclasses.fields(trainer.config)],
        2 * reached if reached >= trainer.config.training.steps else None,
        begins_as_told=bool(told),
    )
    return farewell.last_line(newest, export, command=command, has_seed=has_seed, told=told)


if __name__ == "__main__":
    try:
        main()
    finally:
        leave_if_given_up()
