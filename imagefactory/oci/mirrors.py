"""Which registry is asked for an image: the one its reference names, or the mirror a site set for it.

Only the address changes. What is fetched by digest is checked against the digest, so a mirror can give
the right bytes or none.
"""

from __future__ import annotations

import re
from dataclasses import replace

from imagefactory.errors import UsageError
from imagefactory.oci.store import HOST, REPOSITORY, TAG, ImageReference

Mirrors = tuple[tuple[str, str], ...]
"""(`host[/prefix]` of references, `host[:port][/path]` to ask instead), as the site wrote them."""

_WITH_PORT = re.compile(r"(.+:[0-9]{1,5}):(.*)", re.DOTALL)


def split_place(text: str) -> tuple[str, str]:
    """`host[:port][/path]` as (host, path), the path "" where there is none.

    Raises UsageError for what is no such place. A user or password does not belong there: the message
    does not repeat it.
    """
    host, slash, path = text.partition("/")
    if "@" in text:
        raise UsageError(
            "reference-has-login",
            "an address of a registry must not contain a user, password or digest",
            hint="write only host[:port][/path], and log in with docker login",
        )
    named = "." in host or ":" in host or host == "localhost"
    if not HOST.fullmatch(host) or not named or (slash and not REPOSITORY.fullmatch(path)):
        raise UsageError(
            "reference-invalid",
            f"'{text}' is not the address of a registry",
            hint="write host[:port][/path], such as registry.example.org/images (no https://, no tag)",
        )
    return host, path


def split_tagged(text: str) -> tuple[str, str]:
    """`host[:port][/path][:tag]` as (place, tag), the tag "" where there is none.

    What follows a host alone is its port, and a tag only what follows that. Raises UsageError for what cannot
    be a tag; the place is not looked at.
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


def _full_name(reference: ImageReference) -> str:
    """`host/repository`, Docker Hub's under its one name: `docker.io/library/debian`."""
    host, repository = reference.registry, reference.repository
    if host in ("index.docker.io", "registry-1.docker.io"):
        host = "docker.io"
    if host == "docker.io" and "/" not in repository:
        repository = f"library/{repository}"
    return f"{host}/{repository}"


def resolve_mirror(reference: ImageReference, mirrors: Mirrors) -> ImageReference:
    """Where to fetch `reference`: the mirror of the longest prefix of its name, else itself.

    Raises UsageError for a mirror that leaves no name to ask for.
    """
    name = _full_name(reference)
    fitting = [
        (prefix, place) for prefix, place in mirrors if name == prefix or name.startswith(f"{prefix}/")
    ]
    if not fitting:
        return reference
    prefix, place = max(fitting, key=lambda pair: len(pair[0]))
    host, path = split_place(place)
    rest = name.removeprefix(prefix).strip("/")
    repository = "/".join(part for part in (path, rest) if part)
    if not repository:
        raise UsageError(
            "mirror-invalid",
            f"mirrors: '{prefix}' is a whole image, and its mirror {place} has no image name",
            hint=f"write its name there: {place}/NAME",
        )
    return replace(reference, registry=host, repository=repository)
