"""Small programs that stand where HTCondor's commands would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Program = Callable[..., None]


def calls(tmp_path: Path) -> list[list[str]]:
    """Folder and words of each call."""
    text = (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    return [part.strip("\n").split("\n") for part in text.split("END\n") if part]
