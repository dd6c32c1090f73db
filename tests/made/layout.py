"""Images in a store of a test's own."""

from __future__ import annotations

from collections.abc import Mapping

from imagefactory.build.base.image import write_index
from imagefactory.oci.layout import Layout
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    canonical_json,
    format_descriptor,
)

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"


def add_image(
    layout: Layout,
    name: str,
    contents: list[bytes],
    *,
    architecture: str = "amd64",
    environment: Mapping[str, str] | None = None,
    **labels: str,
) -> Descriptor:
    variables = ["A=1=2", *(f"{key}={value}" for key, value in (environment or {}).items())]
    layers = [layout.add(content, LAYER_TYPE) for content in contents]
    config = {
        "architecture": architecture,
        "config": {"Env": variables, **({"Labels": labels} if labels else {})},
        "created": "2026-01-02T03:04:05Z",
        "rootfs": {"diff_ids": [layer.digest for layer in layers]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": format_descriptor(layout.add(canonical_json(config), CONFIG_TYPE)),
        "layers": [format_descriptor(layer) for layer in layers],
    }
    index = write_index(layout, manifest, f"linux/{architecture}")
    layout.tag(name, index)
    return index
