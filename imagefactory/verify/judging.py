"""The verdicts of an image where it lies, judged: what tables and plans go by, never tags."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property

from imagefactory.errors import NoImageError, RegistryError
from imagefactory.factory import Factory
from imagefactory.oci.graph import ATTESTATION, Manifest, Place, choose_platform, parse_parts, read_manifest
from imagefactory.oci.layout_store import LayoutStore
from imagefactory.oci.manifests import INDEX_TYPES, PLATFORM
from imagefactory.oci.model import Image, Sif
from imagefactory.oci.sif import is_sif_manifest
from imagefactory.verify.judgement import Court
from imagefactory.verify.model import Judged, Subject
from imagefactory.verify.smoke import suite_digest
from imagefactory.verify.trust import read_trust


class Judge:
    """Judges verdicts by the trust, policy and suite of a factory, at one time.

    Where no key is trusted nothing can be relied on, and nothing is read.
    """

    def __init__(self, factory: Factory, now: datetime) -> None:
        self.factory, self.now = factory, now

    @cached_property
    def court(self) -> Court:
        """Raises UsageError for rows of trust that cannot be read."""
        trust = read_trust(self.factory.settings.files)
        return Court(trust=trust, suite=suite_digest(), now=self.now)

    def stored(self, made: Image | Sif) -> tuple[Judged, ...]:
        """The verdicts in the store on an image or .sif of it."""
        manifest = made.manifest if isinstance(made, Image) else made.digest
        subject = Subject(target="", index=made.digest, manifest=manifest, config=made.config)
        return self._judge(Place(store=LayoutStore(self.factory.layout), repository=""), subject)

    def there(self, place: Place, digest: str) -> tuple[Judged, ...]:
        """The verdicts in any store on an image or index of it. Raises RegistryError or StoreError."""
        return self._judge(place, read_subject(place, digest)) if self.court.trust.keys else ()

    def _judge(self, place: Place, subject: Subject) -> tuple[Judged, ...]:
        from imagefactory.verdicts import find_in

        return find_in(self.factory, place, subject, self.court).judged if self.court.trust.keys else ()


def read_subject(place: Place, wanted: str) -> Subject:
    """What verdicts on an image speak of: its manifest for this platform and its config; of a .sif its file.

    Raises RegistryError or StoreError where `place` has no such image, NoImageError for what is none.
    """
    root = read_manifest(place, wanted)
    with _an_image(root):
        chosen = choose_platform(root, PLATFORM).digest
    manifest = read_manifest(place, chosen)
    if manifest.descriptor.media_type in INDEX_TYPES:  # one image and what is attested of it
        with _an_image(root):
            parse_parts(manifest)
            entries = json.loads(manifest.data)["manifests"]
            (image,) = (one for one in entries if ATTESTATION not in (one.get("annotations") or {}))
        manifest = read_manifest(place, str(image["digest"]))
    with _an_image(root):
        blobs = parse_parts(manifest)[1]
        config = blobs[1] if is_sif_manifest(json.loads(manifest.data)) else blobs[0]
    return Subject(
        target="", index=root.descriptor.digest, manifest=manifest.descriptor.digest, config=config.digest
    )


@contextmanager
def _an_image(root: Manifest) -> Iterator[None]:
    """What is read here was fetched whole: a fault is one of the image."""
    try:
        yield
    except RegistryError as error:
        raise NoImageError(error.message, hint=error.hint) from error
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise NoImageError(
            f"{root.descriptor.digest} is not one image", hint="see who put it there"
        ) from error
