"""A registry as a Store: a small client of the OCI distribution specification that bears faults.

What may be gone the next time (408, 429, 5xx, resets, time-outs, truncated replies, tokens that ran
out, lost upload sessions) is tried again with jittered backoff; what a registry refuses is not. Nothing
counts as done because a request got an answer: blobs and manifests are asked for again by digest.

Sources: OCI distribution-spec 1.1; docker/distribution's token and upload pages.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from imagefactory.errors import RegistryError
from imagefactory.http import RejectedError
from imagefactory.oci.manifests import (
    INDEX_TYPE,
    MALFORMED,
    Descriptor,
    artifact_type,
    canonical_json,
    digest_of,
    format_descriptor,
    parse_descriptor,
)
from imagefactory.oci.registry.blobs import RegistryDownloader, RegistryUploader
from imagefactory.oci.registry.session import (
    MOST_IN_TAG,
    ListReader,
    NoListError,
    RegistryOptions,
    RegistryRequest,
    RegistrySession,
)
from imagefactory.oci.store import DIGEST, Source, check_digest, check_tag_or_digest

# --- What refers to a manifest of a registry: by its referrers API, else by the tag that stands in for it
# Source: OCI distribution-spec 1.1, "Listing Referrers" and "Referrers Tag Schema".


class ReferrersClient:
    """The lists of who refers to what, read and written through `session`."""

    def __init__(
        self, session: RegistrySession, download: RegistryDownloader, upload: RegistryUploader
    ) -> None:
        self.session, self.download, self.upload = session, download, upload
        self._attaching = threading.Lock()

    def of(self, repository: str, digest: str, artifact_type: str = "") -> tuple[Descriptor, ...]:
        """As Store's `referrers`: by the referrers API, else from the tag `sha256-<hex>`.

        Whoever may push writes rows: one that names no manifest is left out, and hides no other.
        """
        check_digest(digest)

        def keep(row: Any) -> Descriptor | None:
            return _descriptor(row) if artifact_type in ("", _type_of(row)) else None

        with self.session.told(repository, f"listing what refers to {digest[:19]}"):
            found = self._listed(repository, digest, keep)
        if found is not None:  # the registry's own list leaves out what was deleted
            return tuple(found)
        # Anyone may write the tag, and GHCR enters what cosign attaches with a type that is not its own.
        rows = [row for row in map(_descriptor, self._rows(repository, digest)) if row is not None]
        there = self._present(repository, [row.digest for row in rows])
        if artifact_type:
            there = {one: kind for one, kind in there.items() if kind == artifact_type}
        return tuple(row for row in rows if row.digest in there)

    def attach(self, repository: str, value: Mapping[str, Any], descriptor: Descriptor) -> None:
        """Enters a manifest in the tag `sha256-<hex>` of its subject, unless the registry itself lists it."""
        subject = str(value["subject"]["digest"])
        entry: dict[str, object] = {
            **format_descriptor(descriptor),
            "artifactType": artifact_type(value),
            "annotations": value.get("annotations") or {},
        }
        with self.session.told(repository, f"listing what refers to {subject[:19]}"):
            if self._listed(repository, subject, lambda _: None) is not None:
                return
        tag = subject.replace(":", "-")
        patience, there = self.session.options.patience, set[str]()
        with self._attaching:
            for attempt in range(patience.attempts + 1):
                rows = self._rows(repository, subject)
                if any(row["digest"] == descriptor.digest for row in rows):
                    return
                if attempt:
                    self.session.options.sleep(patience.wait(attempt, None, self.session.options.random))
                    rows = self._rows(repository, subject)
                # What was seen once is not asked for again: others write this list meanwhile.
                listed = [str(row["digest"]) for row in rows]
                there |= self._present(repository, [row for row in listed if row not in there]).keys()
                kept = [row for row in rows if row["digest"] in there - {descriptor.digest}]
                index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*kept, entry]}
                self.upload.put(repository, canonical_json(index), INDEX_TYPE, tag)
        raise RegistryError(
            "push-overwritten",
            f"{self.session.host}/{repository}: other programs keep overwriting the list {tag}",
            hint="run it again when no one else attaches to this image",
        )

    def _listed(
        self, repository: str, digest: str, keep: Callable[[Any], Descriptor | None]
    ) -> list[Descriptor] | None:
        """What `keep` makes of the referrers API's list, None where there is no such API."""
        url = self.session.place(repository, f"referrers/{digest}")
        try:
            return self.session.rows(repository, url, "manifests", keep)
        except NoListError:
            return None  # a page for people in the place of an API
        except RejectedError as error:
            if error.status in (404, 405):
                return None
            raise

    def _rows(self, repository: str, digest: str) -> list[Mapping[str, Any]]:
        """The tag `sha256-<hex>` as it stands: nobody takes a row out when its manifest is deleted."""
        found = self.download.manifest(repository, digest.replace(":", "-"))
        try:
            rows = list(json.loads(found[1])["manifests"] or ()) if found else []
        except MALFORMED as error:
            raise self.session.no_sense(repository, "a list of referrers") from error
        return [row for row in rows if _descriptor(row) is not None]

    def _present(self, repository: str, digests: Sequence[str]) -> dict[str, str]:
        """Those of these manifests that are there, each with its own type.

        Anyone who may push can write the tag that lists them.
        """
        reading, wanted = ListReader(self.session.options.clock), dict.fromkeys(digests)
        with self.session.told(repository, "looking for what its list of referrers names"):
            if len(wanted) > MOST_IN_TAG:
                raise RejectedError(f"{len(wanted):,} rows are more than the {MOST_IN_TAG:,} that are read")
            there = dict[str, str]()
            for digest in wanted:
                reading.count()
                if (found := self.download.manifest(repository, digest)) is not None:
                    there[digest] = _artifact_type_of(found[1])
        return there


def _artifact_type_of(manifest: bytes) -> str:
    try:
        return artifact_type(json.loads(manifest))
    except MALFORMED:
        return ""


def _type_of(row: Any) -> object:
    return row.get("artifactType") if isinstance(row, dict) else None


def _descriptor(row: Any) -> Descriptor | None:
    """The descriptor of a row, None for one that names no manifest."""
    try:
        found = parse_descriptor(row)
    except MALFORMED:
        return None
    return found if DIGEST.fullmatch(found.digest) else None


_DELETES_OFF = "enable deletion there (docker-registry: REGISTRY_STORAGE_DELETE_ENABLED=true)"
_UNTAG_OFF = "delete the manifest, or point the tag to another image: it cannot delete a tag by its name"


class RegistryClient:
    """The registry at `host` (`registry.example.org`, `127.0.0.1:5000`); `docker.io` is Docker Hub.

    Safe to use from several threads. Every method raises RegistryError for a registry that refuses,
    cannot be reached or keeps failing, and UsageError for what is no repository, tag or digest.
    """

    def __init__(self, host: str, options: RegistryOptions | None = None) -> None:
        self.session = RegistrySession(host, options or RegistryOptions())
        self._download = RegistryDownloader(self.session)
        self._upload = RegistryUploader(self.session, self._download)
        self._referrers = ReferrersClient(self.session, self._download, self._upload)

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
        ask = RegistryRequest(method="GET", url=f"{self.session.root}/v2/", scope=())

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
        check_tag_or_digest(tag or digest_of(data))
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
        self._delete(repository, check_tag_or_digest(tag), hint=_UNTAG_OFF)

    def _delete(self, repository: str, wanted: str, *, hint: str) -> None:
        ask = RegistryRequest(
            method="DELETE",
            url=self.session.place(repository, f"manifests/{wanted}"),
            scope=self.session.scope(repository, "delete"),
        )

        def go() -> None:
            try:
                with self.session.answer(ask):
                    pass
            except RejectedError as error:
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
