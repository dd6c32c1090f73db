"""A store with one of everything that `image check` looks at."""

from __future__ import annotations

from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.manifests import MANIFEST_TYPE, OciLayer
from imagefactory.progress import QuietProgress
from tests.made.layout import LAYER_TYPE, add_image
from tests.made.store_contract import artifact


def fill(layout: Layout) -> None:
    """An image `a:1` with a verdict, and a record of each kind. Again, it brings what is missing."""
    with layout.in_use(QuietProgress()):
        index = add_image(layout, "a:1", [b"one", b"two"])
        verdict = artifact(LayoutStore(layout), "a", index, "application/vnd.verdict", "good")
        LayoutStore(layout).put_manifest("a", verdict, MANIFEST_TYPE)
        one = layout.add(b"one", LAYER_TYPE)
        layout.record_layer("ab", OciLayer(descriptor=one, diff_id=one.digest, title="one"))
        layout.keep(layout.path / "layers" / "ab.files", b"one\tsum\tpath\n")
        for kind in ("images", "scans", "sizes", "pushed"):
            layout.record(kind, "ab", {"digest": index.digest})


def covered(layout: Layout) -> dict[str, bytes]:
    """The files of which a check knows what they should be; only people know the names in index.json."""
    apart = ("locks", "oci-layout", "index.json")
    found = (path.relative_to(layout.path) for path in layout.path.rglob("*") if path.is_file())
    return {str(path): (layout.path / path).read_bytes() for path in found if path.parts[0] not in apart}
