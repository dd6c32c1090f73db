"""`unprivileged`: this run is what batch systems do: an ordinary user, a read-only root, no home.

The host starts a second run for it and adds what `import` and `compute` say there.
"""

from __future__ import annotations

import os
import tempfile

from ..context import Context, Failure, Finding


def check(context: Context) -> Finding:
    uid, wanted = os.getuid(), context.expected.uid
    if wanted is None:
        raise Failure("this check has a run of its own, with a user")
    if uid != wanted:
        raise Failure(f"runs as uid {uid}, not as {wanted}")
    for folder in (context.prefix, context.site, "/usr", "/"):
        if os.access(folder, os.W_OK):
            raise Failure(f"{folder} can be written, so the root is not read-only")
    home = os.environ.get("HOME")
    if home is not None and os.access(home, os.W_OK):
        raise Failure(f"HOME is {home} and can be written")
    with tempfile.TemporaryFile() as file:
        file.write(b"scratch")
    return Finding(f"uid {uid}, read-only root, no home, scratch in {tempfile.gettempdir()}")
