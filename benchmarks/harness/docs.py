"""The regions of a page that are written by a program, between two comments that the page does not show.

<!-- measured: NAME -->
... replaced ...
<!-- end of measured: NAME -->
"""

from pathlib import Path

from benchmarks.harness.errors import RefusedError


def replace_region(page: Path, name: str, text: str) -> None:
    """Put ``text`` into the region ``name`` of ``page``.

    Raises:
        RefusedError: the page has no such region, or more than one.
    """
    begin, end = f"<!-- measured: {name} -->\n", f"<!-- end of measured: {name} -->\n"
    content = page.read_text()
    if content.count(begin) != 1 or content.count(end) != 1:
        raise RefusedError(
            f"{page} should have one region {name!r}: a line {begin.strip()!r} and, below it, a line "
            f"{end.strip()!r}. Put them where the tables belong."
        )
    before, _, rest = content.partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n{text.strip()}\n\n{end}{after}")
