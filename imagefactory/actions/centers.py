"""The centers that a person joined: that of the setting `catalogue`, and those joined beside it.

    ~/.config/imagefactory/centers/NAME.toml      catalogue, site, sif-folder, [[trust]] of one more center

    centers_of(settings) -> Center... -> read_centers() -> CenterCatalog... -> find_one(NAME), CENTER/TARGET

The keys of a center vouch for its own images alone, and an image is named with its center where several are
joined. A center that cannot be read hides no other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from imagefactory.actions.read_catalog import age_of, read_catalog
from imagefactory.errors import ImagefactoryError, NothingSelectedError, UsageError
from imagefactory.project import is_project
from imagefactory.serialize import format_time
from imagefactory.settings.choices import KUBERNETES, SITES, SLURM
from imagefactory.settings.load import CENTER, Settings, center_settings
from imagefactory.trust.catalog import Catalog, CatalogImage, ImageOffer
from imagefactory.trust.judgement import VerdictSet
from imagefactory.trust.offers import find_image, select_images, verify_offer
from imagefactory.trust.policy import TrustRules, list_keys, read_trust

_NO_CENTER = ("", SITES[0], SLURM, KUBERNETES)
"""Sites that many centers have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedCenter:
    """A center as this person joined it: settings of its own, and the keys that vouch for its images.

    `several`: it is not the only one, so its images are named with it.
    """

    name: str
    settings: Settings
    trust: TrustRules
    several: bool = False

    @property
    def place(self) -> str:
        return self.settings.catalogue.value or self.settings.registry.value

    @property
    def prefix(self) -> str:
        """What its images' names begin with, empty where there is no other center."""
        return f"{self.name}/" if self.several else ""

    def answers(self, made: datetime) -> str:
        """Who answers, by a catalogue of that time."""
        of = f"of {self.name}: " if self.several else "of "
        return f"images {of}the catalogue {self.place}, made {made:%Y-%m-%d %H:%M} UTC"

    def json_of(self, target: str) -> dict[str, str]:
        """What JSON says of an image besides its target, where it is of one center of several."""
        return {"center": self.name, "name": f"{self.prefix}{target}"} if self.several else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CenterCatalog:
    """A center with its catalogue."""

    center: JoinedCenter
    catalogue: Catalog

    @property
    def notes(self) -> tuple[str, ...]:
        """How the catalogue was had, where it is not the current one."""
        begin = f"{self.center.name}: " if self.center.several else ""
        return tuple(f"{begin}{note}" for note in self.catalogue.notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CenterCatalogs:
    """Those that could be read, at least one; `lacking` are the others with why they could not."""

    open: tuple[CenterCatalog, ...]
    lacking: tuple[tuple[JoinedCenter, ImagefactoryError], ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must be told before the answer."""
        said = tuple(note for one in self.open for note in one.notes)
        return (
            *said,
            *(
                f"images of {one.name} are skipped: {why.message}" + (f" ({why.hint})" if why.hint else "")
                for one, why in self.lacking
            ),
        )

    def asked(self, name: str) -> tuple[str, tuple[CenterCatalog, ...]]:
        """A target's name without its center, and those of which it may be.

        Raises NothingSelectedError for a center that is not joined, else why the one that is named lacks.
        """
        lacking = {one.name: error for one, error in self.lacking}
        center, rest = split_name(
            name, [*(one.center for one in self.open), *(one for one, _ in self.lacking)]
        )
        if center in lacking:
            raise lacking[center]
        return rest, tuple(one for one in self.open if center in ("", one.center.name))


def center_name(name: str, site: str, catalogue: str) -> str:
    """Return what a center is called: its `name`, else its site's, else one made of its catalogue."""
    if name or site not in _NO_CENTER:
        return name or site
    place = catalogue.rpartition("/")[2].partition(".")[0] if catalogue.startswith("/") else catalogue
    made = re.sub("[^a-z0-9]+", "-", re.sub(":[^/]*$", "", place).partition("/")[0].lower()).strip("-")
    return made[:32] if CENTER.fullmatch(made[:32]) else "center"


def centers_of(settings: Settings) -> tuple[JoinedCenter, ...]:
    """The centers whose images count here; a factory, with its own images, counts as one.

    Raises UsageError for a file of a center that cannot be used, and for two of one name.
    """
    main, own = settings.catalogue.value or settings.registry.value, is_project(settings)
    files = () if own else settings.centers
    found = []
    if own or main or not files:
        name = "" if own else center_name(settings.center.value, settings.site.value, main)
        found.append((name, settings, read_trust(settings.files)))
    for path in files:
        one = center_settings(settings, path)
        found.append((path.stem, one, read_trust(one.files, one.limits)))
    names = [name for name, _, _ in found]
    for name in names:
        if names.count(name) > 1:
            path = next(path for path in files if path.stem == name)
            raise UsageError(
                "center-name-duplicate",
                f"{path}: two centers have the name '{name}'",
                hint='rename this file, or set center = "NAME" for the first center in your settings',
            )
    several = len(found) > 1
    return tuple(
        JoinedCenter(name=name, settings=one, trust=trust, several=several) for name, one, trust in found
    )


def split_name(text: str, centers: Sequence[JoinedCenter]) -> tuple[str, str]:
    """(center, target) of `CENTER/TARGET`; the center is empty where none of them is named."""
    name, slash, rest = text.partition("/")
    if slash and name in {one.name for one in centers}:
        return name, rest
    if slash and CENTER.fullmatch(name):
        joined = ", ".join(one.name for one in centers)
        raise NothingSelectedError(
            "center-unknown", f"you have not joined a center '{name}'", hint=f"joined centers: {joined}"
        )
    return "", text


def names_center(text: str, settings: Settings) -> bool:
    """Whether a name is `CENTER/TARGET` of a center that is joined here."""
    name, slash, _ = text.partition("/")
    return bool(slash and CENTER.fullmatch(name)) and name in {one.name for one in centers_of(settings)}


def read_centers(
    settings: Settings, environ: Mapping[str, str], now: datetime, names: Sequence[str] = (), only: str = ""
) -> CenterCatalogs:
    """The catalogues of all centers; where every one of `names` names its center, of those alone.

    `only` is the one target that a factory's own catalogue is made of. Raises what `read_catalogue` raises
    where none of them can be read.
    """
    centers = centers_of(settings)
    if len(centers) == 1:
        catalogue = read_catalog(centers[0].settings, environ, now, only)
        return CenterCatalogs(open=(CenterCatalog(center=centers[0], catalogue=catalogue),))
    named = {split_name(name, centers)[0] for name in names}
    wanted = [one for one in centers if not named or "" in named or one.name in named]
    found, faults = [], []
    for center in wanted:
        try:
            catalogue = read_catalog(center.settings, environ, now, hurried=True)
        except ImagefactoryError as error:
            faults.append((center, error))
        else:
            found.append(CenterCatalog(center=center, catalogue=catalogue))
    if not found:
        raise faults[0][1]
    return CenterCatalogs(open=tuple(found), lacking=tuple(faults))


def find_center_image(opened: CenterCatalogs, name: str) -> tuple[CenterCatalog, CatalogImage]:
    """The image that a name asks for, with its center or without.

    Raises NothingSelectedError where no center has it, UsageError where several have, or one has several.
    """
    rest, asked = opened.asked(name)
    exact = [one for one in asked if any(image.target == rest for image in one.catalogue.images)]
    fits, faults = [], []
    for one in exact or asked:
        try:
            fits.append((one, find_image(one.catalogue, rest)))
        except NothingSelectedError as error:
            faults.append(error)
    if not fits:
        raise faults[0]
    if len(fits) > 1:
        both = ", ".join(f"{one.center.prefix}{image.target}" for one, image in fits)
        raise UsageError(
            "image-ambiguous", f"'{rest}' matches images of {len(fits)} centers", hint=f"use one of: {both}"
        )
    return fits[0]


def select_some(
    opened: CenterCatalogs, names: Sequence[str]
) -> tuple[tuple[CenterCatalog, tuple[CatalogImage, ...]], ...]:
    """The images that `names` ask for, by their center; all when empty. A name may be of several centers.

    Raises NothingSelectedError for a name that none of them has.
    """
    chosen: dict[str, set[str]] = {one.center.name: set() for one in opened.open}
    for rest, asked in map(opened.asked, names):
        faults = []
        for one in asked:
            try:
                chosen[one.center.name] |= {image.target for image in select_images(one.catalogue, (rest,))}
            except NothingSelectedError as error:
                faults.append(error)
        if len(faults) == len(asked):
            raise faults[0]
    return tuple(
        (
            one,
            tuple(
                image
                for image in one.catalogue.images
                if not names or image.target in chosen[one.center.name]
            ),
        )
        for one in opened.open
    )


def list_centers(settings: Settings, environ: Mapping[str, str], now: datetime) -> list[dict[str, Any]]:
    """Each center as JSON, with its keys and its catalogue's age, or why that cannot be read."""
    rows = []
    for one in centers_of(settings):
        if not one.place:
            continue
        found: Catalog | None = None
        error = ""
        try:
            found = read_catalog(one.settings, environ, now, hurried=True)
        except ImagefactoryError as fault:
            error = fault.message
        rows.append(
            {
                "name": one.name,
                "site": one.settings.site.value,
                "catalogue": one.place,
                "file": one.settings.catalogue.origin,
                "made": format_time(found.made) if found else None,
                "expires": format_time(found.expires) if found else None,
                "source": found.source.value if found else None,
                "age": age_of(found, now) if found else None,
                "images": len(found.images) if found else None,
                "error": error,
                "keys": list_keys(one.trust, (), now),
            }
        )
    return rows


def merge_centers(opened: CenterCatalogs) -> Catalog:
    """All images in one catalogue, for what looks for one by its digest; it cannot judge any."""
    if len(opened.open) == 1:
        return opened.open[0].catalogue
    catalogues = [one.catalogue for one in opened.open]
    return Catalog(
        made=min(one.made for one in catalogues),
        expires=min(one.expires for one in catalogues),
        images=tuple(image for one in catalogues for image in one.images),
    )


def only_center(settings: Settings, names: Sequence[str]) -> tuple[JoinedCenter, tuple[str, ...]]:
    """The one center that these names are of, and the names without it, for what shows one center at a time.

    Raises UsageError where several are joined and the names do not say which.
    """
    centers = centers_of(settings)
    split = [split_name(name, centers) for name in names]
    asked = {center for center, _ in split}
    found = [one for one in centers if len(centers) == 1 or asked == {one.name}]
    if not found:
        one, joined = centers[0].name, ", ".join(one.name for one in centers)
        raise UsageError(
            "center-ambiguous",
            f"this command shows the images of one center, and you joined several: {joined}",
            hint=f"name images of one center: '{one}/*'",
        )
    return found[0], tuple(name for _, name in split)


# --- Answers from the signed catalogue where there is no factory: which images there are, how well known


@dataclass(frozen=True, slots=True, kw_only=True)
class CenterImages:
    """Images of a center's catalogue, judged by the reader's own trust in it, `now`.

    `notes` say how the catalogues were had, and which center could not be read.
    """

    center: JoinedCenter
    catalogue: Catalog
    offers: tuple[ImageOffer, ...]
    now: datetime
    notes: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where the catalogue lies."""
        return self.center.place

    @property
    def said(self) -> str:
        """Who answers."""
        return self.center.answers(self.catalogue.made)

    def name_of(self, image: CatalogImage) -> str:
        """What the image is called here: with its center, where there are several."""
        return f"{self.center.prefix}{image.target}"


def read_center_images(
    settings: Settings, environ: Mapping[str, str], names: Sequence[str], now: datetime
) -> tuple[CenterImages, ...]:
    """The images that `names` ask for, all when empty; a shelf for each center that has one, at least one.

    Raises as `read_centers`, `select_some` do.
    """
    opened = read_centers(settings, environ, now, names)
    shelves = [_read_center(one, images, now, opened.notes) for one, images in select_some(opened, names)]
    return tuple(one for one in shelves if one.offers) or (shelves[0],)


def read_offer(settings: Settings, environ: Mapping[str, str], name: str, now: datetime) -> CenterImages:
    """The one image that `name` asks for. Raises UsageError where it asks for several."""
    opened = read_centers(settings, environ, now, (name,))
    one, image = find_center_image(opened, name)
    return _read_center(one, (image,), now, opened.notes)


def _read_center(
    one: CenterCatalog, images: Sequence[CatalogImage], now: datetime, notes: tuple[str, ...]
) -> CenterImages:
    catalogue, trust = one.catalogue, one.center.trust
    offers = tuple(verify_offer(catalogue, image, trust, now) for image in images)
    return CenterImages(center=one.center, catalogue=catalogue, offers=offers, now=now, notes=notes)


def verdicts_on(offer: ImageOffer) -> tuple[VerdictSet, ...]:
    """What the catalogue carries of verdicts: on the image, and on each .sif of it."""
    image = offer.image
    where = image.reference.partition("@")[0] or f"{image.target} (in no registry)"
    forms = [(where, image.subject, offer.judged)]
    forms += [(f"{where} (.sif)", one.sif.subject, one.judged) for one in offer.sifs]
    return tuple(
        VerdictSet(
            place=place,
            subject=subject,
            judged=judged,
            revoked=image.revoked_of(subject),
        )
        for place, subject, judged in forms
    )
