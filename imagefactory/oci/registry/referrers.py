"""What refers to a manifest of a registry: by its referrers API, else by the tag that stands in for it.

Source: OCI distribution-spec 1.1, "Listing Referrers" and "Referrers Tag Schema".
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from imagefactory.errors import RegistryError
from imagefactory.oci.manifests import (
    INDEX_TYPE,
    MALFORMED,
    artifact_type,
    canonical_json,
    format_descriptor,
    parse_descriptor,
)
from imagefactory.oci.model import Descriptor
from imagefactory.oci.registry.download import Download
from imagefactory.oci.registry.lists import MOST_IN_TAG, ListReading, NoListError
from imagefactory.oci.registry.session import RegistrySession
from imagefactory.oci.registry.blobs import Upload
from imagefactory.oci.store import DIGEST, check_digest
from imagefactory.http import RefusedError


class Referrers:
    """The lists of who refers to what, read and written through `session`."""

    def __init__(self, session: RegistrySession, download: Download, upload: Upload) -> None:
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
        except RefusedError as error:
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
        reading, wanted = ListReading(self.session.options.clock), dict.fromkeys(digests)
        with self.session.told(repository, "looking for what its list of referrers names"):
            if len(wanted) > MOST_IN_TAG:
                raise RefusedError(f"{len(wanted):,} rows are more than the {MOST_IN_TAG:,} that are read")
            there = dict[str, str]()
            for digest in wanted:
                reading.count()
                if (found := self.download.manifest(repository, digest)) is not None:
                    there[digest] = _kind_of(found[1])
        return there


def _kind_of(manifest: bytes) -> str:
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
