"""The check `jupyter`, on a server and a kernel of our own in place of Jupyter's."""

from __future__ import annotations

from pathlib import Path

import pytest

from imagefactory.suite.checks import usage
from imagefactory.suite.context import CheckFailure

MANAGER = """\
class Manager:
    def shutdown_kernel(self, now): pass
class Client:
    def execute_interactive(self, code, timeout, output_hook):
        output_hook({"content": {"execution_state": "busy"}})
        output_hook({"content": {"text": SAYS}})
    def stop_channels(self): pass
def start_new_kernel(**options): return Manager(), Client()
"""
SERVER = """\
import http.server, json, os, sys
assert "--allow-root" in sys.argv and "--ip=127.0.0.1" in sys.argv
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/lab?token=t" else 403)
        self.end_headers()
        self.wfile.write(PAGE)
server = http.server.HTTPServer(("127.0.0.1", 0), Page)
place = {"url": f"http://127.0.0.1:{server.server_port}/", "token": "t", "version": "4.9"}
with open(os.environ["JUPYTER_RUNTIME_DIR"] + "/jpserver-1.json", "w") as file:
    json.dump(place, file)
server.serve_forever()
"""
GOOD = SERVER.replace("PAGE", 'b"<script id=jupyter-config-data>"')


def put(folder: Path, monkeypatch: pytest.MonkeyPatch, *, says: str = "42\\n", server: str = GOOD) -> None:
    """The two modules that the check starts, found before any that is installed."""
    for module, text in {
        "jupyter_client/__init__.py": "",
        "jupyter_client/manager.py": MANAGER.replace("SAYS", f'"{says}"'),
        "jupyterlab/__init__.py": "",
        "jupyterlab/__main__.py": server,
    }.items():
        path = folder / module
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, "")  # put back at the end
    for name in ("jupyter_client", "jupyter_client.manager"):
        monkeypatch.delitem(usage.sys.modules, name, raising=False)


def test_a_kernel_that_computes_and_a_page_that_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, monkeypatch)
    assert usage.check_jupyter(None).detail == "a kernel answers, and JupyterLab 4.9 is served"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("says", "server", "told"),
    [
        ("43", GOOD, r"a kernel says '43' to print"),
        ("42", "raise SystemExit('no such port')", "serves no page: no such port"),
        ("42", "", "serves no page: it says nothing"),
    ],
)
def test_what_does_not_work_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, server: str, told: str
) -> None:
    put(tmp_path, monkeypatch, says=says, server=server)
    with pytest.raises(CheckFailure, match=told):
        usage.check_jupyter(None)  # type: ignore[arg-type]
