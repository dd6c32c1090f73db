"""A project that the test's user trusts, as `imagefactory config --trust` does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from imagefactory.settings.files import FILE_NAME, trust_project


def trust(root: Path, environ: Mapping[str, str] = os.environ) -> None:
    """Trust the project in `root` as it is now."""
    trust_project(root, (root / FILE_NAME).read_bytes(), environ)


def write_settings(root: Path, text: str, environ: Mapping[str, str] = os.environ) -> None:
    """Write the project's imagefactory.toml, and trust it."""
    (root / FILE_NAME).write_text(text, encoding="utf-8")
    trust(root, environ)
