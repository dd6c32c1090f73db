"""A store with bytes flipped, files cut, lost or added: what is wrong is named, and can be mended."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from imagefactory.errors import StoreError
from imagefactory.oci.layout import Layout
from imagefactory.oci.maintenance import check, collect
from imagefactory.progress import QuietProgress
from tests.made.filled_store import covered, fill
from tests.made.mutants import changed_bytes

KINDS = ("change", "lose", "add", "move")


def harm(data: st.DataObject, layout: Layout, whole: dict[str, bytes]) -> None:
    name = data.draw(st.sampled_from(sorted(whole)))
    path = layout.path / name
    match data.draw(st.sampled_from(KINDS)):
        case "change" if path.exists():
            path.write_bytes(data.draw(changed_bytes(path.read_bytes())))
        case "lose":
            path.unlink(missing_ok=True)
        case "add":
            path.with_name("0" * len(path.name)).write_bytes(whole[name])
        case "move" if path.exists():
            path.replace(layout.path / data.draw(st.sampled_from(sorted(whole))))


@given(st.data())
def test_a_harmed_store_is_named_and_mended(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        layout = Layout(Path(folder, "store"))
        fill(layout)
        whole = covered(layout)
        for _ in range(data.draw(st.integers(1, 5))):
            harm(data, layout, whole)
        harmed = {name for name, content in covered(layout).items() if whole.get(name) != content}
        found = {fault.place for fault in check(layout, QuietProgress(), mend=False).faults}
        assert harmed <= found, harmed - found
        try:
            collect(layout, QuietProgress())
            layout.image("a:1")
        except StoreError as error:
            assert error.hint
        left = {fault.place for fault in check(layout, QuietProgress(), mend=True).faults if not fault.mended}
        assert left <= {"a:1"}
        fill(layout)
        assert check(layout, QuietProgress(), mend=False).faults == ()
        assert {name: covered(layout)[name] for name in whole} == whole
        shutil.rmtree(layout.path)
