"""Where an attack takes place, and what beside it must stay as it is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def ground() -> Iterator[Path]:
    """A folder with a neighbour that must stay as it is."""
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        neighbour = Path(folder, "neighbour")
        neighbour.write_bytes(b"untouched")
        (Path(folder) / "ground").mkdir()
        yield Path(folder) / "ground"
        assert neighbour.read_bytes() == b"untouched"
        assert {path.name for path in Path(folder).iterdir()} == {"neighbour", "ground"}
