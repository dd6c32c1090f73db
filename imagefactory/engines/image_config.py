"""An assembled image's config, with what is its base's below what is its own, its manifest and its index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from imagefactory.build.base.image import BaseImage, Blobs, format_time, write_index
from imagefactory.model import Definition
from imagefactory.oci.manifests import CONFIG_TYPE, MANIFEST_TYPE, TITLE, canonical_json, format_descriptor
from imagefactory.oci.model import Descriptor, Layer
from imagefactory.build.definition import entrypoint


def write_image(blobs: Blobs, definition: Definition, base: BaseImage, layers: Sequence[Layer]) -> Descriptor:
    """Adds config, manifest and index of an image of all these `layers`; gives the index's descriptor."""
    config = canonical_json(format_config(definition, base, layers))
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": format_descriptor(blobs.add(config, CONFIG_TYPE)),
        "layers": [
            {**format_descriptor(layer.descriptor), "annotations": {TITLE: layer.title}} for layer in layers
        ],
        "annotations": {
            **dict(definition.labels),
            "org.opencontainers.image.base.digest": base.image.manifest,
        },
    }
    return write_index(blobs, manifest, definition.target.platform)


def format_config(definition: Definition, base: BaseImage, layers: Sequence[Layer]) -> dict[str, object]:
    """The OCI image config. Its one clock is the base's.

    Of a pulled base's config its variables stay, below ours; its user, entry point, labels and the like
    do not: who pulls the image gets root and a Python, whatever it stands on.
    """
    created = format_time(base.epoch)
    start = definition.start
    os_name, architecture = definition.target.platform.split("/")
    return {
        "created": created,
        "architecture": architecture,
        "os": os_name,
        "config": {
            "Env": [f"{name}={value}" for name, value in merge_environment(definition, base)],
            **({"Entrypoint": list(started)} if (started := entrypoint(definition)) else {}),
            "Cmd": list(start.command),
            "WorkingDir": start.workdir,
            **({"User": start.user} if start.user else {}),
            "Labels": dict(definition.labels),
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": created, "created_by": f"imagefactory: {layer.title}"} for layer in layers],
    }


def inherited(environment: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """A base's variables that hold for what stands on it: not PATH, nor Python's own.

    PYTHONPATH and its like would lead the environment's Python to packages that nobody locked.
    """
    return tuple(
        (name, value)
        for name, value in environment
        if re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)
        and name != "PATH"
        and not re.fullmatch("PYTHON[A-Z0-9]+", name)
    )


def merge_environment(definition: Definition, base: BaseImage) -> tuple[tuple[str, str], ...]:
    """The definition's variables, then those of the base that it does not set.

    The base's folders come last in PATH, so what it adds (/usr/local/cuda/bin) is found.
    """
    ours = dict(definition.environment)
    theirs = dict(base.image.environment)
    folders = [*ours.get("PATH", "").split(":"), *theirs.get("PATH", "").split(":")]
    ours["PATH"] = ":".join(dict.fromkeys(folder for folder in folders if folder.startswith("/")))
    return (*ours.items(), *((n, v) for n, v in inherited(base.image.environment) if n not in ours))
