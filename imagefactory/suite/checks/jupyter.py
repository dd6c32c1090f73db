"""`jupyter`: a kernel computes, and JupyterLab's page is served on the loopback: what a notebook needs."""

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

from ..context import Context, Failure, Finding

SECONDS = 120


def check(_: Context) -> Finding:
    with tempfile.TemporaryDirectory(prefix="suite-") as scratch:
        os.environ |= {"JUPYTER_RUNTIME_DIR": scratch, "IPYTHONDIR": scratch}
        try:
            said = _ask_kernel("print(6 * 7)")
        except ImportError as error:
            raise Failure(f"{error.name} is not in the image") from error
        if said.strip() != "42":
            raise Failure(f"a kernel says {said[:200]!r} to print(6 * 7)")
        title = _look_at_page(scratch)
    return Finding(f"a kernel answers, and {title} is served")


def _ask_kernel(code: str) -> str:
    from jupyter_client.manager import start_new_kernel  # type: ignore[import-not-found]

    manager, client = start_new_kernel(startup_timeout=SECONDS, stderr=subprocess.DEVNULL)
    told: list[str] = []
    try:
        client.execute_interactive(
            code, timeout=SECONDS, output_hook=lambda message: told.append(message["content"].get("text", ""))
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return "".join(told)


def _look_at_page(scratch: str) -> str:
    """What the page calls itself. The server says its address and token in a file of the runtime folder."""
    argv = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0", "--allow-root"]
    argv.append(f"--ServerApp.root_dir={scratch}")
    with (Path(scratch) / "said").open("w+b") as said:
        server = subprocess.Popen(argv, stdout=said, stderr=said)
        try:
            until = time.monotonic() + SECONDS
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
        said.seek(0)
        last = said.read().decode(errors="replace").strip().splitlines()[-1:]
    raise Failure(f"JupyterLab serves no page: {last[0][:200] if last else 'it says nothing'}")
