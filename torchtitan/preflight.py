"""Find settings that cannot work, before a rank touches a disk, a device or the network.

    command line -> parse -> violations of single fields (collected while parsing)
                          -> problems: across sections, against the files, against the ranks
                          -> one message with all of them, exit code 2

The launcher runs this once in a plain process (``python -m torchtitan.preflight``), so that a
mistake costs seconds and one message; the ranks run it again, because they can be started without
the launcher. Nothing is written.
"""

import copy
import os
import tempfile
from collections.abc import Iterator

from torchtitan.components.checkpointer import (
    CheckpointManager,
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
)
from torchtitan.components.checkpointer.dcp_index import DcpStorage, own_folder
from torchtitan.components.checkpointer.errors import CheckpointError
from torchtitan.components.checkpointer.source import find_source, Request
from torchtitan.components.data import BaseDataLoader
from torchtitan.components.loss import BaseLoss
from torchtitan.config import ConfigManager
from torchtitan.config.recipes import CommandLineError
from torchtitan.config.violations import exit_with
from torchtitan.distributed.parallel_dims import problems as parallel_problems
from torchtitan.tools import filesystem
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

_STATE_KEYS = frozenset({OPTIMIZER, LR_SCHEDULER, DATALOADER, TRAIN_STATE})


def parse_or_exit(args: list[str] | None = None) -> Trainer.Config:
    """The config of a command line, checked.

    Raises:
        SystemExit: with code 2 and one message on stderr when the settings cannot be used;
            with 0 after ``--help``.
    """
    world_size = num_ranks()
    try:
        return ConfigManager(checks=lambda config: problems(config, world_size)).parse_args(args)
    except CommandLineError as error:
        exit_with([str(error)])


def num_ranks() -> int:
    """How many ranks the run has: WORLD_SIZE under a launcher, else NGPU, else 1.

    Raises:
        SystemExit: the variable is no positive number.
    """
    for name in ("WORLD_SIZE", "NGPU"):
        text = os.environ.get(name)
        if text:
            if not text.isdecimal() or int(text) < 1:
                exit_with([f"{name}={text!r} is not a number of ranks; set it to 1 or more."])
            return int(text)
    return 1


def problems(config: Trainer.Config, world_size: int) -> list[str]:
    """Everything that keeps ``config`` from running on ``world_size`` ranks, one message each.

    Stands fields that are wrong by themselves, which are reported elsewhere.
    """
    if not isinstance(config, Trainer.Config):
        return [f"The recipe made a {type(config).__name__}, which is not the config of a trainer."]
    found = [
        *_not_available(config),
        *_incomplete_recipe(config),
        *_layout(config, world_size),
        *_batch(config, world_size),
        *_model_and_tokenizer(config),
        *_data(config),
        *_dump_folder(config.dump_folder),
        *_checkpoint(config, world_size),
    ]
    return list(dict.fromkeys(found))


def _not_available(config: Trainer.Config) -> Iterator[str]:
    parallelism, checkpoint = config.parallelism, config.checkpoint
    degrees = {
        "data_parallel_replicate_degree": "replicating the model",
        "tensor_parallel_degree": "tensor parallelism",
        "pipeline_parallel_degree": "pipeline parallelism",
        "context_parallel_degree": "context parallelism",
        "expert_parallel_degree": "expert parallelism",
    }
    for name, meaning in degrees.items():
        if (degree := getattr(parallelism, name)) > 1:
            yield (
                f"--parallelism.{name} {degree}: {meaning} is not available yet; leave it at 1. "
                "All ranks then shard the model between them."
            )
    unavailable = {
        "--compile.enable": config.compile.enable,
        "--compile.enable-async-tensor-parallel": config.compile.enable_async_tensor_parallel,
        "--parallelism.enable-fsdp-symm-mem": parallelism.enable_fsdp_symm_mem,
        "--parallelism.num-pp-microbatches": parallelism.num_pp_microbatches > 1,
        "--parallelism.module-fqns-per-model-part": bool(parallelism.module_fqns_per_model_part),
        "--debug.moe-force-load-balance": config.debug.moe_force_load_balance,
        "--checkpoint.last-save-in-hf": checkpoint.last_save_in_hf,
        "--checkpoint.initial-load-in-hf": checkpoint.initial_load_in_hf,
        "--metrics.enable-wandb": config.metrics.enable_wandb,
    }
    for flag, is_on in unavailable.items():
        if is_on:
            yield f"{flag} is not available yet; leave it out."
    if config.training.enable_cpu_offload and device_type == "cpu":
        yield (
            "--training.enable_cpu_offload moves parameters from an accelerator to the CPU, but "
            "this machine has no accelerator; leave it out."
        )
    mode = getattr(checkpoint, "async_mode", "disabled")
    if mode == "async_with_pinned_mem":
        yield (
            "--checkpoint.async_mode async_with_pinned_mem is not available yet; use async, which "
            "copies to CPU memory before training goes on."
        )
    if config.comm.mode in ("local_tensor", "torchcomms"):
        yield f"--comm.mode {config.comm.mode} is not available; use default or fake_backend."
    paths = {
        "--dump_folder": config.dump_folder,
        "--checkpoint.folder": checkpoint.folder,
        "--checkpoint.initial_load_path": checkpoint.initial_load_path or "",
    }
    for flag, path in paths.items():
        if filesystem.is_remote(path):
            yield f"{flag} {path}: remote folders are not available yet; give a local path."


def _incomplete_recipe(config: Trainer.Config) -> Iterator[str]:
    if config.model_spec is None:
        yield "The recipe sets no model_spec, so there is no model to train."
    if type(config.loss) is BaseLoss.Config:
        yield "The recipe sets no loss; CrossEntropyLoss.Config() is the usual one."
    if type(config.dataloader) is BaseDataLoader.Config:
        yield "The recipe sets no dataloader, so there is nothing to train on."


def _layout(config: Trainer.Config, world_size: int) -> list[str]:
    degrees = [
        getattr(config.parallelism, name)
        for name in config.parallelism.__dataclass_fields__
        if name.endswith("_degree")
    ]
    if any(degree < 1 and degree != -1 for degree in degrees):
        return []
    return parallel_problems(config.parallelism, world_size)


def _batch(config: Trainer.Config, world_size: int) -> Iterator[str]:
    training, wanted = config.training, config.training.num_tokens_per_train_step
    per_rank = training.num_tokens_per_microbatch_per_dp_rank
    per_pass = per_rank * world_size
    if wanted != -1 and wanted > 0 and per_pass > 0 and wanted % per_pass:
        yield (
            f"--training.num_tokens_per_train_step {wanted} is not a multiple of {per_pass}, which "
            f"is what {world_size} ranks take at once ({per_rank} tokens each, "
            "--training.num_tokens_per_microbatch_per_dp_rank). Change one of the two."
        )


def _model_and_tokenizer(config: Trainer.Config) -> Iterator[str]:
    missing = config.tokenizer.check(tokenizer_path=config.hf_assets_path)
    yield from missing
    if config.model_spec is None or config.training.max_context_length <= 0:
        return
    model = copy.deepcopy(config.model_spec.model)
    try:
        model.update_from_config(config=config)
    except (ValueError, NotImplementedError) as error:
        yield str(error)
    vocab_size = getattr(model, "vocab_size", None)
    if missing or vocab_size is None:
        return
    num_tokens = config.tokenizer.build(tokenizer_path=config.hf_assets_path).get_vocab_size()
    if num_tokens > vocab_size:
        yield (
            f"The tokenizer in --hf_assets_path {config.hf_assets_path} has {num_tokens} tokens, "
            f"but the model {config.model_spec.name} {config.model_spec.flavor} has a vocabulary "
            f"of {vocab_size}. Use a tokenizer that fits, or a model of that vocabulary."
        )


def _data(config: Trainer.Config) -> Iterator[str]:
    training = config.training
    sizes = {
        "max_context_length": training.max_context_length,
        "num_tokens_per_batch": training.num_tokens_per_microbatch_per_dp_rank,
    }
    if min(sizes.values()) <= 0:
        return  # reported as a violation of that field already
    yield from config.dataloader.check(**sizes)
    if config.validator.enable:
        yield from config.validator.check(**sizes)


def _dump_folder(folder: str) -> Iterator[str]:
    """Whether a file could be made in ``folder``, or where ``folder`` would be made."""
    existing = os.path.abspath(folder)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    try:
        # Permissions alone do not tell: a file system may be mounted read-only, or be full.
        with tempfile.TemporaryFile(dir=existing):
            return
    except OSError as error:
        yield (
            f"--dump_folder {folder} cannot be written ({existing}: {error.strerror}); choose "
            "another one or make it writable."
        )


def _checkpoint(config: Trainer.Config, world_size: int) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.create_seed_checkpoint and not (checkpoint.enable and world_size == 1):
        yield (
            "--checkpoint.create_seed_checkpoint is made by one process and saved as a checkpoint: "
            f"it needs --checkpoint.enable and 1 rank, found {world_size} (NGPU=1)."
        )
    if checkpoint.load_step != -1 and not checkpoint.enable:
        yield (
            f"--checkpoint.load_step {checkpoint.load_step} has no effect while checkpoints are "
            "off; add --checkpoint.enable."
        )
    if not checkpoint.enable or not isinstance(checkpoint, CheckpointManager.Config):
        return
    if unknown := sorted(set(checkpoint.exclude_from_loading) - _STATE_KEYS - {MODEL}):
        yield (
            f"--checkpoint.exclude_from_loading names {', '.join(unknown)}; it takes names out of "
            f"{', '.join(sorted(_STATE_KEYS))}."
        )
    if checkpoint.load_step >= -1:
        yield from _load_source(config)


def _load_source(config: Trainer.Config) -> Iterator[str]:
    folder = filesystem.join(config.dump_folder, config.checkpoint.folder)
    remote = (folder, config.checkpoint.initial_load_path or "")
    if any(filesystem.is_remote(path) for path in remote):
        return
    checkpoint = config.checkpoint
    request = Request(
        load_step=checkpoint.load_step,
        initial_load_path=checkpoint.initial_load_path,
        initial_load_model_only=checkpoint.initial_load_model_only,
        initial_load_in_hf=checkpoint.initial_load_in_hf,
        initial_load_in_hf_quantized=checkpoint.initial_load_in_hf_quantized,
        hf_assets_path=config.hf_assets_path,
    )
    storage = DcpStorage()
    try:
        find_source(request, own_folder(folder, storage, _STATE_KEYS), storage)
    except (CheckpointError, ValueError) as error:
        yield str(error)


if __name__ == "__main__":
    parse_or_exit()
