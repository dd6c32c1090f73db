"""How much a run tries. `tests/run` tries every promise once, on the smallest real input that can break it;
`tests/run nightly` runs the same tests on large inputs, all families, long storms and every moment of a kill.
"""

from __future__ import annotations

import os
from typing import TypeVar

Value = TypeVar("Value")

NIGHTLY = os.environ.get("FACTORY_TEST_TIER") == "nightly"


def many(short: Value, long: Value) -> Value:
    return long if NIGHTLY else short
