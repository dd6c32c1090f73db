"""Explain uv's errors, with fixes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from imagefactory.errors import LockError, UnreachableError, UnsolvableError, redact
from imagefactory.gpu.values import rocm_of
from imagefactory.lock.pypi.index import PackageIndex
from imagefactory.lock.pypi.no_wheel import NoWheelError, all_without_wheel
from imagefactory.lock.pypi.question import QuestionSolver, WheelRequest
from imagefactory.lock.pypi.requirements import from_indexes
from imagefactory.model import Lock, Target
from imagefactory.recipes.values import package_of


def _clean_message(stderr: str) -> str:
    """Return uv's message without its box characters and passwords."""
    lines = [re.sub(r"^[\s×│╰─▶├]*(error|cause|hint):\s*", "", line) for line in stderr.splitlines()]
    lines = [re.sub(r"^[\s×│╰─▶├]+", "", line).strip() for line in lines if not line.startswith("warning:")]
    text = redact(" ".join(line for line in lines if line))
    return text[:500] + " ... " + text[-180:] if len(text) > 700 else text


def explain_on(error: UnsolvableError, parent_lock: Lock, target: Target) -> UnsolvableError:
    """Return the error of a target on a parent, with possible changes.

    An update changes the parent's packages only to newer releases; an older one needs its own recipe.
    """
    import_command = f"imagefactory recipe import FILE --framework {target.framework}={target.version}"
    fix = f"{error.hint}; or: " if error.conflict else ""
    return UnsolvableError(
        error.code,
        error.message,
        hint=f"{fix}require versions that work with the packages of {parent_lock.target}; to upgrade one of "
        f"those, run imagefactory lock {parent_lock.target} --upgrade-package PACKAGE; "
        f"for an older one, create a separate recipe: {import_command}{_with_cuda(target)}",
        tree=error.tree,
        conflict=error.conflict,
    )


def _with_cuda(target: Target) -> str:
    return f" --cuda {target.cuda}" if target.gpu and not rocm_of(target.cuda) else ""


def unreachable_error(stderr: str, index: PackageIndex) -> UnreachableError:
    for name, url in index.named:
        if url.rstrip("/") in stderr:
            return UnreachableError(
                "index-unreachable",
                _clean_message(stderr),
                hint=f"check the network, the address of the index '{name}' ({redact(url)}, setting indexes) "
                "and its password in ~/.netrc, if it needs one",
            )
    location = f"{redact(index.url)} ({index.origin})" if index.url else index.origin
    hint = f"check the network and the package index: {location}"
    if "certificate" in stderr:
        hint = (
            f"set `certificates` (imagefactory.toml) to a file with the CA of the package index: {location}"
        )
    return UnreachableError("index-unreachable", _clean_message(stderr), hint=hint)


def explain_failure(lock: Lock, stderr: str, index: PackageIndex) -> LockError:
    """Return uv's failure in one line with a hint. `lock` has wheels if it was solved before."""
    text = _clean_message(stderr)
    lacks = re.search(r"([A-Za-z0-9._-]+) was not found in the package registry", text)
    if lacks and (origin := from_indexes(lock.origins).get(canonicalize_name(lacks[1]))):
        # uv prints the same for an index that requires a password.
        return LockError(
            "package-not-on-index",
            f"{lock.target}: {text}",
            hint=f"check that the index '{origin}' at {redact(index.address(origin, ''))} has the package, "
            "and that ~/.netrc has the password of the index, if it needs one",
        )
    if re.search(r"no usable wheels|has no wheels with|building from source is disabled", text):
        hint = "constrain this package to a version that has a wheel: images contain only wheels"
        names = all_without_wheel(stderr)
        return NoWheelError(
            "no-usable-wheel", f"{lock.target}: {text}", hint=hint, names=names, account=stderr
        )
    if "No solution found" in text and lock.wheels:
        return LockError(
            "locked-file-gone",
            f"{lock.target}: the index no longer has the locked packages: {text}",
            hint=f"run imagefactory lock {lock.target} --upgrade-package PACKAGE",
        )
    if "No solution found" in text and "could not be queried" not in text:
        hint = "change the versions, packages or constraints of the recipe"
        tree = "\n".join(line for line in stderr.splitlines() if not line.startswith("warning:"))
        return UnsolvableError("no-solution", f"{lock.target}: {text}", hint=hint, tree=redact(tree).strip())
    hint = unreachable_error(stderr, index).hint
    return UnreachableError("index-unreachable", f"{lock.target}: {text}", hint=hint)


_MOST = 16  # requirements that are removed in turn, each with a request
_LONGEST = 400  # characters of the reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementConflict:
    """Requirements (PEP 508) without a common solution, and the solver's output about only them."""

    texts: tuple[str, ...]
    account: str


def find_conflict(solver: QuestionSolver, question: WheelRequest, account: str) -> RequirementConflict | None:
    """Return the contradiction in a request without a solution, None if none is found.

    Requirements are removed while the others have no solution. The remaining ones contradict. `account` is
    the solver's output.
    """
    names = set(map(package_of, re.findall(r"[A-Za-z0-9][A-Za-z0-9._-]*", account)))
    texts = list(dict.fromkeys((*question.requirements, *question.constraints)))
    texts = [text for text in texts if package_of(text) in names]
    if not 0 < len(texts) <= _MOST:
        return None
    reason = _refusal(solver, _only(question, texts))
    if not reason:
        return None
    for text in tuple(texts):
        rest = [other for other in texts if other != text]
        if rest and (less := _refusal(solver, _only(question, rest))):
            texts, reason = rest, less
    return RequirementConflict(texts=tuple(texts), account=reason)


def find_fix(
    solver: QuestionSolver, question: WheelRequest, conflict: RequirementConflict, keep: Iterable[str] = ()
) -> tuple[str, str]:
    """Return a requirement of the contradiction and a replacement that has a solution; both empty for none.

    The last requirement is changed first. Packages of `keep` are not changed.
    """
    fixed = set(keep)
    for text in reversed(conflict.texts):
        name = package_of(text)
        if name in fixed or not Requirement(text).specifier:
            continue

        def loose(some: Sequence[str], name: str = name) -> tuple[str, ...]:
            return tuple(
                _bare(constraint) if package_of(constraint) == name else constraint for constraint in some
            )

        open_question = replace(
            question,
            requirements=loose(question.requirements),
            constraints=tuple(
                constraint for constraint in question.constraints if package_of(constraint) != name
            ),
        )
        try:
            pins = solver.solve(open_question)
        except LockError:
            continue
        for line in pins.lines:
            if package_of(line) == name:
                return text, line.partition("+")[0]
    return "", ""


def explain_conflict(
    solver: QuestionSolver, question: WheelRequest, error: UnsolvableError, keep: Iterable[str] = ()
) -> UnsolvableError:
    """Return the error with the contradiction in its message and a tested change as its hint.

    Without a contradiction the error is returned unchanged.
    """
    conflict = find_conflict(solver, question, error.tree)
    if conflict is None:
        return error
    reason = _because(conflict)
    problem = "has no solution" if len(conflict.texts) == 1 else "conflict"
    message = (
        f"{question.lock.target}: {' and '.join(conflict.texts)} {problem}{f': {reason}' if reason else ''}"
    )
    old, new = find_fix(solver, question, conflict, keep)
    hint = error.hint
    if new:
        hint = f"write {new} instead of {old}: that has a solution"
    return UnsolvableError(
        "requirements-conflict", message, hint=hint, tree=error.tree, conflict=conflict.texts
    )


def _only(question: WheelRequest, texts: Sequence[str]) -> WheelRequest:
    return replace(
        question,
        requirements=tuple(text for text in question.requirements if text in texts),
        constraints=tuple(text for text in question.constraints if text in texts),
    )


def _refusal(solver: QuestionSolver, question: WheelRequest) -> str:
    """Return the solver's output if a request has no solution, else an empty text."""
    try:
        solver.solve(question)
    except LockError as error:
        return error.tree or error.message if isinstance(error, UnsolvableError) else ""
    return ""


def _bare(text: str) -> str:
    need = Requirement(text)
    return f"{need.name}[{','.join(sorted(need.extras))}]" if need.extras else need.name


def _because(conflict: RequirementConflict) -> str:
    """Return the reasons in the solver's output, without its conclusions."""
    flat = " ".join(re.sub(r"[×│╰─▶├]+", " ", conflict.account).split())
    reasons = re.findall(r"\b[Bb]ecause (.*?),? we can conclude that", flat)
    return "; ".join(dict.fromkeys(reason.rstrip(",") for reason in reasons))[:_LONGEST]
