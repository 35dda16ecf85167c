"""The examples of docs/extend.md, as a reader saves them: each trains, saves and resumes exactly."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.config.recipes import RecipeModule
from torchtitan.preflight import parse_or_exit

from tests.ranks.pool import RanksFailed, run_on_ranks
from tests.unit_tests.structure.docs import blocks_of
from tests.unit_tests.structure.sources import ROOT

PAGE = "docs/extend.md"
FILES = {
    block.file_name: block.text
    for block in blocks_of(PAGE, (ROOT / PAGE).read_text())
    if block.file_name
}
NUM_STEPS, STOP_AFTER = 4, 3


def train(module: str, folder: str, name: str, steps: int) -> tuple[int, dict[str, str]]:
    """Train the one recipe of ``module``; the step it began from, and digests of the parameters."""
    (recipe,) = RecipeModule(module).recipe_names()
    settings = {
        "--training.steps": steps,
        "--lr-scheduler.total-steps": NUM_STEPS,
        "--lr-scheduler.warmup-steps": 1,
        "--training.max-context-length": 32,
        "--training.num-tokens-per-microbatch-per-dp-rank": 64,
        "--checkpoint.interval": 2,
        "--dataloader.cache-dir": f"{folder}/cache",
        "--dump-folder": f"{folder}/{name}",
        "--debug.seed": 3,
        "--comm.trace-buf-size": 0,
    }
    if module != "my_data":
        settings["--dataloader.files"] = f"{folder}/corpus.jsonl"
    given = [str(word) for setting in settings.items() for word in setting]
    config = parse_or_exit(["--module", module, "--config", recipe, *given])
    config.debug.enable_structured_logging = False
    trainer = config.build()
    trainer.train()
    digests = {name: _digest(p) for name, p in trainer.model_parts[0].named_parameters()}
    trainer.close()
    trainer.peers.close()
    dist.destroy_process_group()
    return trainer.metrics_processor.start_step, digests


def _digest(parameter: Any) -> str:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return hashlib.sha1(local.detach().numpy().tobytes()).hexdigest()


def resume_with_other_ranks(folder: str) -> None:
    sys.path.insert(0, folder)
    train("my_manager", folder, "my_manager-stopped", NUM_STEPS + 1)


def train_with_all(folder: str) -> dict[str, list[Any]]:
    """By module: a whole run, one that stops early, and what it does when it is started again."""
    sys.path.insert(0, folder)
    found = {}
    for module in (name.removesuffix(".py") for name in FILES):
        found[module] = [
            train(module, folder, f"{module}-whole", NUM_STEPS),
            train(module, folder, f"{module}-stopped", STOP_AFTER),
            train(module, folder, f"{module}-stopped", NUM_STEPS),
        ]
    return found


@pytest.mark.slow
@pytest.mark.ranks
def test_every_example_trains_saves_and_resumes_exactly(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    lines = [json.dumps({"text": f"document {n} " + "and more " * (n % 7)}) for n in range(99)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    for found in run_on_ranks(2, train_with_all, str(tmp_path), init=False, timeout_seconds=200.0):
        assert list(found) == ["my_model", "my_data", "my_optimizer", "my_manager"]
        for module, ((begun, whole), (_, stopped), (resumed, finished)) in found.items():
            assert (begun, resumed) == (0, STOP_AFTER), module
            assert whole == finished, module
            assert all(whole[name] != digest for name, digest in stopped.items()), module
    # What that example says it cannot do is refused in words.
    with pytest.raises(
        RanksFailed, match="was saved on 2 ranks, and this run has 1; start it on 2"
    ):
        run_on_ranks(1, resume_with_other_ranks, str(tmp_path), init=False, timeout_seconds=100.0)
