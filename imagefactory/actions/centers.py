"""Read the centers that a user joined: the one of the setting `catalog`, and those in their own files.

    ~/.config/imagefactory/centers/NAME.toml      catalog, site, sif-folder, [[trust]] of one more center

    centers_of(settings) -> JoinedCenter... -> read_centers() -> CenterCatalogs -> find_center_image(NAME)

The keys of a center vouch only for its own images. With several centers an image is CENTER/TARGET. A center
that cannot be read does not hide the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypedDict

from imagefactory.actions.read_catalog import age_of, read_catalog
from imagefactory.errors import ImagefactoryError, NothingSelectedError, UsageError
from imagefactory.project import uses_catalog
from imagefactory.serialize import format_time
from imagefactory.settings.choices import KUBERNETES, SITES, SLURM
from imagefactory.settings.load import CENTER, Settings, center_settings
from imagefactory.trust.catalog import Catalog, CatalogImage, ImageOffer
from imagefactory.trust.judgement import VerdictSet
from imagefactory.trust.offers import find_image, select_images, verify_offer
from imagefactory.trust.policy import KeyRow, TrustRules, list_keys, read_trust

_NO_CENTER = ("", SITES[0], SLURM, KUBERNETES)
"""Sites of many centers, which therefore cannot name one center."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedCenter:
    """A joined center: its own settings, and the keys that vouch for its images.

    `several` is true if other centers are joined too. Then image names begin with the name of the center.
    """

    name: str
    settings: Settings
    trust: TrustRules
    several: bool = False

    @property
    def place(self) -> str:
        return self.settings.catalog.value or self.settings.registry.value

    @property
    def prefix(self) -> str:
        """The beginning of its image names, empty if there is no other center."""
        return f"{self.name}/" if self.several else ""

    def answers(self, time: datetime) -> str:
        """Return the source of an answer from a catalog of this `time`."""
        of = f"of {self.name}: " if self.several else "of "
        return f"images {of}the catalog {self.place}, made {time:%Y-%m-%d %H:%M} UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class CenterCatalog:
    """A center with its catalog."""

    center: JoinedCenter
    catalog: Catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class CenterCatalogs:
    """The catalogs that could be read, at least one. `lacking` are the other centers with their errors."""

    open: tuple[CenterCatalog, ...]
    lacking: tuple[tuple[JoinedCenter, ImagefactoryError], ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines to print before the answer: outdated and missing catalogs."""
        notes = [
            f"{row.center.name}: {note}" if row.center.several else note
            for row in self.open
            for note in row.catalog.notes
        ]
        notes += [
            f"images of {center.name} are skipped: {reason.message}"
            + (f" ({reason.hint})" if reason.hint else "")
            for center, reason in self.lacking
        ]
        return tuple(notes)

    def candidates(self, name: str) -> tuple[str, tuple[CenterCatalog, ...]]:
        """Return the target name without its center, and the catalogs that may have the target.

        Raises NothingSelectedError for a center that is not joined, or the error of a center that cannot be
        read.
        """
        errors = {center.name: error for center, error in self.lacking}
        centers = [*(row.center for row in self.open), *(center for center, _ in self.lacking)]
        center, target = split_name(name, centers)
        if center in errors:
            raise errors[center]
        return target, tuple(row for row in self.open if center in ("", row.center.name))


def center_name(name: str, site: str, catalog: str) -> str:
    """Return the name of a center: `name`, else its site, else a name made from the place of its catalog."""
    if name or site not in _NO_CENTER:
        return name or site
    location = catalog.rpartition("/")[2].partition(".")[0] if catalog.startswith("/") else catalog
    host = re.sub(":[^/]*$", "", location).partition("/")[0].lower()
    short = re.sub("[^a-z0-9]+", "-", host).strip("-")[:32]
    return short if CENTER.fullmatch(short) else "center"


def centers_of(settings: Settings) -> tuple[JoinedCenter, ...]:
    """Return the centers whose images can be used. A project uses only its own images.

    Raises UsageError for an invalid file of a center, and for two centers with one name.
    """
    main, own_project = settings.catalog.value or settings.registry.value, not uses_catalog(settings)
    files = () if own_project else settings.centers
    rows = []
    if own_project or main or not files:
        name = "" if own_project else center_name(settings.center.value, settings.site.value, main)
        rows.append((name, settings, read_trust(settings.files)))
    for path in files:
        if path.stem in {name for name, _, _ in rows}:
            raise UsageError(
                "center-name-duplicate",
                f"{path}: two centers have the name '{path.stem}'",
                hint='rename this file, or set center = "NAME" for the first center in your settings',
            )
        of_center = center_settings(settings, path)
        rows.append((path.stem, of_center, read_trust(of_center.files, of_center.limits)))
    return tuple(
        JoinedCenter(name=name, settings=of_center, trust=trust, several=len(rows) > 1)
        for name, of_center, trust in rows
    )


def split_name(text: str, centers: Sequence[JoinedCenter]) -> tuple[str, str]:
    """Return (center, target) of `CENTER/TARGET`; the center is empty if the name has none."""
    name, slash, target = text.partition("/")
    if slash and name in {center.name for center in centers}:
        return name, target
    if slash and CENTER.fullmatch(name):
        names = ", ".join(center.name for center in centers)
        raise NothingSelectedError(
            "center-unknown", f"you have not joined a center '{name}'", hint=f"joined centers: {names}"
        )
    return "", text


def names_center(text: str, settings: Settings) -> bool:
    """Return whether a name is `CENTER/TARGET` of a joined center."""
    name, slash, _ = text.partition("/")
    return bool(slash and CENTER.fullmatch(name)) and name in {row.name for row in centers_of(settings)}


def read_centers(
    settings: Settings, environ: Mapping[str, str], now: datetime, names: Sequence[str] = (), only: str = ""
) -> CenterCatalogs:
    """Return the catalogs of all centers, or only of the centers in `names` if each name has one.

    `only` limits a project's own catalog to one target. Raises as `read_catalog` if no catalog can be read.
    """
    centers = centers_of(settings)
    if len(centers) == 1:
        catalog = read_catalog(centers[0].settings, environ, now, only)
        return CenterCatalogs(open=(CenterCatalog(center=centers[0], catalog=catalog),))
    selected = {split_name(name, centers)[0] for name in names}
    catalogs, faults = [], []
    for center in centers:
        if selected and "" not in selected and center.name not in selected:
            continue
        try:
            catalog = read_catalog(center.settings, environ, now, hurried=True)
        except ImagefactoryError as error:
            faults.append((center, error))
        else:
            catalogs.append(CenterCatalog(center=center, catalog=catalog))
    if not catalogs:
        raise faults[0][1]
    return CenterCatalogs(open=tuple(catalogs), lacking=tuple(faults))


def find_center_image(center_catalogs: CenterCatalogs, name: str) -> tuple[CenterCatalog, CatalogImage]:
    """Return the image with this name, with or without its center.

    Raises NothingSelectedError if no center has the image, UsageError if the name matches several images.
    """
    target, catalogs = center_catalogs.candidates(name)
    exact = [row for row in catalogs if any(entry.target == target for entry in row.catalog.entries)]
    matches, faults = [], []
    for row in exact or catalogs:
        try:
            matches.append((row, find_image(row.catalog, target)))
        except NothingSelectedError as error:
            faults.append(error)
    if not matches:
        raise faults[0]
    if len(matches) > 1:
        both = ", ".join(f"{row.center.prefix}{image.target}" for row, image in matches)
        raise UsageError(
            "image-ambiguous",
            f"'{target}' matches images of {len(matches)} centers",
            hint=f"use one of: {both}",
        )
    return matches[0]


def _select_images(
    center_catalogs: CenterCatalogs, names: Sequence[str]
) -> tuple[tuple[CenterCatalog, tuple[CatalogImage, ...]], ...]:
    """Return the images of `names` by center, all without names. A name may match several centers.

    Raises NothingSelectedError for a name that no center has.
    """
    selected: dict[str, set[str]] = {row.center.name: set() for row in center_catalogs.open}
    for target, catalogs in map(center_catalogs.candidates, names):
        faults = []
        for row in catalogs:
            try:
                images = select_images(row.catalog, (target,))
            except NothingSelectedError as error:
                faults.append(error)
            else:
                selected[row.center.name] |= {image.target for image in images}
        if len(faults) == len(catalogs):
            raise faults[0]
    return tuple(
        (
            row,
            tuple(
                row.catalog.images[number]
                for number, entry in enumerate(row.catalog.entries)
                if not names or entry.target in selected[row.center.name]
            ),
        )
        for row in center_catalogs.open
    )


class CenterRow(TypedDict):
    name: str
    site: str
    catalog: str
    file: str
    """The file whose settings name the center."""
    created: str | None
    expires: str | None
    source: str | None
    age: str | None
    images: int | None
    """The number of images; null if the catalog cannot be read."""
    error: str
    keys: list[KeyRow]


def list_centers(settings: Settings, environ: Mapping[str, str], now: datetime) -> list[CenterRow]:
    """Return each center as JSON, with its keys and the age of its catalog or the reason for no catalog."""
    rows: list[CenterRow] = []
    for center in centers_of(settings):
        if not center.place:
            continue
        catalog: Catalog | None = None
        error = ""
        try:
            catalog = read_catalog(center.settings, environ, now, hurried=True)
        except ImagefactoryError as fault:
            error = fault.message
        rows.append(
            CenterRow(
                name=center.name,
                site=center.settings.site.value,
                catalog=center.place,
                file=center.settings.catalog.origin,
                created=format_time(catalog.created) if catalog else None,
                expires=format_time(catalog.expires) if catalog else None,
                source=catalog.source.value if catalog else None,
                age=age_of(catalog, now) if catalog else None,
                images=len(catalog.images) if catalog else None,
                error=error,
                keys=list_keys(center.trust, (), now),
            )
        )
    return rows


def merge_centers(center_catalogs: CenterCatalogs) -> Catalog:
    """Return all images in one catalog, to look up images by digest. This catalog has no signature."""
    catalogs = [row.catalog for row in center_catalogs.open]
    if len(catalogs) == 1:
        return catalogs[0]
    return Catalog(
        created=min(catalog.created for catalog in catalogs),
        expires=min(catalog.expires for catalog in catalogs),
        images=tuple(image for catalog in catalogs for image in catalog.images),
    )


def only_center(settings: Settings, names: Sequence[str]) -> tuple[JoinedCenter, tuple[str, ...]]:
    """Return the only center of these names, and the names without it. Raises UsageError for several."""
    centers = centers_of(settings)
    split = [split_name(name, centers) for name in names]
    selected = {center for center, _ in split}
    center = next((row for row in centers if len(centers) == 1 or selected == {row.name}), None)
    if center is None:
        first, joined = centers[0].name, ", ".join(row.name for row in centers)
        raise UsageError(
            "center-ambiguous",
            f"this command shows the images of one center, and you joined {joined}",
            hint=f"choose a center: '{first}/*'",
        )
    return center, tuple(name for _, name in split)


# --- Answers from a signed catalog if there is no project


@dataclass(frozen=True, slots=True, kw_only=True)
class CenterImages:
    """Images of a center's catalog, verified at the time `now` with the reader's trust in that center.

    `notes` are the notes of all catalogs.
    """

    center: JoinedCenter
    catalog: Catalog
    offers: tuple[ImageOffer, ...]
    now: datetime
    notes: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return self.center.place

    @property
    def source(self) -> str:
        """The source of the images, for answers."""
        return self.center.answers(self.catalog.created)

    def name_of(self, image: CatalogImage) -> str:
        """Return the name of the image, with its center if there are several."""
        return f"{self.center.prefix}{image.target}"


def read_center_images(
    settings: Settings, environ: Mapping[str, str], names: Sequence[str], now: datetime
) -> tuple[CenterImages, ...]:
    """Return the images of `names` by center, all without names. At least one row.

    Raises as `read_centers`, and NothingSelectedError for a name that no center has.
    """
    center_catalogs = read_centers(settings, environ, now, names)
    rows = [
        _verify_images(row, images, now, center_catalogs.notes)
        for row, images in _select_images(center_catalogs, names)
    ]
    return tuple(row for row in rows if row.offers) or (rows[0],)


def read_offer(settings: Settings, environ: Mapping[str, str], name: str, now: datetime) -> CenterImages:
    """Return the only image with this name. Raises UsageError if there are several."""
    center_catalogs = read_centers(settings, environ, now, (name,))
    row, image = find_center_image(center_catalogs, name)
    return _verify_images(row, (image,), now, center_catalogs.notes)


def _verify_images(
    row: CenterCatalog, images: Sequence[CatalogImage], now: datetime, notes: tuple[str, ...]
) -> CenterImages:
    offers = tuple(verify_offer(row.catalog, image, row.center.trust, now) for image in images)
    return CenterImages(center=row.center, catalog=row.catalog, offers=offers, now=now, notes=notes)


def verdicts_on(offer: ImageOffer) -> tuple[VerdictSet, ...]:
    """Return the verdicts in a catalog on an image, and on each .sif of it."""
    image = offer.image
    location = image.reference.partition("@")[0] or f"{image.target} (in no registry)"
    forms = [(location, image.subject, offer.judged)]
    forms += [(f"{location} (.sif)", row.sif.subject, row.judged) for row in offer.sifs]
    return tuple(
        VerdictSet(place=repo, subject=subject, judged=judged, revoked=image.revoked_of(subject))
        for repo, subject, judged in forms
    )
