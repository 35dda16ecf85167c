"""Public names, names that must not exist, and every module as the first import of a process."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit_tests.structure import fresh_imports
from tests.unit_tests.structure.sources import module_name, ROOT, tracked_files

MODULES = [module_name(path) for path in tracked_files("torchtitan/*.py")]

EXPORTS = {
    "torchtitan.config": """ConfigManager Configurable Function TORCH_DTYPE_MAP CompileConfig
        ParallelismConfig CommConfig TrainingConfig DebugConfig OverrideConfig Override override
        derive apply_overrides clear_overrides""",
    "torchtitan.components.checkpointer": """AsyncMode BaseCheckpointManager CheckpointManager
        CheckpointStorage DATALOADER LR_SCHEDULER MODEL ModelWrapper OPTIMIZER TRAIN_STATE""",
    "torchtitan.components.optimizer": """LRSchedulersContainer OptimizersContainer
        ParamGroupConfig default_adamw""",
    "torchtitan.components.data": """BaseDataLoader ChatProcessor Collator
        ConcatThenSplitPackingConfig DataloaderExhaustedError DatasetBuildContext
        DatasetConcatConfig DatasetConfig DatasetIterationPolicy DatasetMixConfig
        FirstFitPackingConfig GrainDataLoader HuggingFaceRandomAccessSource
        HuggingFaceStreamingSource IndexedJsonlSource LocalFilesSource RandomAccessDataSource
        SampleProcessor SingleDatasetConfig SourceConfig StreamingDataSource TextCollator
        TextProcessor TextSequence TrainerBatch WeightedDataset packed_text""",
    "torchtitan.components.loss": """BaseLoss ChunkedLossWrapper CrossEntropyLoss
        GradAccumulator IGNORE_INDEX LossFunction LossOutput MSELoss cross_entropy_loss mse_loss""",
    "torchtitan.protocols": """BaseModel BaseStateDictAdapter Configurable ModelSpec Module
        StateDictAdapter""",
    "torchtitan.models.common": """BaseAttention ComplexRoPE CosSinRoPE Decoder Embedding
        FeedForward FlexAttention FusedQKVLinear GQAttention Linear QKVLinear RMSNorm RoPE
        TransformerBlock VarlenAttention compute_ffn_hidden_dim""",
    "torchtitan.observability.structured_logger": """ExtraFields InitArguments LogType
        TraceEventsOnlyFilter _structured_logger add_step_tag clear_step_tags event_extra
        get_relative_step get_step get_step_tags init_arguments init_structured_logger
        log_trace_instant log_trace_scalar log_trace_span set_step""",
}

OPTIMIZER, CHECKPOINTER = "torchtitan.components.optimizer", "torchtitan.components.checkpointer"
ORDERS = [
    [OPTIMIZER, CHECKPOINTER],
    [CHECKPOINTER, OPTIMIZER],
    [f"{OPTIMIZER}.utils", f"{CHECKPOINTER}.utils"],
    [f"{CHECKPOINTER}.utils", f"{OPTIMIZER}.utils"],
]


def outcomes_of(cases: list[list[str]], folder: Path = ROOT) -> list[str]:
    finished = subprocess.run(
        [sys.executable, fresh_imports.__file__],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder)},
        timeout=240,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_every_module_and_every_order_can_be_the_first_import_without_a_gpu() -> None:
    cases = [[name] for name in MODULES] + ORDERS + [MODULES, MODULES[::-1]]
    outcomes = outcomes_of(cases)
    failed = [
        f"{case}:\n{outcome}" for case, outcome in zip(cases, outcomes, strict=True) if outcome
    ]
    assert not failed, "\n".join(failed)


def test_a_cycle_a_gpu_package_and_an_exit_are_found(tmp_path: Path) -> None:
    planted = {
        "ring_a": "from ring_b import b\na = 1\n",
        "ring_b": "from ring_a import a\nb = 1\n",
        "kernels": "import triton\n",
        "quits": "import os\nos._exit(3)\n",
        "good": "import json\n",
    }
    for name, source in planted.items():
        (tmp_path / f"{name}.py").write_text(source)
    outcomes = dict(zip(planted, outcomes_of([[name] for name in planted], tmp_path), strict=True))
    assert "partially initialized module" in outcomes["ring_a"]
    assert "triton" in outcomes["kernels"]
    assert "ended the process" in outcomes["quits"]
    assert outcomes["good"] == ""


@pytest.mark.parametrize("package", EXPORTS)
def test_a_package_exports_the_public_names(package: str) -> None:
    module = importlib.import_module(package)
    names = EXPORTS[package].split()
    assert sorted(module.__all__) == sorted(names)
    assert not [name for name in names if not hasattr(module, name)]


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint_utils", "lr_scheduler", "dataloader"])
def test_the_flat_component_modules_do_not_exist(name: str) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"torchtitan.components.{name}")


def test_the_version_is_the_one_in_the_version_file_or_said_to_be_unknown() -> None:
    version = importlib.import_module("torchtitan").__version__
    assert version in ((ROOT / "assets/version.txt").read_text().strip(), "0.0.0+unknown")


def test_the_checkpointer_package_leaves_the_second_backend_alone() -> None:
    source = "import sys, torchtitan.components.checkpointer as c; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    assert f"{CHECKPOINTER}.base" in output
    assert f"{CHECKPOINTER}.torch_checkpointing" not in output
    assert "torch_checkpointing" not in output
