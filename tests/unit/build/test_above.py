"""What a base adds to the one below, as a layer: neither more nor less, whatever the times say."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from imagefactory.build.base.make import read_facts, write_difference
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import OciLayer
from imagefactory.progress import QuietProgress

PLAIN = "application/vnd.oci.image.layer.v1.tar"
BELOW = {
    "etc": "d755",
    "etc/hosts": "f644 same",
    "etc/status": "f644 old",
    "etc/tool": "f644 x",
    "lib": "l usr/lib",
    "usr": "d755",
    "usr/gone": "d755",
    "usr/gone/a": "f644 a",
    "usr/lib": "d755",
    "usr/lib/one": "f644 one",
    "usr/lib/two": "h usr/lib/one",
    "var": "d1777",
}


def tar(entries: dict[str, str], *, mtime: int = 1, owners: tuple[str, ...] = ()) -> bytes:
    """An archive of `dMODE`, `fMODE CONTENT`, `l TARGET` and `h TARGET`; `owners` are another's."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as out:
        for name, text in entries.items():
            info, (kind, _, rest) = tarfile.TarInfo(name), text.partition(" ")
            info.mtime, info.uid = mtime, 7 if name in owners else 0
            data = b""
            if kind[0] in "df":
                info.type = tarfile.DIRTYPE if kind[0] == "d" else tarfile.REGTYPE
                info.mode, data = int(kind[1:], 8), rest.encode()
                info.size = len(data)
            else:
                info.type, info.linkname = tarfile.SYMTYPE if kind == "l" else tarfile.LNKTYPE, rest
            out.addfile(info, io.BytesIO(data))
    return file.getvalue()


def difference(tmp_path: Path, whole: dict[str, str], owners: tuple[str, ...] = ()) -> dict[str, str]:
    layout = Layout(tmp_path / "store")
    data = tar(BELOW)
    layer = OciLayer(
        descriptor=layout.add(data, PLAIN), diff_id=f"sha256:{hashlib.sha256(data).hexdigest()}", title="b"
    )
    (tmp_path / "whole.tar").write_bytes(tar(whole, mtime=9, owners=owners))
    facts = read_facts(layout, (layer,), QuietProgress())
    made = write_difference(tmp_path / "whole.tar", facts, tmp_path / "out.tar")
    written = made.path.read_bytes()
    assert (made.sha256, made.size) == (hashlib.sha256(written).hexdigest(), len(written))
    found = {}
    with tarfile.open(made.path) as archive:
        for member in archive:
            kind = {tarfile.DIRTYPE: "d", tarfile.SYMTYPE: "l", tarfile.LNKTYPE: "h"}.get(member.type, "f")
            content = archive.extractfile(member).read().decode() if kind == "f" else member.linkname  # type: ignore[union-attr]
            found[member.name] = (
                f"{kind}{member.mode:o} {content}".strip() if kind in "df" else f"{kind} {content}"
            )
    assert list(found) == sorted(found, key=lambda name: name.split("/"))
    return found


def test_nothing_more_is_nothing(tmp_path: Path) -> None:
    assert difference(tmp_path, BELOW) == {}


def test_what_is_new_and_changed_and_gone(tmp_path: Path) -> None:
    whole = BELOW | {
        "etc/status": "f644 new",
        "etc/tool": "f755 x",
        "usr/lib/gl": "d755",
        "usr/lib/gl/libgl.so": "f644 gl",
        "usr/lib/gl/libgl.so.1": "l libgl.so",
    }
    for name in ("usr/gone", "usr/gone/a"):
        del whole[name]
    assert difference(tmp_path, whole) == {
        "etc": "d755",
        "etc/status": "f644 new",
        "etc/tool": "f755 x",
        "usr": "d755",
        "usr/.wh.gone": "f644",
        "usr/lib": "d755",
        "usr/lib/gl": "d755",
        "usr/lib/gl/libgl.so": "f644 gl",
        "usr/lib/gl/libgl.so.1": "l libgl.so",
    }


@pytest.mark.parametrize(
    ("more", "found"),
    [
        # A hard link to a file of the layer below is a file of its own: no engine need look there.
        ({"usr/lib/three": "h usr/lib/one"}, {"usr/lib/three": "f644 one"}),
        (
            {"usr/lib/new": "f644 n", "usr/lib/newer": "h usr/lib/new"},
            {"usr/lib/new": "f644 n", "usr/lib/newer": "h usr/lib/new"},
        ),
        ({"usr/lib/two": "f644 one"}, {}),
        ({"lib": "l usr/lib64"}, {"lib": "l usr/lib64"}),
        ({"var": "d755"}, {"var": "d755"}),
        ({"etc/hosts": "l /run/hosts"}, {"etc/hosts": "l /run/hosts"}),
    ],
)
def test_links_modes_and_kinds(tmp_path: Path, more: dict[str, str], found: dict[str, str]) -> None:
    made = difference(tmp_path, BELOW | more)
    assert {name: text for name, text in made.items() if name in more} == found


def test_another_owner_is_another_file(tmp_path: Path) -> None:
    assert "var" in difference(tmp_path, BELOW, owners=("var",))
