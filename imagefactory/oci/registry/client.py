"""A registry as a Store: a small client of the OCI distribution specification that bears faults.

What may be gone the next time (408, 429, 5xx, resets, time-outs, truncated replies, tokens that ran
out, lost upload sessions) is tried again with jittered backoff; what a registry refuses is not. Nothing
counts as done because a request got an answer: blobs and manifests are asked for again by digest.

Sources: OCI distribution-spec 1.1; docker/distribution's token and upload pages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from imagefactory.errors import RegistryError
from imagefactory.oci.manifests import MALFORMED, digest_of
from imagefactory.oci.model import Descriptor
from imagefactory.oci.registry.download import Download
from imagefactory.oci.registry.exchange import Ask, RegistryOptions
from imagefactory.oci.registry.lists import NoListError
from imagefactory.oci.registry.referrers import Referrers
from imagefactory.oci.registry.session import RegistrySession
from imagefactory.oci.registry.blobs import Upload
from imagefactory.oci.store import Source, check_digest, check_wanted
from imagefactory.http import RefusedError

_DELETES_OFF = "enable deletion there (docker-registry: REGISTRY_STORAGE_DELETE_ENABLED=true)"
_UNTAG_OFF = "delete the manifest, or point the tag to another image: it cannot delete a tag by its name"


class Registry:
    """The registry at `host` (`registry.example.org`, `127.0.0.1:5000`); `docker.io` is Docker Hub.

    Safe to use from several threads. Every method raises RegistryError for a registry that refuses,
    cannot be reached or keeps failing, and UsageError for what is no repository, tag or digest.
    """

    def __init__(self, host: str, options: RegistryOptions | None = None) -> None:
        self.session = RegistrySession(host, options or RegistryOptions())
        self._download = Download(self.session)
        self._upload = Upload(self.session, self._download)
        self._referrers = Referrers(self.session, self._download, self._upload)

    def __repr__(self) -> str:
        return f"Registry({self.host!r})"

    @property
    def host(self) -> str:
        return self.session.host

    @property
    def options(self) -> RegistryOptions:
        return self.session.options

    @property
    def name(self) -> str:
        return self.host

    @property
    def plain(self) -> bool:
        """Whether it is asked by http."""
        return self.session.plain

    def close(self) -> None:
        """Lets go of the connections; a later call opens new ones."""
        self.session.close()

    def check(self) -> None:
        """Asks whether this is a registry that takes the credentials (distribution-spec, end-1)."""
        ask = Ask(method="GET", url=f"{self.session.root}/v2/", scope=())

        def go() -> None:
            with self.session.answer(ask):
                pass

        with self.session.told("v2", "asking whether a registry is there"):
            self.session.retry(go)

    def check_push(self, repository: str) -> None:
        """Ask whether this account may send blobs there. Nothing is sent."""
        self._upload.check(repository)

    # --- blobs -----------------------------------------------------------------------------------

    def has(self, repository: str, descriptor: Descriptor) -> bool:
        return self._download.has(repository, descriptor)

    def read(self, repository: str, descriptor: Descriptor, offset: int = 0) -> Iterator[bytes]:
        """As Store has it; goes on where a connection breaks. A small blob is checked before it is given."""
        return self._download.read(repository, descriptor, offset)

    def write(self, repository: str, descriptor: Descriptor, source: Source) -> int:
        """As Store has it. Raises StoreError where `source` does not give the blob of `descriptor`."""
        return self._upload.write(repository, descriptor, source)

    def mount(self, repository: str, descriptor: Descriptor, origin: str) -> bool:
        """As Store has it. A registry that may not or cannot mount says no; that is no error."""
        return self._upload.mount(repository, descriptor, origin)

    # --- manifests -------------------------------------------------------------------------------

    def manifest(self, repository: str, wanted: str) -> tuple[Descriptor, bytes] | None:
        return self._download.manifest(repository, wanted)

    def put_manifest(self, repository: str, data: bytes, media_type: str, tag: str = "") -> Descriptor:
        """As Store has it, read back by digest and by tag.

        With a `tag`, the descriptor is of what the tag names once ours was put: where another writer was
        at the same tag just then, that may be theirs, and the caller decides what it means. Where the
        registry has no referrers API, a manifest with a `subject` is entered in the tag `sha256-<hex>`;
        writers who do that at the same moment can lose entries (distribution-spec, "Referrers Tag Schema").
        """
        check_wanted(tag or digest_of(data))
        try:
            value = json.loads(data)
            subject = check_digest(str(value["subject"]["digest"])) if value.get("subject") else ""
        except MALFORMED as error:
            raise RegistryError(
                "manifest-invalid", f"{digest_of(data)} is not a manifest: {error}"
            ) from error
        found, listed = self._upload.put(repository, data, media_type, tag)
        if subject and not listed:
            ours = Descriptor(media_type=media_type, digest=digest_of(data), size=len(data))
            self._referrers.attach(repository, value, ours)
        return found

    def delete_manifest(self, repository: str, digest: str) -> None:
        """Removes a manifest and the tags that name it; nothing happens when there is none."""
        self._delete(repository, check_digest(digest), hint=_DELETES_OFF)

    # --- tags and referrers ----------------------------------------------------------------------

    def tags(self, repository: str) -> tuple[str, ...]:
        url = self.session.place(repository, "tags/list?n=1000")
        try:
            with self.session.told(repository, "listing its tags"):
                found = self.session.rows(
                    repository, url, "tags", lambda tag: tag if isinstance(tag, str) else None
                )
        except NoListError:
            raise self.session.no_sense(repository, "a list of tags") from None
        return tuple(sorted(set(found)))

    def untag(self, repository: str, tag: str) -> None:
        """As Store has it. RegistryError also for a registry that cannot remove a tag by its name."""
        self._delete(repository, check_wanted(tag), hint=_UNTAG_OFF)

    def _delete(self, repository: str, wanted: str, *, hint: str) -> None:
        ask = Ask(
            method="DELETE",
            url=self.session.place(repository, f"manifests/{wanted}"),
            scope=self.session.scope(repository, "delete"),
        )

        def go() -> None:
            try:
                with self.session.answer(ask):
                    pass
            except RefusedError as error:
                if error.status == 404:
                    return
                # docker-registry 2.8 takes a tag for a damaged digest; others say 405, some 400.
                if error.status in (400, 405):
                    raise RegistryError(
                        "registry-delete-unsupported",
                        f"{self.session.host}/{repository}: cannot delete {wanted}: {error}",
                        hint=hint,
                    ) from error
                raise

        with self.session.told(repository, f"removing {wanted}"):
            self.session.retry(go)

    def referrers(self, repository: str, digest: str, artifact_type: str = "") -> tuple[Descriptor, ...]:
        """As Store has it: by the referrers API, else from the tag `sha256-<hex>`."""
        return self._referrers.of(repository, digest, artifact_type)
