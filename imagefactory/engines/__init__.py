"""What makes images. One engine, one file, one row here."""

from __future__ import annotations

ENGINES = ("assemble", "docker", "apptainer")
"""The engines that `build --engine` takes; `assemble` is the embedded default."""
