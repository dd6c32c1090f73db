"""The protocol of stores of images, and the names in them: references, places and mirrors.

There are two stores: an image layout on disk (layout.py) and a registry (registry/client.py). The same
contract tests cover both. Images, .sif files and verdicts are all manifests and blobs, so transfer.py copies
anything from any store to any other.

Digests are `sha256:<64 hex>`, sizes are in bytes. A repository is a path such as `pytorch` or
`site/pytorch`. A store on disk has one pool of blobs for all repositories.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from imagefactory.errors import UsageError
from imagefactory.oci.manifests import Descriptor

REBUILD = "build the image again (imagefactory build TARGET), or pull it again"
"""The fix for a corrupt or missing part of a stored image."""
INVALID_HINT = "use another image: this one is not valid"
"""The fix for an image whose manifest or config breaks the OCI specification."""

# Distribution specification, "Pulling manifests": names, and tags of at most 128 characters.
REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")
_WITH_PORT = re.compile(r"(.+:[0-9]{1,5}):(.*)", re.DOTALL)

Source = Callable[[int], Iterator[bytes]]
"""A function that yields the bytes of a blob from an offset on. A resumed transfer calls it again."""
Mirrors = tuple[tuple[str, str], ...]
"""Pairs of `host[/prefix]` of references and the `host[:port][/path]` to use instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReference:
    """A reference `host/repository:tag@digest`. `registry` is empty for the store on disk.

    At least one of `tag` and `digest` is set. The digest has precedence.
    """

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    @property
    def tag_or_digest(self) -> str:
        """The digest, else the tag."""
        return self.digest or self.tag

    def __str__(self) -> str:
        full_name = f"{self.registry}/{self.repository}" if self.registry else self.repository
        return full_name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")


def parse_reference(text: str) -> ImageReference:
    """Return the reference `host[:port]/repository[:tag][@sha256:...]`; the host is required.

    Raises UsageError for another text, and for one without a host, or without both tag and digest.
    """
    rest, offset, digest = text.rpartition("@") if "@" in text else (text, "", "")
    if "@" in rest or (offset and "/" in digest):
        raise UsageError(
            "reference-has-login",
            "a reference must not contain a user or password",
            hint="write HOST/NAME:TAG, and log in with docker login HOST",
        )
    host, slash, path = rest.partition("/")
    if not slash or not _is_host(host):
        raise UsageError(
            "reference-incomplete",
            f"'{text}' has no registry host",
            hint="add the host, such as registry.example.org/pytorch:2.3-cu121",
        )
    repository, colon, tag = path.partition(":")
    if (
        not REPOSITORY.fullmatch(repository)
        or (colon and not TAG.fullmatch(tag))
        or (offset and not DIGEST.fullmatch(digest))
    ):
        raise UsageError(
            "reference-invalid",
            f"'{text}' is not an image reference",
            hint="write HOST/NAME:TAG or HOST/NAME@sha256:...",
        )
    if not tag and not digest:
        raise UsageError(
            "reference-incomplete", f"'{text}' has neither a tag nor a digest", hint=f"write {text}:TAG"
        )
    return ImageReference(registry=host, repository=repository, tag=tag, digest=digest)


def _is_host(text: str) -> bool:
    return HOST.fullmatch(text) is not None and ("." in text or ":" in text or text == "localhost")


def check_repository(text: str) -> str:
    """Return `text`. Raises UsageError if it is not a repository."""
    if not REPOSITORY.fullmatch(text):
        raise UsageError(
            "reference-invalid",
            f"{text[:160]!r} is not a valid name of a repository",
            hint="use lower case, such as site/pytorch",
        )
    return text


def check_digest(text: str) -> str:
    """Return `text`. Raises UsageError if it is not a digest."""
    if not DIGEST.fullmatch(text):
        raise UsageError(
            "reference-invalid",
            f"{text[:160]!r} is not a sha256 digest",
            hint="write sha256: and 64 hex digits",
        )
    return text


def check_tag_or_digest(text: str) -> str:
    """Return `text`. Raises UsageError if it is neither a tag nor a digest."""
    if not (DIGEST.fullmatch(text) or TAG.fullmatch(text)):
        raise UsageError(
            "reference-invalid",
            f"{text[:160]!r} is neither a tag nor a digest",
            hint="write a tag, or sha256: and 64 hex digits",
        )
    return text


def split_place(text: str) -> tuple[str, str]:
    """Return (host, path) of `host[:port][/path]`; the path may be empty.

    Raises UsageError for another text; the message does not repeat a user or password.
    """
    host, slash, path = text.partition("/")
    if "@" in text:
        raise UsageError(
            "reference-has-login",
            "an address of a registry must not contain a user, password or digest",
            hint="write only host[:port][/path], and log in with docker login",
        )
    if not _is_host(host) or (slash and not REPOSITORY.fullmatch(path)):
        raise UsageError(
            "reference-invalid",
            f"'{text}' is not the address of a registry",
            hint="write host[:port][/path], such as registry.example.org/images (no https://, no tag)",
        )
    return host, path


def split_tagged(text: str) -> tuple[str, str]:
    """Return (place, tag) of `host[:port][/path][:tag]`; the tag may be empty, and the place is not checked.

    A number directly after a host is its port. Raises UsageError for an invalid tag.
    """
    head, slash, last = text.rpartition("/")
    name, colon, tag = last.partition(":")
    if not slash:  # HOST, HOST:PORT or HOST:PORT:TAG
        port = _WITH_PORT.fullmatch(last)
        name, colon, tag = (port[1], ":", port[2]) if port else (last, "", "")
    if colon and not TAG.fullmatch(tag):
        raise UsageError(
            "reference-invalid", "the text after the last ':' is not a tag", hint="write HOST/PATH:TAG"
        )
    return f"{head}{slash}{name}", tag


def resolve_mirror(reference: ImageReference, mirrors: Mirrors) -> ImageReference:
    """Return the reference on the mirror with the longest matching prefix, else `reference`.

    Only the address changes: bytes are still checked against the digest. Docker Hub's images match under one
    name, `docker.io/library/debian`. Raises UsageError for a mirror without an image name.
    """
    host, repository = reference.registry, reference.repository
    if host in ("index.docker.io", "registry-1.docker.io"):
        host = "docker.io"
    if host == "docker.io" and "/" not in repository:
        repository = f"library/{repository}"
    name = f"{host}/{repository}"
    matches = [pair for pair in mirrors if f"{name}/".startswith(f"{pair[0]}/")]
    if not matches:
        return reference
    prefix, mirror = max(matches, key=lambda pair: len(pair[0]))
    host, path = split_place(mirror)
    repository = "/".join(filter(None, (path, name.removeprefix(prefix).strip("/"))))
    if not repository:
        raise UsageError(
            "mirror-invalid",
            f"mirrors: '{prefix}' is an image, but its mirror {mirror} has no image name",
            hint=f"write the image's name on the mirror: {mirror}/NAME",
        )
    return replace(reference, registry=host, repository=repository)


class Store(Protocol):
    """Blobs, manifests, tags and referrers. Every method may raise StoreError or RegistryError."""

    @property
    def name(self) -> str:
        """A host or a directory, for messages."""

    def has(self, repository: str, descriptor: Descriptor) -> bool:
        """Return whether `repository` has this blob with the right size."""

    def read(self, repository: str, descriptor: Descriptor, offset: int = 0) -> Iterator[bytes]:
        """Yield the blob's bytes from `offset` on.

        Yields exactly `descriptor.size - offset` bytes, which from offset 0 are checked against the digest.
        Otherwise raises an error, also in the middle.
        """

    def write(self, repository: str, descriptor: Descriptor, source: Source) -> int:
        """Put a blob from `source`. Return the bytes that were sent, 0 if the store had the blob.

        When this returns, the blob is complete and has its digest. A partial blob is never visible.
        """

    def mount(self, repository: str, descriptor: Descriptor, origin: str) -> bool:
        """Add a blob of the repository `origin` to `repository`. Return whether the store could."""

    def manifest(self, repository: str, reference: str) -> tuple[Descriptor, bytes] | None:
        """Return the manifest of a tag or digest, checked against its digest, or None."""

    def put_manifest(self, repository: str, data: bytes, media_type: str, tag: str = "") -> Descriptor:
        """Put a manifest whose blobs the store has; return the digest that the store confirmed.

        A manifest with a `subject` becomes one of the subject's referrers.
        """

    def tags(self, repository: str) -> tuple[str, ...]:
        """Return the repository's tags, sorted; none if it does not exist."""

    def untag(self, repository: str, tag: str) -> None:
        """Remove a tag; no error if there is none."""

    def referrers(self, repository: str, digest: str, *artifact_types: str) -> tuple[Descriptor, ...]:
        """Return the manifests with the subject `digest`, all or those with one of some artifact types."""
