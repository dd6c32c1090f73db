"""Project pages of an index, as JSON and as HTML."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from imagefactory.http import HttpSession, RejectedError
from imagefactory.lock.pypi.index import IndexFile, PackageIndex, _parse_json, files_before, project_files
from imagefactory.model import ReleaseCutoff
from tests.made.errors import fails
from tests.made.values import make_lock

PAGE = """<!DOCTYPE html><html><body>
<a href="demo-1.0.tar.gz#sha256=AB12" data-requires-python="&gt;=3.9">demo-1.0.tar.gz</a>
<a href="demo-2.0.tar.gz" data-yanked="it breaks">demo-2.0.tar.gz</a>
<a>nothing</a></body></html>"""


def test_a_page_of_html(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(PAGE)
    index = PackageIndex(url="", origin="", certificates="", proxy="", environment=())
    web = HttpSession(index)
    first, second = project_files(web, tmp_path.as_uri())
    web.close()
    assert (first.filename, first.sha256, first.python, first.yanked) == (
        "demo-1.0.tar.gz",
        "ab12",
        ">=3.9",
        False,
    )
    assert (second.sha256, second.python, second.yanked, second.uploaded) == ("", "", True, "")


def test_a_page_of_json() -> None:
    row = '{"filename": "demo-1.0.tar.gz", "url": "../demo-1.0.tar.gz#x", "hashes": {"sha256": "ab"}'
    rest = '"requires-python": ">=3.9", "yanked": "it breaks", "upload-time": "2026-11-23T10:00:00.1Z"'
    (told, bare) = _parse_json(f'{{"files": [{row}, {rest}}}, {row}}}]}}', "https://i.example/simple/demo/")
    assert told == IndexFile(
        filename="demo-1.0.tar.gz",
        url="https://i.example/simple/demo-1.0.tar.gz",
        sha256="ab",
        yanked=True,
        python=">=3.9",
        uploaded="2026-11-23T10:00:00.1Z",
    )
    assert (bare.yanked, bare.python, bare.uploaded) == (False, "", "")
    with pytest.raises(RejectedError, match="PEP 691"):
        _parse_json("{}", "https://i.example/simple/demo/")


def test_files_after_the_cutoff_are_left_out_and_one_without_a_time_is_an_error() -> None:
    def file(name: str, uploaded: str) -> IndexFile:
        return IndexFile(filename=name, url="", sha256="", uploaded=uploaded)

    old, new = (
        file("demo-1.0.tar.gz", "2026-11-20T23:59:59.9Z"),
        file("demo-2.0.tar.gz", "2026-11-21T00:00:01Z"),
    )
    bare = file("demo-3.0.tar.gz", "")
    cutoff = ReleaseCutoff(time=datetime(2026, 11, 21, tzinfo=UTC), allowed=("free",))
    lock = make_lock(cutoff=cutoff)
    assert files_before("demo", (old, new), lock) == (old,)
    assert files_before("free", (old, new, bare), lock) == (old, new, bare)
    assert files_before("demo", (old, bare), make_lock()) == (old, bare)
    with fails("upload-time-missing"):
        files_before("demo", (old, bare), lock)
