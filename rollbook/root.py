"""Settles whose root packages get imported. Standard library only; runs before any of them is.

The root packages have plain names (`storage`, `workflows`, …) that other distributions may use too.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOT_PACKAGES = ("domain", "storage", "trainer", "engine", "activities", "workflows", "rollbook")


def claim_root() -> None:
    """Put the project root first on sys.path; exit if a root package still resolves elsewhere."""
    if sys.path[:1] != [str(ROOT)]:
        sys.path.insert(0, str(ROOT))
    for name in ROOT_PACKAGES:
        spec = find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found != ROOT / name / "__init__.py":
            raise SystemExit(
                f"rollbook: package {name!r} resolves to {found}, not under {ROOT}; another "
                "distribution ships a package of that name, so give rollbook an environment of its own"
            )
