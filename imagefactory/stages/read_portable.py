"""What was signed of an image's portability, in the store here or a registry, and the models' files again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from imagefactory.errors import NothingSelectedError
from imagefactory.project import Factory
from imagefactory.fs import explain_full_disk, replacing
from imagefactory.oci.candidates import MODELS_TYPE, PORTABLE_TYPE
from imagefactory.oci.graph import Place
from imagefactory.oci.manifests import MALFORMED, parse_descriptor
from imagefactory.oci.model import Descriptor
from imagefactory.progress import Progress
from imagefactory.actions.resolve import choose_image
from imagefactory.actions.verdicts import ANY, local_place, place_of
from imagefactory.trust.attached import read_statements
from imagefactory.trust.verdict import Standing
from imagefactory.verdicts.portable import JudgedPortable, judge_portable
from imagefactory.verdicts.subject import read_subject
from imagefactory.trust.policy import read_trust
from imagefactory.extras.portability.run import ONNX
from imagefactory.extras.portability.report import PortableModel


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPortable:
    """The statements beside an image, the newest last, and where they are."""

    place: Place
    manifest: str
    judged: tuple[JudgedPortable, ...]

    @property
    def newest(self) -> JudgedPortable | None:
        """The last that can be relied on."""
        good = [one for one in self.judged if one.standing is Standing.GOOD]
        return good[-1] if good else None


def read_portable(
    factory: Factory, name: str, registry: str, now: datetime, progress: Progress
) -> FoundPortable:
    """What is said of the image that `name` means; in its registry where it, or `registry`, names one."""
    chosen = choose_image(factory, name, registry, progress, gpu=False)
    place, subject = local_place(factory, ANY), chosen.subject
    if chosen.where is not None:
        place = place_of(factory, chosen.where)
        subject = read_subject(place, chosen.where.wanted)
    trust = read_trust(factory.settings.files)
    judged = [
        judge_portable(one.envelope, one.digest, subject, trust, now)
        for one in read_statements(place, subject.manifest, PORTABLE_TYPE)
    ]
    judged.sort(key=lambda one: one.statement.issued.timestamp() if one.statement else 0.0)
    return FoundPortable(place=place, manifest=subject.manifest, judged=tuple(judged))


def write_models(found: FoundPortable, folder: Path) -> tuple[Path, ...]:
    """Writes the files of the newest statement that can be relied on, as their digests say.

    Raises NothingSelectedError where there is no such statement, or its files are gone.
    """
    if found.newest is None or found.newest.statement is None:
        last = next((f": {one.standing}, {one.why}" for one in reversed(found.judged)), "")
        raise NothingSelectedError(
            "portability-not-verified",
            f"no valid statement says that models of {found.manifest} are portable{last}",
            hint="imagefactory keys trust NAME" if last else "add --models FILE and --to RUNTIME",
        )
    kept = _kept(found)
    written = []
    for model in found.newest.statement.report.models:
        path = folder / f"{model.name}{ONNX}"
        with explain_full_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                for chunk in found.place.store.read(found.place.repository, _blob(model, kept)):
                    file.write(chunk)
        written.append(path)
    return tuple(written)


def _blob(model: PortableModel, kept: dict[str, Descriptor]) -> Descriptor:
    if model.digest not in kept:
        raise NothingSelectedError(
            "model-file-missing",
            f"the registry no longer has the file of '{model.name}'",
            hint="export it again",
        )
    return kept[model.digest]


def _kept(found: FoundPortable) -> dict[str, Descriptor]:
    """The models' files beside the image, by their digests."""
    store, repository = found.place.store, found.place.repository
    kept: dict[str, Descriptor] = {}
    for referrer in store.referrers(repository, found.manifest, MODELS_TYPE):
        there = store.manifest(repository, referrer.digest)
        if there is None:
            continue
        try:
            layers = [parse_descriptor(layer) for layer in json.loads(there[1])["layers"]]
        except MALFORMED:
            continue
        kept |= {layer.digest: layer for layer in layers}
    return kept
