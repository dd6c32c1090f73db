"""Code that no index has: folders and git repositories, as entries of a recipe's `packages`."""

from __future__ import annotations

import re
from posixpath import join, normpath

from imagefactory.extras.importers.spec import EnvironmentSpec
from imagefactory.model import SourceLocation
from imagefactory.recipes.values import without_secrets
from imagefactory.recipes.yaml_tree import show

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LOCAL_PATH = re.compile(r"\./[A-Za-z0-9_][A-Za-z0-9._+-]*(/[A-Za-z0-9_][A-Za-z0-9._+-]*)*|\.", re.ASCII)
_REPOSITORY = re.compile(r"https://[a-z0-9.-]+(:[0-9]{1,5})?(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+", re.ASCII)
_INNER = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9._+-]*(/[A-Za-z0-9_+-][A-Za-z0-9._+-]*)*", re.ASCII)
# A commit of a repository as some hosts pack it: https://HOST/OWNER/NAME/archive/COMMIT.zip.
_ARCHIVE = re.compile(
    r"(https://[^/\s]+/[^/\s]+/[^/\s]+)/archive/(?:refs/(?:heads|tags)/)?(.+?)\.(?:zip|tar\.gz)"
)


def recipe_path(place: str | None, name: str) -> str:
    """The path of `name`, which is relative to the folder `place`, as recipes write it from the project's
    root; empty where it is outside of the project, or a recipe cannot write it."""
    if place is None or name.startswith("/"):
        return ""
    path = normpath(join(place, name))
    written = path if path == "." else f"./{path}"
    return written if _LOCAL_PATH.fullmatch(written) else ""


def take_directory(wish: EnvironmentSpec, place: str | None, folder: str, where: SourceLocation) -> bool:
    """Take over the project in a folder as a source. A loss where a recipe cannot name the folder."""
    if written := recipe_path(place, folder):
        if written not in wish.sources:
            wish.sources.append(written)
            what = f"the project's own code is the package '{written}'"
            built = "`imagefactory lock TARGET --build` builds its wheel"
            wish.note(where, f"{what}: {built} (remove it if you mount the code when the image runs)")
        return True
    what = f"the code of the project in {show(folder)} is not in the imagefactory project"
    wish.leave(where, what, "run `imagefactory init` in the directory of the code, and import the file there")
    return False


def take_git(
    wish: EnvironmentSpec, address: str, where: SourceLocation, *, extras: str = "", folder: str = ""
) -> None:
    """Take over `https://HOST/REPOSITORY@REVISION`, what stands behind `git+`, as a source.

    `folder` is a subdirectory; `extras` are what the entry of a recipe cannot say.
    """
    address = address.partition("#")[0].partition("?")[0]
    url, revision = address, ""
    if found := re.fullmatch(r"(.+/[^@]*)@([^@]+)", address):
        url, revision = found[1], found[2]
    shown = show(without_secrets(f"git+{address}"), limit=160)
    plain = re.sub(r"^(ssh|http|https)://([^@/]*@)?", "https://", url)
    if not _REPOSITORY.fullmatch(plain):
        do = (
            "write git+https://HOST/REPOSITORY@COMMIT under packages, or put the code into a folder: ./FOLDER"
        )
        wish.leave(where, f"{shown} is not a repository that a recipe can name", do)
    elif not _COMMIT.fullmatch(revision):
        if re.fullmatch(r"[0-9a-f]{7,39}", revision):
            do = f"write git+{plain}@COMMIT, with all 40 digits: git rev-parse {revision}"
            wish.leave(where, f"{shown} has a shortened commit", do)
            return
        reads = revision if re.fullmatch(r"[A-Za-z0-9._/-]+", revision) else ""
        do = (
            f"write git+{plain}@COMMIT, with the commit that `git ls-remote {plain} {reads or 'HEAD'}` prints"
        )
        wish.leave(where, f"{shown} may be other code tomorrow: it names no commit", do)
    elif plain != url:
        do = f"write git+{plain}@{revision} if it can be read so, or put the code into a folder: ./FOLDER"
        wish.leave(where, f"{shown} is read with a user's own access", do)
    elif folder and not _INNER.fullmatch(folder):
        do = "put that folder of the repository into the project, and write ./FOLDER under packages"
        wish.leave(where, f"the subdirectory {show(folder)} of {shown}", do)
    else:
        written = f"git+{url}@{revision}{f'#subdirectory={folder}' if folder else ''}"
        if written not in wish.sources:
            wish.sources.append(written)
        if extras:
            do = "write the packages instead"
            wish.leave(where, f"the extras [{show(extras)[1:-1]}] of {shown} are not taken", do)


def git_of_archive(address: str) -> str:
    """`https://HOST/REPOSITORY@REVISION` of an address where a host packs one, else empty."""
    found = _ARCHIVE.fullmatch(address.partition("#")[0])
    return f"{found[1]}@{found[2]}" if found else ""
