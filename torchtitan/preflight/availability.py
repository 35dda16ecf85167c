"""Settings that this version cannot honour, and settings that would do nothing.

Both are refused rather than passed over: who typed one believes that it acts.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from torchtitan.components.checkpointer.pinned import means
from torchtitan.tools import filesystem
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

_DEGREES = {
    "pipeline_parallel_degree": "pipeline parallelism",
    "context_parallel_degree": "context parallelism",
    "expert_parallel_degree": "expert parallelism",
}

# Details of what is not available: section, what it belongs to, fields. The schedule is missing on
# purpose: recipes choose one for the day it counts.
_DETAILS: list[tuple[str, str, tuple[str, ...]]] = [
    (
        "parallelism",
        "pipeline parallelism",
        (
            "pipeline_parallel_first_stage_less_layers",
            "pipeline_parallel_last_stage_less_layers",
            "pipeline_parallel_layers_per_stage",
            "pipeline_parallel_schedule_csv",
        ),
    ),
    (
        "parallelism",
        "context parallelism",
        ("context_parallel_load_balancer", "context_parallel_ptrr_mask_key"),
    ),
]


def not_available(config: Trainer.Config) -> Iterator[str]:
    """Features that are switched on and do not exist yet, or not on this machine."""
    parallelism, checkpoint = config.parallelism, config.checkpoint
    for name, meaning in _DEGREES.items():
        if (degree := getattr(parallelism, name)) > 1:
            yield (
                f"--parallelism.{name} {degree}: {meaning} is not available yet; leave it at 1. "
                "The other degrees then divide the ranks."
            )
    unavailable = {
        "--compile.enable-async-tensor-parallel": config.compile.enable_async_tensor_parallel,
        "--parallelism.enable-fsdp-symm-mem": parallelism.enable_fsdp_symm_mem,
        "--parallelism.num-pp-microbatches": parallelism.num_pp_microbatches > 1,
        "--parallelism.module-fqns-per-model-part": bool(parallelism.module_fqns_per_model_part),
        "--debug.moe-force-load-balance": config.debug.moe_force_load_balance,
        "--checkpoint.last-save-in-hf": checkpoint.last_save_in_hf,
        "--checkpoint.initial-load-in-hf": checkpoint.initial_load_in_hf,
    }
    for flag, is_on in unavailable.items():
        if is_on:
            yield f"{flag} is not available yet; leave it out."
    if not config.training.disable_cuda_graphs:
        yield (
            "--training.no-disable-cuda-graphs asks for CUDA graphs, which are not available yet; "
            "leave it out."
        )
    if config.comm.mode in ("local_tensor", "torchcomms"):
        yield f"--comm.mode {config.comm.mode} is not available; use default or fake_backend."
    yield from _not_on_this_machine(config)
    yield from _remote(config)


def _not_on_this_machine(config: Trainer.Config) -> Iterator[str]:
    if config.training.enable_cpu_offload and device_type == "cpu":
        yield (
            "--training.enable_cpu_offload moves parameters from an accelerator to the CPU, but "
            "this machine has no accelerator; leave it out."
        )
    if config.profiler.enable_memory_snapshot and not torch.cuda.is_available():
        yield (
            "--profiler.enable_memory_snapshot records the memory of CUDA devices, but this "
            "machine has none; leave it out."
        )
    mode = getattr(config.checkpoint, "async_mode", "disabled")
    if config.checkpoint.enable and not config.checkpoint.load_only:
        if mode == "async_with_pinned_mem" and (problem := means.refusal()):
            yield problem


def _remote(config: Trainer.Config) -> Iterator[str]:
    paths = {
        "--dump_folder": config.dump_folder,
        "--checkpoint.folder": config.checkpoint.folder,
        "--checkpoint.initial_load_path": config.checkpoint.initial_load_path or "",
    }
    for flag, path in paths.items():
        if filesystem.is_remote(path):
            yield f"{flag} {path}: remote folders are not available yet; give a local path."


def without_effect(config: Trainer.Config) -> Iterator[str]:
    """Settings that were changed although what they belong to is off or does not exist."""
    yield from _waiting_for_compile(config)
    for section, feature, names in _DETAILS:
        chosen = getattr(config, section)
        for name in names:
            if (value := getattr(chosen, name)) != (default := _default(chosen, name)):
                yield (
                    f"--{section}.{name} {value} has no effect, because {feature} is not available "
                    f"yet; leave it at {default}."
                )
    checkpoint, debug, profiler = config.checkpoint, config.debug, config.profiler
    parallelism = config.parallelism
    if not parallelism.enable_sequence_parallel and parallelism.tensor_parallel_degree == 1:
        yield (
            "--parallelism.no-enable-sequence-parallel has no effect without tensor parallelism; set "
            "--parallelism.tensor_parallel_degree or leave it out."
        )
    if debug.deterministic_warn_only and not debug.deterministic:
        yield "--debug.deterministic_warn_only has no effect without --debug.deterministic; add it."
    if profiler.memory_snapshot_freq is not None and not profiler.enable_memory_snapshot:
        yield (
            f"--profiler.memory_snapshot_freq {profiler.memory_snapshot_freq} has no effect without "
            "--profiler.enable_memory_snapshot; add it or leave both out."
        )
    if not config.validator.enable and getattr(config.validator.dataloader, "files", None):
        yield (
            "--validator.dataloader.files has no effect while validation is off; add "
            "--validator.enable."
        )
    export, usual = checkpoint.export_dtype, _default(checkpoint, "export_dtype")
    # Runs that only load may share the flags of the one that saves.
    saves = checkpoint.enable and not checkpoint.load_only
    if saves and export != usual and not checkpoint.last_save_model_only:
        yield (
            f"--checkpoint.export_dtype {export} has no effect, because the last save is a full "
            "checkpoint in the dtypes of the run; add --checkpoint.last_save_model_only."
        )


def _waiting_for_compile(config: Trainer.Config) -> Iterator[str]:
    chosen, tensor = config.compile, config.parallelism.tensor_parallel_degree
    for name in () if chosen.enable else ("backend", "components"):
        if (value := getattr(chosen, name)) != _default(chosen, name):
            yield f"--compile.{name} {value} has no effect without --compile.enable; add it."
    if chosen.enable and chosen.components == ["loss"] and tensor > 1:
        yield (
            "--compile.components loss has no effect with --parallelism.tensor_parallel_degree "
            f"{tensor}, where the loss is one of collectives; add model, or leave --compile.enable out."
        )


def _default(config: Any, name: str) -> Any:
    field = next(each for each in dataclasses.fields(config) if each.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
