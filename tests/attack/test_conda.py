"""Conda packages that somebody else packed: linked, scanned, or refused; nothing outside is touched."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from imagefactory.build.conda.prefix import LinkPlan, staging_directory
from imagefactory.errors import ImagefactoryError
from imagefactory.model import LockedCondaPackage
from imagefactory.progress import QuietProgress
from imagefactory.scan.files import scan_path
from tests.attack.ground import ground
from tests.made.gpu_code import library
from tests.made.mutants import HOSTILE, changed_bytes
from tests.services.conda_package import PLACEHOLDER, CondaPackage, File, pack

PATHS = ("lib/a.so", "bin/a", "site-packages/a.py", "../a", "/neighbour", "a/../../b", "conda-meta/x.json")
TARGETS = ("lib/a.so", "../../../neighbour", "/", "/etc/passwd", "a", "")
CODE = library(("sm_70", "compute_90/8.0"), padding=64)

files = st.builds(
    File,
    data=st.sampled_from((b"", CODE, PLACEHOLDER.encode(), f"#!{PLACEHOLDER}/bin/a\n".encode())),
    executable=st.booleans(),
    prefix=st.sampled_from(("", "text", "binary", "other")),
    link=st.sampled_from(("", "", *TARGETS)),
    told=st.sampled_from(("", "", "0" * 64)),
    kind=st.sampled_from(("", "", "hardlink", "softlink", "directory", "other")),
    absent=st.booleans(),
    mode=st.sampled_from((0, 0o644, 0o4755, 0o7777)),
)
packages = st.builds(
    CondaPackage,
    name=st.just("a"),
    noarch=st.sampled_from(("", "", "generic", "python")),
    files=st.dictionaries(st.sampled_from(PATHS), files, max_size=4),
    entry_points=st.lists(st.sampled_from(("a = a:main", "../b = a:main", *HOSTILE)), max_size=1).map(tuple),
    extra=st.dictionaries(
        st.sampled_from(("name", "depends", "subdir")), st.sampled_from(HOSTILE), max_size=1
    ),
    suffix=st.sampled_from((".conda", ".tar.bz2")),
    old=st.booleans(),
)


def draw_archive(data: st.DataObject, folder: Path) -> tuple[CondaPackage, Path]:
    package = data.draw(packages)
    path = pack(folder, package)
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(changed_bytes(path.read_bytes())))
    return package, path


@given(st.data())
def test_a_conda_package_is_scanned_or_refused(data: st.DataObject) -> None:
    with ground() as folder, suppress(ImagefactoryError):
        scan_path(draw_archive(data, folder)[1], QuietProgress())


@settings(max_examples=20)  # a fifth of a second each
@given(st.data())
def test_a_conda_package_is_linked_inside_or_refused(data: st.DataObject) -> None:
    with ground() as folder:
        package, path = draw_archive(data, folder)
        content = path.read_bytes()
        locked = LockedCondaPackage(
            name="a",
            version=package.version,
            build=package.build,
            subdir=package.subdir,
            url=f"https://conda.example.org/made/{package.subdir}/{path.name}",
            filename=path.name,
            sha256=hashlib.sha256(content).hexdigest(),
            md5="",
            size=len(content),
            depends=(),
        )
        staging = LinkPlan(
            archives={locked: path},
            groups=((locked,),),
            shown="/opt/env",
            scratch=folder / "scratch",
            cache=folder / "cache",
        )
        try:
            with staging_directory(staging, QuietProgress()) as linked:
                for above, _, names in os.walk(linked.folder):
                    assert all(Path(above, name).lstat().st_mode & 0o6000 == 0 for name in names)
        except ImagefactoryError as error:
            assert "Traceback" not in error.message, error.message
        assert list((folder / "scratch").iterdir()) == []
        assert {entry.name for entry in folder.iterdir()} <= {package.subdir, "scratch", "cache"}
