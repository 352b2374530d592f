"""Sections of the documentation that tests write: what is committed must be what a run gives."""

import os
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
WRITE = "FEDCOMP_WRITE_DOCS"
"""Set this variable to 1 to have the tests write their sections instead of comparing them."""


def check_section(page: str, name: str, text: str) -> None:
    """Assert that a page of the documentation has this text between <!-- begin: name --> and <!-- end: name -->."""
    path = DOCS / page
    before, begin, rest = path.read_text().partition(f"<!-- begin: {name} -->\n")
    found, end, after = rest.partition(f"<!-- end: {name} -->")
    assert begin, f"{path} has no section {name}"
    assert end, f"section {name} of {path} has no end"
    if os.environ.get(WRITE) == "1":
        path.write_text(f"{before}{begin}{text}{end}{after}")
        return
    assert found == text, f"{path}: section {name} is not what the run gives; {WRITE}=1 pytest writes it anew"
