"""A factory of two small families, and images of it in a store."""

from __future__ import annotations

import shutil
from pathlib import Path

from imagefactory.oci.graph import ManifestGraph, StoreRepository, read_graph
from imagefactory.oci.layout import Layout, LayoutStore
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    canonical_json,
    format_descriptor,
)
from imagefactory.progress import QuietProgress

LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"
RECIPE = """\
family: {family}
description: For tests of registries
source: pypi
framework: nvidia-cuda-runtime-cu12
platform: linux/amd64
base: debian-12
python: "3.11"
capabilities: ["8.0"]
checks: [packages]
matrix:
  - version: "12.1"
    cuda: ["12.1"]
"""
SECOND_ROW = '  - version: "12.4"\n    cuda: ["12.4"]\n'


def make_root(folder: Path) -> Path:
    """A factory of the families `one` (two targets) and `two`."""
    (folder / "recipes").mkdir(parents=True)
    (folder / "imagefactory.toml").write_text("")
    shutil.copy(Path(__file__).parents[2] / "recipes" / "bases.yaml", folder / "recipes")
    (folder / "recipes" / "one.yaml").write_text(RECIPE.format(family="one") + SECOND_ROW)
    (folder / "recipes" / "two.yaml").write_text(RECIPE.format(family="two"))
    return folder


def put_index(
    store: LayoutStore, repository: str, layers: list[bytes], platforms: list[str], tag: str
) -> None:
    rows = []
    for architecture in platforms:
        blobs = [store.layout.add(layer, LAYER) for layer in (*layers, architecture.encode())]
        config = {
            "architecture": architecture,
            "os": "linux",
            "config": {"Env": [f"FAMILY={repository}"]},
            "rootfs": {"type": "layers", "diff_ids": [blob.digest for blob in blobs]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": format_descriptor(store.layout.add(canonical_json(config), CONFIG_TYPE)),
            "layers": [format_descriptor(blob) for blob in blobs],
        }
        row = format_descriptor(store.put_manifest(repository, canonical_json(manifest), MANIFEST_TYPE))
        rows.append({**row, "platform": {"os": "linux", "architecture": architecture}})
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": rows}
    store.put_manifest(repository, canonical_json(index), INDEX_TYPE, tag)


def stored_image(path: Path, family: str, layers: list[bytes], tag: str = "12.1-cu121") -> ManifestGraph:
    """What a build would have left in the store: an image under the tag of a target."""
    layout = Layout(path)
    store = LayoutStore(layout)
    with layout.in_use(QuietProgress()):
        put_index(store, family, layers, ["amd64"], tag)
    return read_graph(StoreRepository(store=store, repository=family), tag)


def candidate_of(graph: ManifestGraph) -> str:
    return f"12.1-cu121-{graph.root.descriptor.digest[7:19]}"
