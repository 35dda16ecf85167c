"""The settings that belong to the run as a whole rather than to one class.

Each check here looks at one section alone. Rules between sections are checked elsewhere, before a
process group starts.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from torchtitan.config.violations import reject
from torchtitan.tools.utils import has_cuda_capability


def _reject_below(section: str, values: dict[str, float | int | None], least: int) -> None:
    for name, value in values.items():
        if value is not None and not value >= least:
            bound = "greater than 0" if least == 1 else f"at least {least}"
            reject(
                f"{section}.{name} is {value}; it must be {bound}. "
                f"Set --{section}.{name} to such a number."
            )


@dataclass(kw_only=True, slots=True)
class TrainingConfig:
    """How much is trained, in which precision."""

    num_tokens_per_microbatch_per_dp_rank: int = 16384
    """Tokens in one forward and backward pass of one data-parallel rank. A multiple of max_context_length."""

    num_tokens_per_train_step: int = -1
    """Tokens of all ranks together between two optimizer steps. More than one microbatch on each rank means
    gradient accumulation; -1 takes exactly one microbatch."""

    max_context_length: int = 2048
    """Tokens in one row of text: the longest stretch a token can attend to."""

    max_norm: float | int = 1.0
    """Gradients with a larger global L2 norm are scaled down to this norm. inf never scales."""

    steps: int = 10000
    """The optimizer step after which training ends. A resumed run counts the steps before it stopped."""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory, at the price of speed."""

    disable_cuda_graphs: bool = True
    """Run the step without CUDA graphs. They are not available yet, so switching this off is refused."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    """The type in which parameters and optimizer state are kept."""

    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """The type in which parameters and activations take part in forward and backward."""

    mixed_precision_reduce: Literal["float32"] = "float32"
    """The type in which gradients are summed over the ranks."""

    gc_freq: int = 50
    """Steps between two garbage collections of Python, which all ranks do at the same step."""

    gc_debug: bool = False
    """Make each of these collections a full one and log how many objects it found. Slow."""

    def __post_init__(self) -> None:
        positive = ("num_tokens_per_microbatch_per_dp_rank", "max_context_length", "gc_freq")
        _reject_below("training", {name: getattr(self, name) for name in positive}, 1)
        _reject_below("training", {"steps": self.steps}, 0)
        if self.num_tokens_per_train_step != -1 and self.num_tokens_per_train_step <= 0:
            reject(
                f"training.num_tokens_per_train_step is {self.num_tokens_per_train_step}; "
                "it must be -1 or greater than 0. Use -1 for one microbatch on each rank."
            )
        if not self.max_norm > 0:
            reject(
                f"training.max_norm is {self.max_norm}; it must be greater than 0. "
                "Use inf to leave gradients as they are."
            )


@dataclass(kw_only=True, slots=True)
class ParallelismConfig:
    """How the model and the data are spread over the ranks. The degrees multiply to the number of ranks."""

    data_parallel_replicate_degree: int = 1
    """Groups of ranks that each hold the whole model (HSDP); 1 makes no copies."""

    data_parallel_shard_degree: int = -1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP); -1 takes all ranks
    that the other degrees leave."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether a layer gives its gathered parameters back after forward: always saves memory, never saves the
    second gathering in backward, default means always unless pipeline parallelism is on."""

    enable_fsdp_symm_mem: bool = False
    """Communicate through symmetric memory. Needs an NVIDIA GPU of compute capability 9.0 or newer, or an AMD GPU."""

    tensor_parallel_degree: int = 1
    """Ranks that share each matrix multiplication and read the same text. Divides the heads of the model; 1 is
    off."""

    enable_sequence_parallel: bool = True
    """With tensor parallelism, divide the tokens of a microbatch among its ranks between the blocks, too. The
    tokens must be a multiple of the degree."""

    pipeline_parallel_degree: int = 1
    """Stages, each with a part of the layers, through which microbatches pass; 1 is off."""

    module_fqns_per_model_part: list[list[str]] | None = None
    """The modules of each pipeline part, one comma-separated list for each part; None divides the layers evenly."""

    pipeline_parallel_first_stage_less_layers: int = 1
    """Layers that the first stage has fewer than the others, because it holds the embedding."""

    pipeline_parallel_last_stage_less_layers: int = 1
    """Layers that the last stage has fewer than the others, because it holds the output projection."""

    pipeline_parallel_layers_per_stage: int | None = None
    """Layers in one stage; None divides by the number of stages that the schedule wants."""

    pipeline_parallel_schedule: str = "1F1B"
    """Name of a schedule of torch.distributed.pipelining. Has no effect while pipeline parallelism is not
    available."""

    pipeline_parallel_schedule_csv: str | None = ""
    """A CSV file that holds a schedule; it wins over pipeline_parallel_schedule. Empty or None is unused."""

    num_pp_microbatches: int = 1
    """Microbatches that pass through the pipeline in one forward and backward."""

    context_parallel_degree: int = 1
    """Ranks that share each row of tokens; 1 is off."""

    context_parallel_load_balancer: str | None = "headtail"
    """How a row is divided so that causal attention costs every rank the same: headtail, ptrr, or None for
    plain pieces."""

    context_parallel_ptrr_mask_key: str | None = None
    """Which attention mask the ptrr balancer reads; None takes the only one there is."""

    expert_parallel_degree: int = 1
    """Ranks over which the experts of a mixture-of-experts model are spread; 1 is off."""

    def __post_init__(self) -> None:
        degrees = [name for name in self.__dataclass_fields__ if name.endswith("_degree")]
        degrees.remove("data_parallel_shard_degree")
        _reject_below("parallelism", {name: getattr(self, name) for name in degrees}, 1)
        if self.data_parallel_shard_degree != -1 and self.data_parallel_shard_degree < 1:
            reject(
                f"parallelism.data_parallel_shard_degree is {self.data_parallel_shard_degree}; "
                "it must be -1 or greater than 0. Use -1 for all ranks that are left."
            )
        if self.context_parallel_load_balancer not in ("headtail", "ptrr", None):
            reject(
                "parallelism.context_parallel_load_balancer is "
                f"{self.context_parallel_load_balancer!r}; it must be headtail, ptrr or None. "
                "Use None for no load balancing."
            )
        if self.enable_fsdp_symm_mem and not _has_symmetric_memory():
            reject(
                "parallelism.enable_fsdp_symm_mem is on; it needs an NVIDIA GPU of compute capability 9.0 or "
                "newer, or an AMD GPU, and there is none here. Turn it off."
            )


def _has_symmetric_memory() -> bool:
    on_rocm = torch.cuda.is_available() and torch.version.hip is not None
    return on_rocm or has_cuda_capability(9, 0)


@dataclass(kw_only=True, slots=True)
class CompileConfig:
    """What torch.compile compiles."""

    enable: bool = False
    """Compile the components below."""

    enable_async_tensor_parallel: bool = False
    """Let the compiler overlap the communication of tensor parallelism with computation. Needs the compiled model."""

    components: list[str] = field(default_factory=lambda: ["model", "loss"])
    """What to compile: model, loss, or both, separated by commas."""

    backend: str = "inductor"
    """The back end that torch.compile is given."""

    def __post_init__(self) -> None:
        if self.enable_async_tensor_parallel and not (self.enable and "model" in self.components):
            reject(
                "compile.enable_async_tensor_parallel is on, but the model is not compiled: compile.enable is "
                f"{self.enable}, compile.components is {self.components}. Use --compile.enable with 'model' "
                "among the components, or turn asynchronous tensor parallelism off."
            )


@dataclass(kw_only=True, slots=True)
class CommConfig:
    """How the ranks talk to each other."""

    init_timeout_seconds: int = 300
    """Seconds a collective may take until the first step is done: it covers lazy set-up and compilation."""

    train_timeout_seconds: int = 100
    """Seconds a collective may take afterwards. A rank that is lost ends the others after this time."""

    trace_buf_size: int = 20000
    """Collectives that the flight recorder of NCCL keeps for a dump at a time-out; 0 turns it off."""

    save_traces_folder: str = "comm_traces"
    """Folder below the dump folder for these dumps."""

    save_traces_file_prefix: str = "rank_"
    """Begin of the name of each dump; the rank follows."""

    mode: Literal["default", "fake_backend", "local_tensor", "torchcomms"] = "default"
    """default: real communication. fake_backend: this process plays one of NGPU ranks, the one that RANK names
    (else rank 0), and sends nothing, to check a config; checkpoints are off. local_tensor and torchcomms are not
    available and refused."""

    def __post_init__(self) -> None:
        timeouts = ("init_timeout_seconds", "train_timeout_seconds")
        _reject_below("comm", {name: getattr(self, name) for name in timeouts}, 1)
        _reject_below("comm", {"trace_buf_size": self.trace_buf_size}, 0)


@dataclass(kw_only=True, slots=True)
class DebugConfig:
    """Reproducibility and insight."""

    seed: int | None = None
    """Seed of every random number generator; None draws one, the same for all ranks."""

    deterministic: bool = False
    """Use only deterministic kernels, which may be slower."""

    deterministic_warn_only: bool = False
    """With deterministic, and only there: warn instead of failing where there is no deterministic kernel."""

    moe_force_load_balance: bool = False
    """Send the same number of tokens to every expert, whatever the router says. For measurements only."""

    detect_anomaly: bool = False
    """Let autograd name the forward operation behind a NaN gradient. Slow."""

    batch_invariant: bool = False
    """Use kernels whose result for one row does not depend on the other rows."""

    print_config: bool = False
    """Print the resulting config as JSON at the start."""

    save_config_file: str | None = None
    """File to which rank 0 writes the resulting config as JSON, below the dump folder unless it is absolute. Its
    folder must exist, except the dump folder itself. None writes none."""

    enable_structured_logging: bool = True
    """Write spans and scalars as JSON lines to structured_logs in the dump folder."""


OverrideImport = str | tuple[str, dict[str, Any]]
"""The dotted name of an override, alone or with its options."""


@dataclass(kw_only=True, slots=True)
class OverrideConfig:
    """Which parts of the config tree are replaced before the model is built."""

    imports: list[OverrideImport] = field(default_factory=list)
    """Overrides to apply, as the full name of their function: pkg.module.function, or
    pkg.module.function={"option": 1} with JSON options. Several are separated by spaces or commas."""
