"""The frozen values of what was made: descriptors, layers, images and .sif files.

Digests are strings `sha256:<64 hex>`; sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from imagefactory.model import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """OCI content descriptor: what a digest holds and how many bytes it has."""

    media_type: str
    digest: str
    size: int
    annotations: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: its compressed blob and `diff_id`, the digest of the uncompressed tar."""

    descriptor: Descriptor
    diff_id: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image of the store.

    `digest` is the image index that tags point to, `manifest` the platform manifest that verdicts
    speak of, `config` the image config (it fixes the uncompressed content). `size` is the sum of
    the compressed layers, `architecture` the config's word (`amd64`), empty where it says none, and `start`
    what it says of how a container starts.
    """

    name: str
    digest: str
    manifest: str
    config: str
    size: int
    layers: tuple[Layer, ...]
    environment: tuple[tuple[str, str], ...]
    architecture: str = ""
    start: Start = field(default_factory=Start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sif:
    """A .sif file of the store, kept as an OCI artifact.

    `digest` is the artifact's manifest, `file` the descriptor of the .sif itself (its digest is the
    file's sha256, which stands in its name), `path` where it lies. `made_from` is the digest of the
    platform manifest it was converted from, empty where apptainer built it from a definition.
    """

    name: str
    digest: str
    file: Descriptor
    path: Path
    made_from: str
    compression: str

    @property
    def config(self) -> str:
        """What results of checks are kept under, as an image's config: here the sha256 of the file."""
        return self.file.digest
