"""What docs/performance.md says was measured is what the raw samples in the repository say."""

import pytest
from benchmarks import checkpoint, train_step
from benchmarks.harness import results
from benchmarks.harness.program import DOCS
from benchmarks.harness.ranks import ROOT
from benchmarks.harness.results import Result
from benchmarks.saving import tables

MEASURED = ROOT / "benchmarks/measured"


def text_of(region: str, found: list[Result]) -> str:
    return {checkpoint.REGION: tables.document, train_step.REGION: train_step.document}[region](
        found
    )


@pytest.mark.parametrize(
    ("region", "parts"),
    [(checkpoint.REGION, checkpoint.PARTS), (train_step.REGION, (train_step.PART,))],
)
def test_the_tables_of_the_docs_are_those_of_the_raw_samples(
    region: str, parts: tuple[str, ...]
) -> None:
    found = results.read_all(MEASURED / region, parts)
    assert found
    page = DOCS.read_text()
    _, _, rest = page.partition(f"<!-- measured: {region} -->\n")
    told, _, _ = rest.partition(f"<!-- end of measured: {region} -->\n")
    assert told.strip() == text_of(region, found).strip()
