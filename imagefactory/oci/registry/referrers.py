"""What refers to a manifest of a registry: by its referrers API, else by the tag that stands in for it.

Source: OCI distribution-spec 1.1, "Listing Referrers" and "Referrers Tag Schema".
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
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
from imagefactory.oci.registry.session import RegistrySession
from imagefactory.oci.registry.upload import Upload
from imagefactory.oci.store import DIGEST, check_digest
from imagefactory.web import RefusedError


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
        with self.session.told(repository, f"listing what refers to {digest[:19]}"):
            rows = self._listed(repository, digest)
        # The registry's own list leaves out what was deleted; of the tag only what is asked for is looked at.
        own = rows is not None
        rows = self._rows(repository, digest) if rows is None else list(filter(_names_a_manifest, rows))
        found = [row for row in rows if artifact_type in ("", row.get("artifactType"))]
        if not own:
            there = self._present(repository, found)
            found = [row for row in found if row["digest"] in there]
        return tuple(parse_descriptor(row) for row in found)

    def attach(self, repository: str, value: Mapping[str, Any], descriptor: Descriptor) -> None:
        """Enters a manifest in the tag `sha256-<hex>` of its subject, unless the registry itself lists it."""
        subject = str(value["subject"]["digest"])
        entry: dict[str, object] = {
            **format_descriptor(descriptor),
            "artifactType": artifact_type(value),
            "annotations": value.get("annotations") or {},
        }
        with self.session.told(repository, f"listing what refers to {subject[:19]}"):
            if self._listed(repository, subject) is not None:
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
                there |= self._present(repository, [row for row in rows if row["digest"] not in there])
                kept = [row for row in rows if row["digest"] in there - {descriptor.digest}]
                index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*kept, entry]}
                self.upload.put(repository, canonical_json(index), INDEX_TYPE, tag)
        raise RegistryError(
            f"{self.session.host}/{repository}: other writers keep overwriting the list {tag}",
            hint="run it again when nobody else attaches to this image",
        )

    def _listed(self, repository: str, digest: str) -> list[Mapping[str, Any]] | None:
        """What the referrers API lists, None where there is none."""
        rows: list[Mapping[str, Any]] = []
        try:
            for page in self.session.pages(repository, self.session.place(repository, f"referrers/{digest}")):
                rows += page["manifests"] or ()
        except RefusedError as error:
            if error.status in (404, 405):
                return None
            raise
        except MALFORMED:
            return None  # a page for people in the place of an API
        return rows

    def _rows(self, repository: str, digest: str) -> list[Mapping[str, Any]]:
        """The tag `sha256-<hex>` as it stands: nobody takes a row out when its manifest is deleted."""
        found = self.download.manifest(repository, digest.replace(":", "-"))
        try:
            rows = list(json.loads(found[1])["manifests"] or ()) if found else []
        except MALFORMED as error:
            raise self.session.no_sense(repository, "a list of referrers") from error
        return list(filter(_names_a_manifest, rows))

    def _present(self, repository: str, rows: Sequence[Mapping[str, Any]]) -> set[str]:
        digests = [str(row["digest"]) for row in rows]
        return {digest for digest in digests if self.download.manifest(repository, digest) is not None}


def _names_a_manifest(row: Any) -> bool:
    try:
        return bool(DIGEST.fullmatch(parse_descriptor(row).digest))
    except MALFORMED:
        return False
