"""Whether there is data to train on, and whether its documents can be read."""

from collections.abc import Iterator

from torchtitan.components.data import BaseDataLoader
from torchtitan.config.violations import speaks
from torchtitan.trainer import Trainer


def data_problems(config: Trainer.Config) -> Iterator[str]:
    """What keeps the training and the validation data from being read."""
    if type(config.dataloader) is BaseDataLoader.Config:
        yield "The recipe sets no dataloader, so there is nothing to train on."
    training = config.training
    sizes = {
        "max_context_length": training.max_context_length,
        "num_tokens_per_batch": training.num_tokens_per_microbatch_per_dp_rank,
    }
    if min(sizes.values()) <= 0:
        return  # reported as a violation of that field already
    # One rank reads for all of its machine: the files are large, and when it ends the launcher ends
    # the others.
    if not speaks():
        return
    yield from config.dataloader.check(**sizes)
    if config.validator.enable:
        yield from config.validator.check(**sizes)
