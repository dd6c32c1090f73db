"""A factory with a trusted key, and what a GPU machine would have done for its images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from imagefactory.actions.transfer import PushOptions, push_target
from imagefactory.actions.verdicts import attach_signed, signing_key
from imagefactory.oci.candidates import VERDICT_TYPE
from imagefactory.oci.graph import ManifestGraph, StoreRepository
from imagefactory.oci.registry.client import RegistryClient
from imagefactory.oci.store import ImageReference
from imagefactory.progress import QuietProgress
from imagefactory.project import Project, load_project
from imagefactory.settings.load import load_settings
from imagefactory.trust.attached import read_subject
from imagefactory.trust.verdict import SignedVerdict, sign
from imagefactory.verify.suite_files import suite_digest
from tests.made.command import Call, json_of
from tests.made.families import stored_image
from tests.made.registry import RegistryMadeHere
from tests.made.verdicts import HOST, MADE_UP, whole_report

QUIET = QuietProgress()


@dataclass(frozen=True)
class Bench:
    """A factory with a trusted key, and what a GPU machine would have done for its images."""

    call: Call
    folder: Path
    registry: RegistryMadeHere

    @property
    def factory(self) -> Project:
        environ = {
            "IMAGEFACTORY_STORE": str(self.folder / "store"),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "DOCKER_CONFIG": str(self.folder / "docker"),
        }
        settings = load_settings(directory=self.folder / "root", start=self.folder, environ=environ)
        return load_project(settings, environ)

    def build(self, content: bytes) -> ManifestGraph:
        """An image of the target one-12.1-cu121 in the store; its digest follows from `content`."""
        return stored_image(self.folder / "store", "one", [content * 500])

    def push(self, content: bytes, day: int) -> str:
        """Built and pushed as a candidate, on a day of November; gives its digest."""
        graph = self.build(content)
        options = PushOptions(registry=self.registry.host, now=datetime(2026, 11, day, tzinfo=UTC))
        push_target(self.factory, self.factory.targets[0], options, QUIET)
        return graph.root.descriptor.digest

    def sign(
        self, place: StoreRepository, wanted: str, capability: str = "8.0", **changes: Any
    ) -> SignedVerdict:
        key = changes.pop("key", None) or signing_key(self.factory, datetime.now(UTC))
        assert key is not None
        now = changes.pop("now", datetime.now(UTC))
        gpu = replace(MADE_UP, capability=capability)
        report = whole_report(
            subject=replace(read_subject(place, wanted), target="one-12.1-cu121"),
            suite=suite_digest(),
            nonce=f"{abs(hash((wanted, capability, now))):032x}",
            started=now - timedelta(minutes=2),
            ended=now - timedelta(minutes=1),
            device=gpu,
            hardware=replace(HOST, gpus=(gpu,)),
        )
        return sign(replace(report, **changes), key, now=now, days=90)

    def verify(self, digest: str, capability: str = "8.0", **changes: Any) -> str:
        """Signs and attaches in the registry (and here, where the image is); returns the verdict's digest."""
        place = StoreRepository(store=RegistryClient(self.registry.host), repository="one")
        signed = self.sign(place, digest, capability, **changes)
        where = ImageReference(registry=self.registry.host, repository="one", digest=digest)
        attach_signed(self.factory, signed, where, QUIET)
        return signed.verdict.digest

    def artifacts(self, digest: str) -> tuple[str, ...]:
        """The artifacts that carry the verdicts of an image in the registry, by digest."""
        client = RegistryClient(self.registry.host)
        return tuple(one.digest for one in client.referrers("one", self.manifest(digest), VERDICT_TYPE))

    def manifest(self, digest: str) -> str:
        return read_subject(
            StoreRepository(store=RegistryClient(self.registry.host), repository="one"), digest
        ).manifest

    def promote(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        said = self.call(
            "image",
            "promote",
            "one-12.1-cu121",
            "--registry",
            self.registry.host,
            "--json",
            *arguments,
            code=code,
        )
        (result,) = json_of(said, "image-promote")["results"]
        return {row["tag"]: row for row in result["tags"]}

    @property
    def tags(self) -> dict[str, str]:
        """The tags of the registry that are nobody's candidates and keep no referrers."""
        tags = self.registry.find("one").tags
        return {tag: digest for tag, digest in tags.items() if tag in ("12.1-cu121", "12.1-cu121-sm80")}
