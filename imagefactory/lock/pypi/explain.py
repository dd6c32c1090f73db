"""uv's complaints in a person's words, and what to do about them."""

from __future__ import annotations

import re

from packaging.utils import canonicalize_name

from imagefactory.errors import LockError, UnreachableError, UnsolvableError
from imagefactory.gpu.builds import rocm_of
from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.lock.pypi.origins import from_indexes
from imagefactory.lock.pypi.wheels_there import NoWheelError, all_without_wheel
from imagefactory.model import Lock, Target
from imagefactory.web import redact


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
        error.message,
        hint=f"{fix}every package of {under.target} stays as it is locked: ask other versions of what comes "
        f"on top; where a newer one below serves, imagefactory lock {under.target} --update PACKAGE; where "
        f"an older one is needed, a recipe of its own: {own}{_with_cuda(target)}",
        tree=error.tree,
        conflict=error.conflict,
    )


def _with_cuda(target: Target) -> str:
    return f" --cuda {target.cuda}" if target.gpu and not rocm_of(target.cuda) else ""


def unreached(stderr: str, index: PackageIndex) -> UnreachableError:
    for name, url in index.named:
        if url.rstrip("/") in stderr:
            return UnreachableError(
                _one_line(stderr),
                hint=f"is the network up, is the index '{name}' at {redact(url)} (setting indexes), and does "
                "~/.netrc have its password, if it wants one?",
            )
    where = f"{redact(index.url)} ({index.origin})" if index.url else index.origin
    hint = f"is the network up, and is this the right package index: {where}?"
    if "certificate" in stderr:
        hint = f"set `certificates` (imagefactory.toml) to a file with the CA of the package index: {where}"
    return UnreachableError(_one_line(stderr), hint=hint)


def explain_failure(lock: Lock, stderr: str, index: PackageIndex) -> LockError:
    """uv's failure in one line and what to do about it. A `lock` with wheels was solved before."""
    text = _one_line(stderr)
    lacks = re.search(r"([A-Za-z0-9._-]+) was not found in the package registry", text)
    if lacks and (origin := from_indexes(lock.origins).get(canonicalize_name(lacks[1]))):
        # uv says the same of an index that wants a password.
        hint = (
            f"is it on the index '{origin}' at {redact(index.address(origin, ''))}, which alone is asked for "
        )
        hint += "it, and does ~/.netrc have that index' password, if it wants one?"
    elif re.search(r"no usable wheels|has no wheels with|building from source is disabled", text):
        hint = "images are made of wheels only: constrain that package to a version that has one"
        names = all_without_wheel(stderr)
        return NoWheelError(f"{lock.target}: {text}", hint=hint, names=names, account=stderr)
    elif "No solution found" in text and lock.wheels:
        text = f"the index no longer has what is locked: {text}"
        hint = f"imagefactory lock {lock.target} --update PACKAGE"
    elif "No solution found" in text and "could not be queried" not in text:
        hint = "change the recipe's versions, packages or constraints"
        tree = "\n".join(line for line in stderr.splitlines() if not line.startswith("warning:"))
        return UnsolvableError(f"{lock.target}: {text}", hint=hint, tree=redact(tree).strip())
    else:
        hint = unreached(stderr, index).hint
        return UnreachableError(f"{lock.target}: {text}", hint=hint)
    return LockError(f"{lock.target}: {text}", hint=hint)
