"""`compiler`: what the framework compiles with at run time is there and works, as far as without a GPU."""

from __future__ import annotations

import tempfile

from ..context import Context, Finding


def check(context: Context) -> Finding:
    context.framework.prepare()
    with tempfile.TemporaryDirectory(prefix="suite-") as scratch:
        detail, numbers = context.framework.compilers(context, scratch)
    return Finding(detail, numbers)
