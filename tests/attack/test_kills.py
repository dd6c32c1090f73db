"""A process that works on a store is killed between any two things it does: nothing is lost or half made.

Python tells of each (`sys.audithook`): the n-th is the last, so a seed says where.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagefactory.oci.graph import StoreRepository, read_graph
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.maintenance import check, collect
from imagefactory.oci.manifests import OciLayer, digest_of
from imagefactory.oci.transfer import TransferRequest, send
from imagefactory.oci.unpack import UnpackedLayers
from imagefactory.progress import QuietProgress
from tests.made.filled_store import covered, fill
from tests.made.layer_store import file, folder, link, make_tar
from tests.made.layout import LAYER_TYPE

EVENTS = ("open", "os.rename", "os.link", "os.symlink", "os.mkdir", "os.remove", "os.rmdir", "os.chmod")
EVENTS += ("os.truncate", "os.utime", "os.setxattr", "fcntl.flock", "tempfile.mkstemp")
LAYER = make_tar(folder("a"), file("a/b", b"hello"), link("c", "a/b"), file(".wh.gone"))


def unpack(layout: Layout) -> None:
    with layout.in_use(QuietProgress()):
        blob = layout.add(LAYER, LAYER_TYPE)
        layer = OciLayer(descriptor=blob, diff_id=digest_of(LAYER), title="a layer")
        unpacked = UnpackedLayers(layout.path / "unpacked")
        unpacked.drop_changed([layer], QuietProgress())
        unpacked.unpack([layer], layout.blob_path, QuietProgress())


def bring(layout: Layout) -> None:
    """An image from another store, which is here at another place, whole."""
    other = Layout(layout.path.with_name("other"))
    source = StoreRepository(store=LayoutStore(other), repository="a")
    sending = TransferRequest(graph=read_graph(source, "1"), repository="b", candidate="2", tags=("latest",))
    with layout.in_use(QuietProgress()):
        send(source, LayoutStore(layout), sending, QuietProgress())


def untag(layout: Layout) -> None:
    if "a:1" in layout.tags():
        layout.untag("a:1")
    collect(layout, QuietProgress())


ACTIONS: dict[str, Callable[[Layout], object]] = {
    "fill": fill,
    "unpack": unpack,
    "bring": bring,
    "untag": untag,
    "collect": lambda layout: collect(layout, QuietProgress()),
    "mend": lambda layout: check(layout, QuietProgress(), mend=True),
}


def killed(work: Callable[[], object], last: int) -> bool:
    """Does `work` in a process that is killed before it does its thing number `last`; whether it was."""
    pid = os.fork()
    if pid == 0:
        left = last

        def look(event: str, _: object) -> None:
            nonlocal left
            if event in EVENTS:
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        code = 1
        try:
            sys.addaudithook(look)
            work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def contents(layout: Layout) -> dict[str, bytes | None]:
    """What lies in a store; of records of unpacked layers the names, for they hold times."""
    found = covered(layout)
    return {name: None if name.startswith("unpacked/.sums") else data for name, data in found.items()}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@settings(max_examples=60)  # many processes each
@given(st.booleans(), st.lists(st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 150)), max_size=4))
def test_a_store_outlives_who_works_on_it(full: bool, deaths: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory(prefix="attack-") as ground:
        layout = Layout(Path(ground, "store"))
        fill(Layout(Path(ground, "other")))
        if full:
            fill(layout)
            unpack(layout)
        held = full
        for name, last in deaths:
            killed(lambda: ACTIONS[name](layout), last)  # noqa: B023
            assert check(layout, QuietProgress(), mend=False).faults == ()
            held = held and name != "untag"
            assert not held or layout.image("a:1")
        twin = Layout(Path(ground, "twin", "store"))
        fill(Layout(Path(ground, "twin", "other")))
        for made in (layout, twin):
            for name in ("fill", "unpack", "bring", "collect"):
                ACTIONS[name](made)
        assert contents(layout) == contents(twin)
        assert list(layout.tmp.iterdir()) == []
        assert list((layout.path / "unpacked").glob(".*.part")) == []
