"""Tables of what is proven where: read from store, registry and sweeps, written as files.

What stands in them, combos.py decides, and report/tables.py how it is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

FORMAT = "imagefactory.tables/1"


# --- reading -------------------------------------------------------------------------------------


# --- writing -------------------------------------------------------------------------------------
