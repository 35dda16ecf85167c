"""Measure the data loader beside what bounds it, in one run.

    python -m benchmarks.data            # table on stdout, numbers in outputs/benchmarks/data.json

Three questions, each answered by a ratio of times taken in turns, so that a machine that is slow for
a moment is slow for both:

    read     tokens/s of the loader over tokens/s of a bare read of the mapped cache
    share    time in data over time of a step, in the run that ./run_train.sh starts
    restore  time to the first batch at the middle of 10 million rows over that of 10 thousand
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchtitan.components.data import (
    ConcatThenSplitPackingConfig,
    DatasetConfig,
    FirstFitPackingConfig,
    GrainDataLoader,
)
from torchtitan.components.data.corpus import TokenizedCorpus
from torchtitan.components.data.token_cache import open_store, TokenStore
from torchtitan.components.tokenizer import HuggingFaceTokenizer

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 7
READ_DOCUMENTS, DOCUMENT_TOKENS = 100_000, 201
"""The made-up corpus that is read; the documents of the Jargon File are as long on average."""
ROW_TOKENS = 16
"""Tokens of a row of the corpora in which a position is restored; their number of rows counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedTokens(DatasetConfig):
    """A token cache that was made before."""

    folder: str

    def build(self, *, context: Any, dataset_iteration_policy: Any) -> TokenizedCorpus:
        return TokenizedCorpus((open_store(Path(self.folder)),), "benchmark", "benchmark")

    def check(self, tokenizer: Any = None) -> list[str]:
        return []

    def is_streamed(self) -> bool:
        return False


def loader_of(
    dataset: DatasetConfig, row_tokens: int, rows: int, cache: Path, **settings: Any
) -> GrainDataLoader:
    config = GrainDataLoader.Config(dataset=dataset, cache_dir=str(cache), **settings)
    return config.build(
        dp_world_size=1,
        dp_rank=0,
        tokenizer=HuggingFaceTokenizer(tokenizer_path=str(ROOT / "tests/assets/tokenizer")),
        max_context_length=row_tokens,
        num_tokens_per_batch=row_tokens * rows,
    )


def bare_read(store: TokenStore, num_tokens: int, num_batches: int) -> float:
    """Seconds to copy batches of tokens from the mapping, inputs and labels, and nothing else."""
    started = time.perf_counter()
    for number in range(num_batches):
        first = number * num_tokens % (len(store.tokens) - num_tokens - 1)
        tokens = store.tokens[first : first + num_tokens + 1].astype(np.int64)
        torch.from_numpy(tokens[:-1].copy())
        torch.from_numpy(tokens[1:].copy())
    return time.perf_counter() - started


def loader_read(loader: GrainDataLoader, num_batches: int) -> float:
    started = time.perf_counter()
    for _ in range(num_batches):
        next(loader)
    return time.perf_counter() - started


def measure_read(work: Path) -> list[dict[str, Any]]:
    """The loader against the bare read, for two sizes of a batch, both packings and with workers."""
    folder = made_up_corpus(work, READ_DOCUMENTS, DOCUMENT_TOKENS)
    store = open_store(folder)
    text = ConcatThenSplitPackingConfig(dataset=MappedTokens(folder=str(folder)))
    fitted = FirstFitPackingConfig(dataset=MappedTokens(folder=str(folder)))
    cases: list[tuple[str, DatasetConfig, dict[str, Any]]] = [
        ("cut rows, made when asked for", text, {"num_prefetch_batches": 0}),
        ("cut rows, read ahead", text, {}),
        ("cut rows, 2 workers", text, {"num_workers": 2}),
        ("first fit, made when asked for", fitted, {"num_prefetch_batches": 0}),
    ]
    found = []
    for row_tokens, rows, num_batches in ((256, 4, 400), (2048, 8, 60)):
        for name, data, settings in cases:
            loader = loader_of(data, row_tokens, rows, work, **settings)
            num_tokens = row_tokens * rows
            loader_read(loader, num_batches // 4)
            times = [
                (bare_read(store, num_tokens, num_batches), loader_read(loader, num_batches))
                for _ in range(ROUNDS)
            ]
            loader.close()
            total = num_tokens * num_batches
            found.append(
                {
                    "case": f"{rows} x {row_tokens} tokens, {name}",
                    "bare_tokens_per_second": total / statistics.median(bare for bare, _ in times),
                    "loader_tokens_per_second": total / statistics.median(own for _, own in times),
                    "loader_over_bare": statistics.median(bare / own for bare, own in times),
                }
            )
    return found


def measure_share(work: Path, num_steps: int) -> dict[str, Any]:
    """Data in the steps of the standard run, nothing read ahead, so that all of it is seen."""
    command = ["./run_train.sh", "--training.steps", str(num_steps), "--checkpoint.no-enable"]
    command += ["--dump_folder", str(work / "run"), "--dataloader.num-prefetch-batches", "0"]
    environment = {**os.environ, "NGPU": "1", "PYTHON": sys.executable}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    (log,) = (work / "run/structured_logs").glob("*.jsonl")
    spans: dict[str, list[float]] = {"fetching_batch_end": [], "step_end": []}
    for line in log.read_text().splitlines():
        record = json.loads(line)
        # The first step also starts kernels and threads.
        if record["log_type_name"] in spans and (record["step"] or 0) > 1:
            spans[record["log_type_name"]].append(record["value"])
    data, step = sum(spans["fetching_batch_end"]), sum(spans["step_end"])
    return {"steps": len(spans["step_end"]), "data_ms": data, "step_ms": step, "share": data / step}


def made_up_corpus(work: Path, num_documents: int, num_inputs: int) -> Path:
    """A token cache of documents of ``num_inputs`` inputs each."""
    folder = work / "tokens" / f"made-up-{num_documents}"
    folder.mkdir(parents=True)
    tokens = np.arange(num_inputs + 1, dtype=np.uint16)
    with (folder / "tokens.bin").open("wb") as file:
        for first in range(0, num_documents, 100_000):
            np.tile(tokens, min(100_000, num_documents - first)).tofile(file)
    (np.arange(num_documents + 1, dtype=np.int64) * num_inputs).tofile(folder / "starts.bin")
    arrays = {
        "tokens": {"dtype": "uint16", "length": num_documents * (num_inputs + 1)},
        "starts": {"dtype": "int64", "length": num_documents + 1},
    }
    notes = {"num_left_out": 0}
    header = {"format": "torchtitan-tokens-2", "arrays": arrays, "notes": notes}
    (folder / "header.json").write_text(json.dumps(header))
    return folder


def restore(loader: GrainDataLoader, state: dict[str, Any], row: int) -> float:
    """Seconds from a state of a checkpoint to the batch behind it."""
    started = time.perf_counter()
    loader.load_state_dict({**state, "next_row": row})
    next(loader)
    return time.perf_counter() - started


def measure_restore(work: Path, sizes: Sequence[int]) -> dict[str, Any]:
    loaders = {}
    for num_rows in sizes:
        folder = made_up_corpus(work, num_rows, ROW_TOKENS)
        data = ConcatThenSplitPackingConfig(dataset=MappedTokens(folder=str(folder)))
        loaders[num_rows] = loader_of(data, ROW_TOKENS, 4, work)
    states = {num_rows: loader.state_dict() for num_rows, loader in loaders.items()}
    times: dict[int, list[float]] = {num_rows: [] for num_rows in sizes}
    for number in range(200):
        for num_rows, loader in loaders.items():
            row = num_rows // 2 + number
            times[num_rows].append(restore(loader, states[num_rows], row))
    for loader in loaders.values():
        loader.close()
    medians = {str(size): 1000 * statistics.median(found) for size, found in times.items()}
    ratio = medians[str(max(sizes))] / medians[str(min(sizes))]
    return {"median_ms_by_rows": medians, "largest_over_smallest": ratio}


def table_of(found: dict[str, Any]) -> list[str]:
    lines = []
    for row in found.get("read", []):
        lines.append(
            f"read     {row['case']:<48} bare {row['bare_tokens_per_second'] / 1e6:7.1f} M tokens/s  "
            f"loader {row['loader_tokens_per_second'] / 1e6:6.1f}  ratio {row['loader_over_bare']:.3f}"
        )
    if share := found.get("share"):
        lines.append(
            f"share    {share['steps']} steps: data {share['data_ms']:.0f} ms of "
            f"{share['step_ms']:.0f} ms, {share['share']:.2%}"
        )
    if restored := found.get("restore"):
        for size, milliseconds in restored["median_ms_by_rows"].items():
            lines.append(f"restore  middle of {int(size):>10,} rows: {milliseconds:.2f} ms")
        lines.append(f"restore  largest over smallest: {restored['largest_over_smallest']:.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="read,share,restore", help="which of them, by commas")
    parser.add_argument("--output", default="outputs/benchmarks/data.json", help="file for numbers")
    parser.add_argument("--steps", type=int, default=30, help="steps of the run that is looked at")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of the large corpus")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        parts: dict[str, Callable[[], Any]] = {
            "read": lambda: measure_read(work / "read"),
            "share": lambda: measure_share(work / "share", arguments.steps),
            "restore": lambda: measure_restore(work / "restore", (10_000, arguments.rows)),
        }
        found = {name: parts[name]() for name in arguments.parts.split(",")}
    found["load_average"] = os.getloadavg()[0]
    output = Path(arguments.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=2) + "\n")
    print("\n".join(table_of(found)))


if __name__ == "__main__":
    main()
