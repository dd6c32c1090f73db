"""A registry as a Store: a small client of the OCI distribution specification that retries faults.

Transient faults (408, 425, 429, 5xx, resets, timeouts, truncated responses, expired tokens, lost upload
sessions) are retried with jittered backoff; rejections are not. A response is not a confirmation: blobs and
manifests are queried again by digest.

Sources: OCI distribution-spec 1.1, "Listing Referrers" and "Referrers Tag Schema" too; docker/distribution's
token and upload pages.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
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
from imagefactory.oci.registry.blobs import RegistryWriter
from imagefactory.oci.registry.session import (
    MOST_IN_TAG,
    ListReader,
    NoListError,
    RegistryOptions,
    RegistryRequest,
    RegistrySession,
)
from imagefactory.oci.store import DIGEST, INVALID_HINT, check_digest, check_tag_or_digest

_DELETES_OFF = "enable deletion in the registry (docker-registry: REGISTRY_STORAGE_DELETE_ENABLED=true)"
_UNTAG_OFF = (
    "delete the manifest, or point the tag to another image: this registry cannot delete a tag by its name"
)


class RegistryClient(RegistryWriter):
    """The registry at `host` (`registry.example.org`, `127.0.0.1:5000`); `docker.io` is Docker Hub.

    Thread-safe. Every method raises RegistryError for a registry that rejects requests, cannot be reached or
    keeps failing, and UsageError for an invalid repository, tag or digest.
    """

    def __init__(self, host: str, options: RegistryOptions | None = None) -> None:
        super().__init__(RegistrySession(host, options or RegistryOptions()))
        self._attaching = threading.Lock()

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
        """Return whether requests use http."""
        return self.session.plain

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        self.session.close()

    def check(self) -> None:
        """Raise RegistryError unless a registry accepts the credentials (distribution-spec, end-1)."""
        with self.session.reporting("v2", "checking whether a registry answers"):
            self._send(RegistryRequest(method="GET", url=f"{self.session.root}/v2/"))

    def _send(self, request: RegistryRequest) -> None:
        def attempt() -> None:
            with self.session.answer(request):
                pass

        self.session.retry(attempt)

    # --- manifests and tags

    def put_manifest(self, repository: str, data: bytes, media_type: str, tag: str = "") -> Descriptor:
        """Put a manifest as Store does. It is read back by digest and by tag.

        With a `tag`, return the descriptor of the manifest that the tag points to afterwards. Another writer
        may have moved the tag, and the caller decides what to do. If the registry has no referrers API, a
        manifest with a `subject` is entered in the tag `sha256-<hex>`. Writers who do that at the same
        moment can lose entries (distribution-spec, "Referrers Tag Schema").
        """
        check_tag_or_digest(tag or digest_of(data))
        try:
            value = json.loads(data)
            subject = check_digest(str(value["subject"]["digest"])) if value.get("subject") else ""
        except MALFORMED as error:
            raise RegistryError(
                "manifest-invalid",
                f"{digest_of(data)} is not a manifest: {error}",
                hint=INVALID_HINT,
            ) from error
        stored, listed = self.put(repository, data, media_type, tag)
        if subject and not listed:
            descriptor = Descriptor(media_type=media_type, digest=digest_of(data), size=len(data))
            self._attach(repository, value, descriptor)
        return stored

    def delete_manifest(self, repository: str, digest: str) -> None:
        """Delete a manifest and the tags that name it; no error if there is none."""
        self._delete(repository, check_digest(digest), hint=_DELETES_OFF)

    def tags(self, repository: str) -> tuple[str, ...]:
        url = self.session.url(repository, "tags/list?n=1000")
        try:
            with self.session.reporting(repository, "listing its tags"):
                tags = self.session.rows(
                    repository, url, "tags", lambda tag: tag if isinstance(tag, str) else None
                )
        except NoListError:
            raise self.session.invalid_response(repository, "a list of tags") from None
        return tuple(sorted(set(tags)))

    def untag(self, repository: str, tag: str) -> None:
        """Remove a tag as Store does. Raises RegistryError if the registry cannot delete it by name."""
        self._delete(repository, check_tag_or_digest(tag), hint=_UNTAG_OFF)

    def _delete(self, repository: str, reference: str, *, hint: str) -> None:
        request = RegistryRequest(
            method="DELETE",
            url=self.session.url(repository, f"manifests/{reference}"),
            scope=self.session.scope(repository, "delete"),
        )
        with self.session.reporting(repository, f"deleting {reference}"):
            try:
                self._send(request)
            except RejectedError as error:
                # docker-registry 2.8 reads a tag as an invalid digest; others answer 405, some 400.
                if error.status in (400, 405):
                    raise RegistryError(
                        "registry-delete-unsupported",
                        f"{self.host}/{repository}: cannot delete {reference}: {error}",
                        hint=hint,
                    ) from error
                if error.status != 404:
                    raise

    # --- referrers

    def referrers(self, repository: str, digest: str, *artifact_types: str) -> tuple[Descriptor, ...]:
        """Return the referrers as Store does: by the referrers API, else from the tag `sha256-<hex>`.

        Anyone who may push writes rows, so an invalid row is dropped and hides no other.
        """
        check_digest(digest)

        def parse(row: Any) -> Descriptor | None:
            row_type = row.get("artifactType") if isinstance(row, dict) else None
            return _descriptor(row) if row_type in (artifact_types or (row_type,)) else None

        with self.session.reporting(repository, f"listing referrers of {digest[:19]}"):
            listed = self._listed(repository, digest, parse)
        if listed is not None:  # the registry's own list excludes deleted manifests
            return tuple(listed)
        # Anyone may write the tag, and GHCR enters attachments of cosign with a wrong type.
        rows = [row for row in map(_descriptor, self._tag_rows(repository, digest)) if row is not None]
        types = self._present(repository, [row.digest for row in rows])
        present = (row for row in rows if row.digest in types)
        return tuple(row for row in present if not artifact_types or types[row.digest] in artifact_types)

    def _attach(self, repository: str, value: Mapping[str, Any], descriptor: Descriptor) -> None:
        """Enter a manifest in the tag `sha256-<hex>` of its subject, unless the registry itself lists it."""
        subject = str(value["subject"]["digest"])
        entry: dict[str, object] = {
            **format_descriptor(descriptor),
            "artifactType": artifact_type(value),
            "annotations": value.get("annotations") or {},
        }
        with self.session.reporting(repository, f"listing referrers of {subject[:19]}"):
            if self._listed(repository, subject, lambda _: None) is not None:
                return
        tag = subject.replace(":", "-")
        retry_policy, present = self.options.retry_policy, set[str]()
        with self._attaching:
            for attempt in range(retry_policy.attempts + 1):
                rows = self._tag_rows(repository, subject)
                if any(row["digest"] == descriptor.digest for row in rows):
                    return
                if attempt:
                    self.options.sleep(retry_policy.wait(attempt, None, self.options.random))
                    rows = self._tag_rows(repository, subject)
                # Known manifests are not queried again: others write this list meanwhile.
                digests = [str(row["digest"]) for row in rows]
                present |= self._present(repository, [row for row in digests if row not in present]).keys()
                others = [row for row in rows if row["digest"] in present - {descriptor.digest}]
                index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*others, entry]}
                self.put(repository, canonical_json(index), INDEX_TYPE, tag)
        raise RegistryError(
            "push-overwritten",
            f"{self.host}/{repository}: other programs keep overwriting the tag {tag}",
            hint="run the same command again later, when no other program writes to this image",
        )

    def _listed(
        self, repository: str, digest: str, parse: Callable[[Any], Descriptor | None]
    ) -> list[Descriptor] | None:
        """Return `parse` of the rows of the referrers API, None if there is no such API."""
        url = self.session.url(repository, f"referrers/{digest}")
        try:
            return self.session.rows(repository, url, "manifests", parse)
        except NoListError:
            return None  # a web page instead of an API
        except RejectedError as error:
            if error.status in (404, 405):
                return None
            raise

    def _tag_rows(self, repository: str, digest: str) -> list[Mapping[str, Any]]:
        """Return the rows of the tag `sha256-<hex>`, those of deleted manifests too."""
        manifest = self.manifest(repository, digest.replace(":", "-"))
        try:
            rows = list(json.loads(manifest[1])["manifests"] or ()) if manifest else []
        except MALFORMED as error:
            raise self.session.invalid_response(repository, "a list of referrers") from error
        return [row for row in rows if _descriptor(row) is not None]

    def _present(self, repository: str, digests: Sequence[str]) -> dict[str, str]:
        """Return the artifact types of those manifests that exist. The tag may list others."""
        reading, types = ListReader(self.options.clock), dict[str, str]()
        with self.session.reporting(repository, "querying the manifests in its list of referrers"):
            unique = dict.fromkeys(digests)
            if len(unique) > MOST_IN_TAG:
                raise RejectedError(
                    f"the tag lists {len(unique):,} artifacts, more than the limit {MOST_IN_TAG:,}"
                )
            for digest in unique:
                reading.count()
                if (manifest := self.manifest(repository, digest)) is not None:
                    try:
                        types[digest] = artifact_type(json.loads(manifest[1]))
                    except MALFORMED:
                        types[digest] = ""
        return types


def _descriptor(row: Any) -> Descriptor | None:
    """Return the descriptor of a row, None for a row that names no manifest."""
    try:
        descriptor = parse_descriptor(row)
    except MALFORMED:
        return None
    return descriptor if DIGEST.fullmatch(descriptor.digest) else None
