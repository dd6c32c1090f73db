"""Which packages claim one path of an image: settled and told, or rejected. Pure.

Of two wheels with different files at one path one is kept, as pip does, which overwrites what it installed
before. pip goes by names, the first name last; here the packages that a recipe names come first, because a
person chose those. `render/define.py` has the ranks, by which the other engines run pip in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from imagefactory.build.conda.prefix import PathClaim
from imagefactory.errors import BuildError
from imagefactory.model import Definition
from imagefactory.build.definition import Rank, venv_links

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledClaims:
    """`owners` maps each path to (package, content hash), in the form of what was laid.

    `lost` maps (package that keeps, package that loses) to the paths; wheels are named by their files.
    """

    owners: Mapping[str, tuple[str, str]]
    lost: Mapping[tuple[str, str], frozenset[str]]

    def left_out(self, package: str) -> frozenset[str]:
        """Return the paths that a package brings and that are another one's."""
        return frozenset(
            path for (_, loser), paths in self.lost.items() if loser == package for path in paths
        )

    def kept(self) -> Iterator[tuple[str, str, str]]:
        """Yield (package, content hash, path) of what is in the image."""
        for path, (package, content) in self.owners.items():
            yield package, content, path


def settle_claims(laid: Iterable[tuple[str, str, str]], ranks: Mapping[str, Rank]) -> SettledClaims:
    """Decide which package's file stands at each path.

    `laid` gives (package, content hash, path). The same file in several packages is fine
    (`nvidia/__init__.py` stands in nine). Where contents differ, the wheel of the least rank is kept; what
    has no rank (the environment's own files, conda packages) gives way to none. Raises BuildError naming
    both packages for such a path, and for a path that is a file of one and a folder of another.
    """
    owners: dict[str, tuple[str, str]] = {}
    rivals: dict[str, list[tuple[str, str]]] = {}
    for package, content, path in laid:
        other = owners.setdefault(path, (package, content))
        if other == (package, content):
            continue
        claimed = rivals.setdefault(path, [other])
        claimed.append((package, content))
        if other[1] == content:
            continue
        if package not in ranks or other[0] not in ranks:
            raise BuildError(
                "file-conflict",
                f"/{path} is in {other[0]} and in {package} with different content",
                hint="remove one of the two packages from the recipe, or choose another version",
            )
        owners[path] = min(other, (package, content), key=lambda claim: ranks[claim[0]])
    lost: dict[tuple[str, str], set[str]] = {}
    for path, claimed in rivals.items():
        keeper, kept = owners[path]
        for package, content in claimed:
            if content != kept:
                lost.setdefault((keeper, package), set()).add(path)
    _check_folders(owners)
    return SettledClaims(owners=owners, lost={pair: frozenset(paths) for pair, paths in lost.items()})


def _check_folders(owners: Mapping[str, tuple[str, str]]) -> None:
    for path, (package, _) in owners.items():
        above = path.rpartition("/")[0]
        while above:
            if above in owners:
                raise BuildError(
                    "file-conflict",
                    f"/{above} is a file in {owners[above][0]} and a directory in {package}",
                    hint="remove one of the two packages from the recipe, or choose another version",
                )
            above = above.rpartition("/")[0]


def describe_lost(settled: SettledClaims, ranks: Mapping[str, Rank]) -> Iterator[str]:
    """Yield a line for each two wheels that bring one path with different content."""
    for (keeper, loser), paths in sorted(settled.lost.items()):
        (_, unnamed, name), (_, other_unnamed, other) = ranks[keeper], ranks[loser]
        files = f"{min(paths)}" + (f" and {len(paths) - 1} more files" if len(paths) > 1 else "")
        why = "" if unnamed else ", which the recipe names,"
        how = f"exclude: [{other}] in the recipe" if other_unnamed else f"a recipe that does not name {other}"
        yield (
            f"{name} and {other} both bring /{files}, not the same: those of {name}{why} are kept "
            f"({how} leaves the other out)"
        )


def own_files(definition: Definition) -> Iterator[tuple[str, str, str]]:
    """What the environment itself consists of, which no package may lay anew."""
    if definition.lock.conda:
        yield "the environment", "", f"{definition.prefix}/{HISTORY}".lstrip("/")
        return
    yield "the environment", "", f"{definition.prefix}/pyvenv.cfg".lstrip("/")
    for path, _ in venv_links(definition):
        yield "the environment", "", path.lstrip("/")
