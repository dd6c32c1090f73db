"""Checks of common uses: `jupyter` for notebooks, `unprivileged` for batch jobs.

A kernel computes, and JupyterLab serves its page on the loopback interface. Batch systems run images as an
ordinary user with a read-only root and without a home. The host starts a second run for that, with `import`
and `compute` too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from ..context import CheckFailure, Context, Finding

STARTUP = 120


def check_jupyter(_: Context) -> Finding:
    with tempfile.TemporaryDirectory(prefix="suite-") as scratch:
        os.environ |= {"JUPYTER_RUNTIME_DIR": scratch, "IPYTHONDIR": scratch}
        try:
            output = _run_in_kernel("print(6 * 7)")
        except ImportError as error:
            raise CheckFailure(f"{error.name} is not in the image") from error
        if output.strip() != "42":
            raise CheckFailure(f"a kernel says {output[:200]!r} to print(6 * 7)")
        title = _read_page(scratch)
    return Finding(f"a kernel answers, and {title} is served")


def _run_in_kernel(code: str) -> str:
    from jupyter_client.manager import start_new_kernel  # type: ignore[import-not-found]

    manager, client = start_new_kernel(startup_timeout=STARTUP, stderr=subprocess.DEVNULL)
    texts: list[str] = []
    try:
        client.execute_interactive(
            code,
            timeout=STARTUP,
            output_hook=lambda message: texts.append(message["content"].get("text", "")),
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return "".join(texts)


def _read_page(scratch: str) -> str:
    """Return the name in the page.

    The server writes its address and token to a file in the runtime directory.
    """
    argv = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root"]
    argv.append(f"--ServerApp.root_dir={scratch}")
    with (Path(scratch) / "log").open("w+b") as log:
        server = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            until = time.monotonic() + STARTUP
            while time.monotonic() < until and server.poll() is None:
                for path in Path(scratch).glob("jpserver-*.json"):
                    try:
                        place = json.loads(path.read_text())
                        with urllib.request.urlopen(f"{place['url']}lab?token={place['token']}") as page:
                            if b"jupyter-config-data" in page.read():
                                return f"JupyterLab {place.get('version', '')}".strip()
                    except (OSError, ValueError, KeyError, urllib.error.URLError):
                        continue  # written, or listening, in a moment
                time.sleep(0.05)
        finally:
            server.kill()
            server.wait()
        log.seek(0)
        last = log.read().decode(errors="replace").strip().splitlines()[-1:]
    raise CheckFailure(f"JupyterLab serves no page: {last[0][:200] if last else 'it says nothing'}")


def check_unprivileged(context: Context) -> Finding:
    uid, expected = os.getuid(), context.expected.uid
    if expected is None:
        raise CheckFailure("this check has a run of its own, with a user")
    if uid != expected:
        raise CheckFailure(f"runs as uid {uid}, not as {expected}")
    for folder in (context.prefix, context.site, "/usr", "/"):
        if os.access(folder, os.W_OK):
            raise CheckFailure(f"{folder} can be written, so the root is not read-only")
    home = os.environ.get("HOME")
    if home is not None and os.access(home, os.W_OK):
        raise CheckFailure(f"HOME is {home} and can be written")
    with tempfile.TemporaryFile() as file:
        file.write(b"scratch")
    return Finding(f"uid {uid}, read-only root, no home, scratch in {tempfile.gettempdir()}")
