"""What docs/performance.md says was measured is what the raw samples in the repository say."""

from benchmarks import checkpoint
from benchmarks.harness import results
from benchmarks.harness.program import DOCS
from benchmarks.harness.ranks import ROOT
from benchmarks.saving import tables


def test_the_tables_of_the_docs_are_those_of_the_raw_samples() -> None:
    found = results.read_all(ROOT / "benchmarks/measured" / checkpoint.REGION, checkpoint.PARTS)
    assert found
    _, _, rest = DOCS.read_text().partition(f"<!-- measured: {checkpoint.REGION} -->\n")
    told, _, _ = rest.partition(f"<!-- end of measured: {checkpoint.REGION} -->\n")
    assert told.strip() == tables.document(found).strip()
