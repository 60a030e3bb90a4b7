"""Nothing loops for ever without a reason that people can read: docs/outages.md knows every loop."""

import re

from rollbook.root import ROOT

PACKAGES = ("domain", "storage", "activities", "workflows", "trainer", "engine", "rollbook")
LOOPS = re.compile(r"^\s*while True:|while not stopping|Retrying\(|RetryPolicy\(", re.MULTILINE)


def test_every_module_that_loops_is_in_the_table() -> None:
    table = (ROOT / "docs" / "outages.md").read_text(encoding="utf-8").partition("## Every loop")[2]
    listed = set(re.findall(r"`(\w+/[\w/]+\.py)`", table))
    looping = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if LOOPS.search(file.read_text(encoding="utf-8"))
    }
    assert looping == listed
