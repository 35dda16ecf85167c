"""Whether there is data to train on, and whether documents and tokenizer fit each other."""

import logging
from collections.abc import Iterator

from torchtitan.components.data import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
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
    tokenizer = _tokenizer(config)
    yield from config.dataloader.check(**sizes, tokenizer=tokenizer)
    if config.validator.enable:
        yield from config.validator.check(**sizes, tokenizer=tokenizer)


def _tokenizer(config: Trainer.Config) -> BaseTokenizer | None:
    """The tokenizer, to see whether it has what the data needs; None for one that cannot be read."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return config.tokenizer.build(tokenizer_path=config.hf_assets_path)
    # Whatever is wrong with its files is reported with the model.
    except Exception:
        return None
    finally:
        logging.disable(before)
