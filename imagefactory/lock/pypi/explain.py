"""uv's complaints in a person's words, and what to do about them."""

from __future__ import annotations

import re

from packaging.utils import canonicalize_name

from imagefactory.errors import LockError, UnreachableError, UnsolvableError
from imagefactory.gpu.builds import rocm_of
from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.lock.pypi.origins import from_indexes
from imagefactory.lock.pypi.no_wheel import NoWheelError, all_without_wheel
from imagefactory.model import Lock, Target
from imagefactory.http import redact


def _one_line(stderr: str) -> str:
    """uv's complaint without its ornaments and without passwords."""
    lines = [re.sub(r"^[\s×│╰─▶├]*(error|cause|hint):\s*", "", line) for line in stderr.splitlines()]
    lines = [re.sub(r"^[\s×│╰─▶├]+", "", line).strip() for line in lines if not line.startswith("warning:")]
    text = redact(" ".join(line for line in lines if line))
    return text[:500] + " ... " + text[-180:] if len(text) > 700 else text


def explain_on(error: UnsolvableError, under: Lock, target: Target) -> UnsolvableError:
    """An update only moves what is below to newer releases; for an older one there is a recipe of its own."""
    own = f"imagefactory new NAME --from FILE --framework {target.framework}={target.version}"
    fix = f"{error.hint}; or: " if error.conflict else ""
    return UnsolvableError(
        error.code,
        error.message,
        hint=f"{fix}every package of {under.target} stays as it is locked: ask for other versions of the "
        f"packages on top; if a newer one below works, imagefactory lock {under.target} --update PACKAGE; "
        f"if an older one is needed, write a separate recipe: {own}{_with_cuda(target)}",
        tree=error.tree,
        conflict=error.conflict,
    )


def _with_cuda(target: Target) -> str:
    return f" --cuda {target.cuda}" if target.gpu and not rocm_of(target.cuda) else ""


def unreached(stderr: str, index: PackageIndex) -> UnreachableError:
    for name, url in index.named:
        if url.rstrip("/") in stderr:
            return UnreachableError(
                "index-unreachable",
                _one_line(stderr),
                hint=f"check the network, the address of the index '{name}' ({redact(url)}, setting indexes) "
                "and its password in ~/.netrc, if it needs one",
            )
    where = f"{redact(index.url)} ({index.origin})" if index.url else index.origin
    hint = f"check the network and the package index: {where}"
    if "certificate" in stderr:
        hint = f"set `certificates` (imagefactory.toml) to a file with the CA of the package index: {where}"
    return UnreachableError("index-unreachable", _one_line(stderr), hint=hint)


def explain_failure(lock: Lock, stderr: str, index: PackageIndex) -> LockError:
    """uv's failure in one line and what to do about it. A `lock` with wheels was solved before."""
    text = _one_line(stderr)
    lacks = re.search(r"([A-Za-z0-9._-]+) was not found in the package registry", text)
    if lacks and (origin := from_indexes(lock.origins).get(canonicalize_name(lacks[1]))):
        # uv says the same of an index that requires a password.
        return LockError(
            "package-not-on-index",
            f"{lock.target}: {text}",
            hint=f"check that it is on the index '{origin}' at {redact(index.address(origin, ''))}, "
            "the only one for it, and that ~/.netrc has its password, if it needs one",
        )
    if re.search(r"no usable wheels|has no wheels with|building from source is disabled", text):
        hint = "constrain that package to a version that has a wheel: images contain only wheels"
        names = all_without_wheel(stderr)
        return NoWheelError(
            "no-usable-wheel", f"{lock.target}: {text}", hint=hint, names=names, account=stderr
        )
    if "No solution found" in text and lock.wheels:
        return LockError(
            "locked-file-gone",
            f"{lock.target}: the index no longer has the locked packages: {text}",
            hint=f"imagefactory lock {lock.target} --update PACKAGE",
        )
    if "No solution found" in text and "could not be queried" not in text:
        hint = "change the versions, packages or constraints of the recipe"
        tree = "\n".join(line for line in stderr.splitlines() if not line.startswith("warning:"))
        return UnsolvableError("no-solution", f"{lock.target}: {text}", hint=hint, tree=redact(tree).strip())
    hint = unreached(stderr, index).hint
    return UnreachableError("index-unreachable", f"{lock.target}: {text}", hint=hint)
