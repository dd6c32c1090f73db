"""Which packages claim one path of an image: refused, or told. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from imagefactory.engines.conda.prefix import PathClaim
from imagefactory.errors import BuildError
from imagefactory.model import Definition
from imagefactory.render.define import venv_links

HISTORY = "conda-meta/history"


def describe_claims(claims: Iterable[PathClaim]) -> Iterator[str]:
    """A line for each two conda packages that bring one path with different content."""
    paths: dict[tuple[str, str], list[str]] = {}
    for claim in claims:
        if not claim.same:
            paths.setdefault((claim.kept, claim.lost), []).append(claim.path)
    for (kept, lost), found in sorted(paths.items()):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield f"{kept} and {lost} both bring {min(found)}{more}, not the same: that of {kept} is kept"


def check_conflicts(laid: Iterable[tuple[str, str, str]]) -> None:
    """Refuses images whose packages claim one path with different bytes.

    `laid` gives (package, content hash, path). The same file in several wheels is fine
    (`nvidia/__init__.py` stands in nine); conda's packages have settled their claims before. Raises
    BuildError naming both packages.
    """
    owners: dict[str, tuple[str, str]] = {}
    for wheel, content, path in laid:
        other = owners.setdefault(path, (wheel, content))
        if other[1] != content:
            raise BuildError(
                f"/{path} stands in {other[0]} and in {wheel} with different content",
                hint="constrain one of the two packages in the recipe to a version without it",
            )
    for path, (wheel, _) in owners.items():
        above = path.rpartition("/")[0]
        while above:
            if above in owners:
                raise BuildError(
                    f"/{above} is a file in {owners[above][0]} and a folder in {wheel}",
                    hint="constrain one of the two packages in the recipe to a version without it",
                )
            above = above.rpartition("/")[0]


def own_files(definition: Definition) -> Iterator[tuple[str, str, str]]:
    """What the environment itself consists of, which no package may lay anew."""
    if definition.lock.conda:
        yield "the environment", "", f"{definition.prefix}/{HISTORY}".lstrip("/")
        return
    yield "the environment", "", f"{definition.prefix}/pyvenv.cfg".lstrip("/")
    for path, _ in venv_links(definition):
        yield "the environment", "", path.lstrip("/")
