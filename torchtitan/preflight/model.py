"""Whether model, tokenizer, loss and optimizer fit each other.

The model is built for real, on the meta device, which takes no memory and at most half a second, so
that overrides, param groups and activation checkpointing meet the modules they name.

    overrides -> model (meta) -> loss, tokenizer: its vocabulary
                              -> activation checkpointing, param groups: its parameters
"""

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from torchtitan import assembly
from torchtitan.components.loss import BaseLoss
from torchtitan.config.override import problems as override_problems
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC
from torchtitan.protocols import BaseModel
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer


def fit(config: Trainer.Config) -> tuple[Trainer.Config, list[str]]:
    """``config`` as the run will use it, as far as that is possible, and what is in the way."""
    found = override_problems(config.override, config)
    if config.model_spec is None or config.training.max_context_length <= 0:
        return config, found  # reported elsewhere
    try:
        with _silence():
            return assembly.fitted(config), found
    # TypeError: an override was given options that it does not have.
    except (ValueError, NotImplementedError, ImportError, TypeError) as error:
        return config, list(dict.fromkeys([*found, str(error)]))


def model_problems(config: Trainer.Config) -> Iterator[str]:
    """What keeps the model of a fitted ``config`` from being built and updated."""
    if type(config.loss) is BaseLoss.Config:
        yield "The recipe sets no loss; CrossEntropyLoss.Config() is the usual one."
    num_tokens, tokenizer_problems = _read_tokenizer(config)
    yield from tokenizer_problems
    yield from config.metrics.check()
    yield from config.lr_scheduler.check(training_steps=config.training.steps)
    spec = config.model_spec
    if spec is None:
        yield "The recipe sets no model_spec, so there is no model to train."
        return
    with _silence():
        yield from _built_model_problems(config)
    vocab_size = getattr(spec.model, "vocab_size", None)
    if (per_rank := config.training.num_tokens_per_microbatch_per_dp_rank) > 0:
        yield from config.loss.check(num_tokens_per_batch=per_rank, vocab_size=vocab_size)
    if num_tokens is not None and vocab_size is not None and num_tokens > vocab_size:
        yield (
            f"The tokenizer in --hf_assets_path {config.hf_assets_path} has {num_tokens} tokens, "
            f"but the model {spec.name} {spec.flavor} has a vocabulary of {vocab_size}. Use a "
            "tokenizer that fits, or a model of that vocabulary."
        )


@contextmanager
def _silence() -> Generator[None]:
    # The run says the same lines when it builds the same things in earnest.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _built_model_problems(config: Trainer.Config) -> list[str]:
    found = []
    try:
        model: BaseModel = assembly.build_model(config)
    except (ValueError, RuntimeError) as error:
        return [str(error)]
    # A seed checkpoint is made without it.
    is_seed = config.checkpoint.create_seed_checkpoint
    checkpointing = None if is_seed else config.activation_checkpoint
    # That one changes settings of the compiler, and needs one.
    if checkpointing is not None and not isinstance(checkpointing, MemoryBudgetAC.Config):
        try:
            checkpointing.build(dump_folder=config.dump_folder).apply(model)
        except ValueError as error:
            found.append(str(error))
    on_cpu = config.training.enable_cpu_offload
    found += config.optimizer.check(model=model, device_type="cpu" if on_cpu else device_type)
    return found


def _read_tokenizer(config: Trainer.Config) -> tuple[int | None, list[str]]:
    """The number of tokens, and what keeps the tokenizer from being read."""
    path = config.hf_assets_path
    if missing := config.tokenizer.check(tokenizer_path=path):
        return None, missing
    try:
        with _silence():
            return config.tokenizer.build(tokenizer_path=path).get_vocab_size(), []
    # Anything: the files are the user's, and the library raises plain Exceptions for them.
    except Exception as error:
        detail = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return None, [f"The tokenizer in --hf_assets_path {path} cannot be used: {detail}"]
