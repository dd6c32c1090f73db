"""Compute an image from its layer lock: digest, config, manifest and index, without layer bytes. No I/O.

Only for the embedded engine, on a base of Debian packages.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence

from imagefactory.build.base.image import BlobSink, BuiltBase, format_time, write_base, write_manifest
from imagefactory.build.base.look import base_key
from imagefactory.build.definition import SHARED, entrypoint, files_digest, new_places
from imagefactory.errors import BuildError
from imagefactory.lock.files import lock_digest
from imagefactory.lock.layers import LayerLock
from imagefactory.model import BaseLock, BuildSpec, Lock, OwnFile
from imagefactory.oci.layers import CHUNK, TarSegment, codec
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import (
    CONFIG_TYPE,
    LAYERS_VERSION,
    MANIFEST_TYPE,
    Descriptor,
    Image,
    OciLayer,
    canonical_json,
    digest_of,
    hash_key,
    parse_config,
)


def write_image(
    blobs: BlobSink, definition: BuildSpec, base: BuiltBase, layers: Sequence[OciLayer]
) -> Descriptor:
    """Add config, manifest and index of an image with these `layers`. Return the index's descriptor."""
    config = blobs.add(canonical_json(format_config(definition, base, layers)), CONFIG_TYPE)
    return write_manifest(
        blobs, config, layers, definition.target.platform, image_annotations(definition, base)
    )


def image_annotations(definition: BuildSpec, base: BuiltBase) -> dict[str, str]:
    """Return the annotations of an image's manifest."""
    return {**dict(definition.labels), "org.opencontainers.image.base.digest": base.image.manifest}


def format_config(definition: BuildSpec, base: BuiltBase, layers: Sequence[OciLayer]) -> dict[str, object]:
    """Return the OCI image config. Its only time is the base's.

    Variables of a pulled base stay, below ours. Its user, entry point and labels do not: all users of the
    image get root and a Python, on any base.
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
    """Return the variables of a base that its images keep, without PATH and Python's own.

    PYTHONPATH and similar ones would lead the environment's Python to packages that are not locked.
    """
    return tuple(
        (name, value)
        for name, value in environment
        if re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)
        and name != "PATH"
        and not re.fullmatch("PYTHON[A-Z0-9]+", name)
    )


def merge_environment(definition: BuildSpec, base: BuiltBase) -> tuple[tuple[str, str], ...]:
    """Return the definition's variables, then those of the base that the definition does not set.

    The base's directories come last in PATH, so that programs of the base (/usr/local/cuda/bin) are found.
    """
    ours = dict(definition.environment)
    theirs = dict(base.image.environment)
    directories = [*ours.get("PATH", "").split(":"), *theirs.get("PATH", "").split(":")]
    ours["PATH"] = ":".join(
        dict.fromkeys(directory for directory in directories if directory.startswith("/"))
    )
    return (*ours.items(), *((n, v) for n, v in inherited(base.image.environment) if n not in ours))


OWN_TITLE = "own files"


def own_title(definition: BuildSpec) -> str:
    """Return the title of the layer with project files, by their content; empty for no such layer."""
    if not definition.files and definition.start.workdir == "/":
        return ""
    return f"{OWN_TITLE} {hash_key(files_digest(definition.files), definition.start.workdir)[:12]}"


def lay_own_files(definition: BuildSpec, segment: TarSegment) -> None:
    """Write project files as owned by root, and readable by all.

    Directories that every image has get no entry, so they stay unchanged. Raises BuildError for a file that
    has changed since it was hashed.
    """
    segment.known(*_shared(definition))
    for file in definition.files:
        segment.file(file.path.lstrip("/"), _read(file), size=file.size, executable=file.executable)
    if definition.start.workdir != "/":
        segment.folder(definition.start.workdir.lstrip("/"))


def _shared(definition: BuildSpec) -> Iterator[str]:
    for place in (*new_places(definition), f"{definition.start.workdir}/."):
        parts = place.strip("/").split("/")
        for depth in range(1, len(parts)):
            if SHARED.fullmatch(f"/{(path := '/'.join(parts[:depth]))}"):
                yield path


def _read(file: OwnFile) -> Iterator[bytes]:
    digest = hashlib.sha256()
    with file.source.open("rb") as file_handle:
        while data := file_handle.read(CHUNK):
            digest.update(data)
            yield data
    if digest.hexdigest() != file.sha256:
        raise BuildError(
            "file-changed", f"{file.source} changed while it was read", hint="run the command again"
        )


def lock_layers(definition: BuildSpec, bases: Sequence[BaseLock], image: Image, toolchain: str) -> LayerLock:
    """Return the layer lock of a built image, on bases with these locks, the lowest first."""
    return LayerLock(
        target=definition.target.name,
        lock=lock_digest(definition.lock),
        base=_bases_key(bases),
        toolchain=toolchain,
        layers=image.layers,
    )


def changed_inputs(lock: LayerLock, definition: BuildSpec, bases: Sequence[BaseLock]) -> str:
    """Return the inputs that changed since the layer lock was written, empty for none."""
    if lock.lock != lock_digest(definition.lock):
        return f"the lock of {definition.target.name} has changed"
    if lock.base != _bases_key(bases):
        return f"the base {definition.base.name} has changed"
    title = own_title(definition)
    there = [layer.title for layer in lock.layers if layer.title.startswith(OWN_TITLE)]
    return "" if there == ([title] if title else []) else "the own files have changed"


def _bases_key(bases: Sequence[BaseLock]) -> str:
    keys = [base_key(base) for base in bases]
    return keys[0] if len(keys) == 1 else f"sha256:{hash_key('bases', *keys)}"


def image_of(
    lock: LayerLock, definition: BuildSpec, bases: Sequence[BaseLock], blobs: BlobSink | None = None
) -> Image:
    """Return the image of a definition with the layers of `lock`. Its small blobs are added to `blobs`."""
    epoch, below = bases[0].source_date_epoch, lock.layers[: len(bases)]
    named = _LayerNamer()
    index = write_base(named, below, epoch, definition.base.platform)
    on = BuiltBase(
        image=named.image(f"base:{definition.base.name}", index, below),
        folders=(),
        identity=base_key(bases[0]),
        epoch=epoch,
        published=True,
    )
    named = _LayerNamer(blobs)
    index = write_image(named, definition, on, lock.layers)
    return named.image(reference(definition.target), index, lock.layers)


class _LayerNamer:
    """Computes digests as a layout does, and remembers the last blob of each media type."""

    def __init__(self, blobs: BlobSink | None = None) -> None:
        self.blobs, self.last, self.config = blobs, dict[str, Descriptor](), b""

    def add(self, data: bytes, media_type: str) -> Descriptor:
        if self.blobs is not None:
            self.blobs.add(data, media_type)
        if media_type == CONFIG_TYPE:
            self.config = data
        self.last[media_type] = Descriptor(media_type=media_type, digest=digest_of(data), size=len(data))
        return self.last[media_type]

    def image(self, name: str, index: Descriptor, layers: Sequence[OciLayer]) -> Image:
        config = parse_config(self.config, len(layers))
        return Image(
            name=name,
            digest=index.digest,
            manifest=self.last[MANIFEST_TYPE].digest,
            config=self.last[CONFIG_TYPE].digest,
            size=sum(layer.descriptor.size for layer in layers),
            layers=tuple(layers),
            environment=config.environment,
            architecture=config.architecture,
            start=config.start,
        )


def build_tools_hash(lock: Lock, codec_name: str) -> str:
    """Return the hash of the tools that determine layer bytes, besides the lock's packages and their base."""
    import installer

    tools = [codec(codec_name).identity, f"layers {LAYERS_VERSION}"]
    tools += [f"installer {installer.__version__}"] if lock.wheels else []
    return ", ".join([*tools, *([linker()] if lock.conda else [])])


def linker() -> str:
    """Return the linker of conda packages. Another version may link them differently."""
    from importlib.metadata import version

    from imagefactory.build.conda_install import LINKER

    return f"py-rattler {version('py-rattler')}, {LINKER}"
