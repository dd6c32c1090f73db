"""What a copy to the GPU and back gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Transfer:
    """`back` is what came back, `up` and `down` seconds; `pinned` whether the pages were locked."""

    back: Any
    up: float
    down: float
    pinned: bool
