"""Build the wheels that a target lacks, write them into its recipe, and lock it.

solve -> image without the packages to build -> wheels -> recipe -> lock
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from imagefactory.actions.build import BuildOptions, build_image
from imagefactory.actions.lock import (
    LockOptions,
    LockResult,
    Solution,
    lock_request,
    lock_target,
    solve_request,
    target_locker,
)
from imagefactory.actions.locked import require_locked
from imagefactory.build.definition import define
from imagefactory.errors import BuildError, LockError, RecipeError, UnbuiltError, UsageError, os_problem
from imagefactory.extras.wheels.build import BuildImage, CompileRequest, check_not_amd, compile_in
from imagefactory.fs import replace_text
from imagefactory.lock import LockRequest
from imagefactory.lock.pypi.requirements import from_files, local_files
from imagefactory.model import SourceLocation, Target
from imagefactory.oci.layout import reference
from imagefactory.oci.manifests import Image
from imagefactory.progress import Progress
from imagefactory.project import Project, load_lenient, recipes_directory
from imagefactory.recipes.edit import check_draft
from imagefactory.recipes.read import read_each, read_file
from imagefactory.recipes.values import is_source, package_of
from imagefactory.recipes.yaml_tree import YamlNode, parse_tree

# --- Replace sources by built wheels in the text of a recipe. Pure
# All other text stays as it is, including comments.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectWheel:
    """A wheel of the project: its `path` (`./wheels/NAME.whl`) and the `source` that it was built from.

    `source` is a file of the index, or an entry of the recipe.
    """

    name: str
    version: str
    path: str
    source: str

    @property
    def pure(self) -> bool:
        """Return whether the wheel works for every target."""
        return self.path.endswith("-py3-none-any.whl") or self.path.endswith("-py2.py3-none-any.whl")


@dataclass(frozen=True, slots=True)
class _TextEdit:
    at: int
    length: int
    text: str


def write_wheels(text: str, target: Target, wheels: Sequence[ProjectWheel], family: Sequence[Target]) -> str:
    """Return `text` with the wheels in place of their sources. Wheels without an entry are added.

    `family` are all targets of the recipe. Raises UsageError for an entry of several targets if its wheel
    works only for `target`, and for an entry that has escapes or several lines.
    """
    root = parse_tree(text, target.where.file)
    row = _row_at(root, target.where)
    of_row = [member.name for member in family if member.where == target.where and member.name != target.name]
    of_root = [member.name for member in family if member.name != target.name]
    sections = [(row, of_row)] if row is root else [(row, of_row), (root, of_root)]
    lists = [
        (section_list, others)
        for section, others in sections
        for name in ("packages", "pip")
        if (section_list := section.get(name)) and section_list.kind == "list"
    ]
    recipe_text, edits, more = _RecipeText(text), list[_TextEdit](), list[ProjectWheel]()
    for wheel in wheels:
        replaced = False
        for section_list, others in lists:
            for item in (node for node in section_list.items if _replaces(node, wheel)):
                if others and not wheel.pure:
                    raise UsageError(
                        "wheel-fits-one-target",
                        f"{item.where}: '{item.text}' is also for {', '.join(others)}, and {wheel.path} fits "
                        f"only {target.name}",
                        hint="write it in the rows of the matrix, each in its own packages:",
                    )
                edits += recipe_text.replace(item, wheel, flow=recipe_text.is_flow(section_list))
                replaced = True
        if not replaced:
            more.append(wheel)
    if more:
        key = "pip" if target.source == "conda" else "packages"
        shared = root.get(key) if not of_root or all(wheel.pure for wheel in more) else None
        edits += recipe_text.append(row.get(key) or shared, row, key, more)
    return recipe_text.apply(edits)


def _replaces(item: YamlNode, wheel: ProjectWheel) -> bool:
    if item.kind != "text":
        return False
    if is_source(item.text):
        return item.text == wheel.source
    return not item.text.endswith(".whl") and package_of(item.text) == wheel.name


def _row_at(root: YamlNode, location: SourceLocation) -> YamlNode:
    matrix = root.get("matrix")
    rows = matrix.items if matrix and matrix.kind == "list" else []
    return next((row for row in rows if row.where == location), root)


class _RecipeText:
    """The text of a recipe, and the locations of its values."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = text.split("\n")
        starts = [0]
        for line in self._lines:
            starts.append(starts[-1] + len(line) + 1)
        self._starts = starts

    def offset(self, location: SourceLocation) -> int:
        return self._starts[location.line - 1] + location.column - 1

    def line(self, location: SourceLocation) -> str:
        return self._lines[location.line - 1]

    def is_flow(self, node: YamlNode) -> bool:
        """Return whether a list is written in brackets."""
        return self._text[self.offset(node.where)] == "["

    def span(self, item: YamlNode) -> int:
        """Return the length of a value in the text. Raises UsageError if its spelling differs."""
        at = self.offset(item.where)
        quote = self._text[at] if self._text[at] in "'\"" else ""
        written = f"{quote}{item.text}{quote}"
        if self._text[at : at + len(written)] != written:
            raise UsageError(
                "entry-not-plain",
                f"{item.where}: imagefactory cannot edit '{item.text}', which has escapes or several lines",
                hint="write it on one line without escapes",
            )
        return len(written)

    def replace(self, item: YamlNode, wheel: ProjectWheel, *, flow: bool) -> Iterator[_TextEdit]:
        comment = (
            f"{item.text}: built from {wheel.source}"
            if item.text != wheel.source
            else f"built from {item.text}"
        )
        yield self._comment(item.where, comment)
        written = f'"{wheel.path}"'
        extras = re.fullmatch(r"[^\[]*\[[^\]]+\].*", item.text)
        if extras and flow:  # a path has no extras, so the entry with them stays
            yield _TextEdit(self.offset(item.where), 0, f"{written}, ")
        elif extras:
            yield _TextEdit(self._starts[item.where.line - 1], 0, f"{self._lead(item.where)}{written}\n")
        else:
            yield _TextEdit(self.offset(item.where), self.span(item), written)

    def append(
        self, wheel_list: YamlNode | None, row: YamlNode, key: str, wheels: Sequence[ProjectWheel]
    ) -> Iterator[_TextEdit]:
        written = [f'"{wheel.path}"' for wheel in wheels]
        notes = [f"required by others, built from {wheel.source}" for wheel in wheels]
        if wheel_list and wheel_list.kind == "list" and wheel_list.items and not self.is_flow(wheel_list):
            last = wheel_list.items[-1].where
            lead = self._lead(last)
            indent = " " * (len(lead) - len(lead.lstrip()))
            added = "".join(
                f"{indent}# {note}\n{lead}{entry}\n" for note, entry in zip(notes, written, strict=True)
            )
            line_end = self._starts[last.line]
            ended = line_end <= len(self._text)
            yield _TextEdit(min(line_end, len(self._text)), 0, added if ended else f"\n{added}")
        elif wheel_list and wheel_list.kind == "list":
            at = (
                self.offset(wheel_list.items[-1].where) + self.span(wheel_list.items[-1])
                if wheel_list.items
                else self.offset(wheel_list.where) + 1
            )
            for note in notes:
                yield self._comment(wheel_list.where, note)
            yield _TextEdit(at, 0, (", " if wheel_list.items else "") + ", ".join(written))
        else:
            yield from self._new_list(row, key, notes, written)

    def _new_list(
        self, row: YamlNode, key: str, notes: Sequence[str], written: Sequence[str]
    ) -> Iterator[_TextEdit]:
        """Insert a new list after the first key of a section."""
        first = row.pairs[0][0].where
        value = f"{key}: [{', '.join(written)}]"
        if self._text[self.offset(row.where)] == "{":
            for note in notes:
                yield self._comment(first, note)
            yield _TextEdit(self.offset(first), 0, f"{value}, ")
            return
        indent = " " * (first.column - 1)
        at = (
            self.offset(row.pairs[1][0].where) - (first.column - 1) if len(row.pairs) > 1 else len(self._text)
        )
        comments = "".join(f"{indent}# {note}\n" for note in notes)
        yield _TextEdit(at, 0, f"{comments}{indent}{value}\n")

    def _lead(self, location: SourceLocation) -> str:
        """Return the text before a value in its line."""
        return self.line(location)[: location.column - 1]

    def _comment(self, location: SourceLocation, text: str) -> _TextEdit:
        line = self.line(location)
        indent = line[: len(line) - len(line.lstrip())]
        return _TextEdit(self._starts[location.line - 1], 0, f"{indent}# {text}\n")

    def apply(self, edits: Sequence[_TextEdit]) -> str:
        text = self._text
        numbered = sorted(enumerate(edits), key=lambda item: (item[1].at, item[0]), reverse=True)
        for _, edit in numbered:
            text = text[: edit.at] + edit.text + text[edit.at + edit.length :]
        return text


ROUNDS = 20
"""The limit of solutions: a wheel may have requirements that its source does not declare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockWithWheels:
    """The lock and its built wheels, each with whether this call built it."""

    relock: LockResult
    wheels: tuple[tuple[ProjectWheel, bool], ...]


def build_and_lock(
    factory: Project,
    target: Target,
    options: LockOptions,
    progress: Progress,
    tell: Callable[[str], object] = lambda _: None,
) -> LockWithWheels:
    """Build all packages of a target that have no wheel, and lock the target.

    Each wheel is stored in wheels/ immediately, so that a later call does not build it again. The recipe is
    written after all builds. Raises UnbuiltError, before any build, for a package that cannot be built here,
    BuildError for a failed build, and the errors of `lock_target`.
    """
    check_not_amd(target)
    directory = factory.settings.root_path / "wheels"
    if not directory.resolve().is_relative_to(factory.settings.root_path.resolve()):
        raise UsageError(
            "link-leaves-project",
            f"{directory} is a link to a directory outside the project",
            hint="replace it with a directory",
        )
    current, built = target, dict[str, tuple[ProjectWheel, bool]]()
    text, solution = "", None
    for _ in range(ROUNDS):
        try:
            solution = _solve(factory, current, options, progress)
        except UnbuiltError as error:
            missing = error
        else:
            break
        if any(not row["possible"] for row in missing.packages):
            raise missing
        again = {row["name"] for row in missing.packages} & built.keys()
        if again:
            raise LockError(
                "built-version-unused",
                f"{target.name} needs another version of {', '.join(sorted(map(str, again)))} than was built",
                hint=f"pin its version in the recipe ({target.where})",
            )
        within = _build_image(factory, current, missing, built, progress)
        for row in in_order(missing.packages):
            wheel, fresh = _build_wheel(factory, target, row, within, built, progress)
            tell(f"{wheel.path}: {'built' if fresh else 'already built'} from {wheel.source}")
            built[wheel.name] = wheel, fresh
            current = with_wheel(current, wheel)
        text, current = _draft(factory, target, current, [built_wheel for built_wheel, _ in built.values()])
    else:
        raise LockError(
            "wheels-still-missing",
            f"{target.name}: after {ROUNDS} solutions, a wheel is still missing",
            hint=f"pin the versions of its packages in the recipe ({target.where})",
        )
    if built:
        factory, target = _write_recipe(factory, target, text)
    relock = lock_target(factory, target, options, progress, solution)
    factory.layout.untag(reference(_build_target(target, (), ())))
    return LockWithWheels(relock=relock, wheels=tuple(built.values()))


def _solve(factory: Project, target: Target, options: LockOptions, progress: Progress) -> Solution | None:
    """Return the solution of a target, None if its lock is current. Raises like `solve_request`."""
    request, current = lock_request(factory, target, options, progress)
    return None if current else solve_request(factory, request, progress, build=True)


def in_order(rows: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the packages to build, each after its requirements. Unknown packages come last."""
    pending, ordered = sorted(rows, key=lambda row: not row["name"]), list[Mapping[str, Any]]()
    while pending:
        names = {row["name"] for row in pending}
        ready = next(
            (row for row in pending if not names & (set(row["requires"]) - {row["name"]})), pending[0]
        )
        pending.remove(ready)
        ordered.append(ready)
    return tuple(ordered)


def with_wheel(target: Target, wheel: ProjectWheel) -> Target:
    """Return the target with a wheel in place of its source."""
    others = (
        text for text in _from_pypi(target) if not _is_of(text, {wheel.name}) or Requirement(text).extras
    )
    return replace(
        _with_pypi(target, (*others, f"{wheel.name}=={wheel.version}")),
        sources=tuple(source for source in target.sources if source != wheel.source),
        origins=tuple(sorted((dict(target.origins) | {wheel.name: wheel.path}).items())),
    )


def _build_target(target: Target, pins: Iterable[str], absent: Collection[str]) -> Target:
    """Return the target without the packages to build. The rest of its solution is pinned."""
    texts = (text for text in _from_pypi(target) if not _is_of(text, absent))
    pins_by_name = {canonicalize_name(pin.partition("==")[0]): pin for pin in pins}
    origins = tuple(pair for pair in target.origins if pair[0] not in absent)
    return replace(
        _with_pypi(target, (*texts, *(pin for name, pin in pins_by_name.items() if name not in absent))),
        name=f"{target.name}-build",
        origins=origins,
        sources=(),
        files=(),
    )


def _from_pypi(target: Target) -> tuple[str, ...]:
    return target.pip if target.source == "conda" else target.requirements


def _with_pypi(target: Target, texts: tuple[str, ...]) -> Target:
    return replace(target, pip=texts) if target.source == "conda" else replace(target, requirements=texts)


def _is_of(text: str, names: Collection[str]) -> bool:
    return canonicalize_name(Requirement(text).name) in names


def _build_image(
    factory: Project,
    target: Target,
    missing: UnbuiltError,
    built: Mapping[str, tuple[ProjectWheel, bool]],
    progress: Progress,
) -> BuildImage:
    """Return an image of the target without the packages to build, but with those already built."""
    absent = {str(row["name"]): str(row["version"]) for row in missing.packages if row["version"]}
    absent |= {name: wheel.version for name, (wheel, _) in built.items()}
    build_target = _build_target(target, missing.pins, absent)
    base, below = factory.base_of(target), factory.target_below(target)
    parent = require_locked(factory, below) if below else None
    parents = tuple(row.lock for row in (*parent.parents, parent) if row.lock) if parent else ()
    pins = tuple(f"{name}=={version}" for name, version in absent.items())
    request = LockRequest(target=build_target, base=base, under=parents[-1] if parents else None, absent=pins)
    try:
        lock = target_locker(factory, build_target).lock(request, progress)
    except LockError as error:
        error.message = error.message.replace(build_target.name, target.name)
        raise
    definition = define(build_target, base, lock, parents)
    definition = replace(definition, local=local_files(lock, factory.settings.root_path))
    options = BuildOptions(smoke=False, held=False)
    with progress.stage(f"{target.name}: image to build in"):
        image = build_image(factory, definition, options, progress).image
    if not isinstance(image, Image):
        raise BuildError(
            "sif-not-supported",
            f"{build_target.name}: cannot build a wheel in a .sif file",
            hint='set engine = "oci" in imagefactory.toml',
        )
    return BuildImage(lock=lock, image=image)


def _build_wheel(
    factory: Project,
    target: Target,
    row: Mapping[str, Any],
    within: BuildImage,
    built: Mapping[str, tuple[ProjectWheel, bool]],
    progress: Progress,
) -> tuple[ProjectWheel, bool]:
    root, source = factory.settings.root_path, row["source"]
    requirement = source
    if source.startswith("."):
        requirement = str(root / source)
    elif not source.startswith("git+"):
        requirement = f"{row['name']}=={row['version']}"
    extra_wheels = tuple(
        root / built_wheel.path for name, (built_wheel, _) in built.items() if name in row["requires"]
    )
    reserved = frozenset(
        path.rpartition("/")[2]
        for other in factory.targets
        if other.name != target.name
        for path in from_files(other.origins).values()
    )
    ask = CompileRequest(
        reserved=reserved,
        source=requirement,
        label=source if requirement != source and source.startswith(".") else "",
        target=target,
        folder=root / "wheels",
        beside=extra_wheels,
    )
    result = compile_in(factory, ask, within, progress)
    name, version, *_ = parse_wheel_filename(result.wheel.name)
    wheel = ProjectWheel(
        name=name, version=str(version), path=f"./{result.wheel.relative_to(root)}", source=source
    )
    return wheel, result.compiled


def _draft(
    factory: Project, target: Target, expected: Target, wheels: Sequence[ProjectWheel]
) -> tuple[str, Target]:
    """Return the text of the recipe with the wheels, and the target in it, since the order of packages
    matters.

    Raises UsageError if the text does not define the expected target.
    """
    directory = recipes_directory(factory.settings)
    path = directory / f"{target.family}.yaml"
    text, _ = read_file(path)
    family = [member for member in factory.targets if member.family == target.family]
    written = write_wheels(text, target, wheels, family)
    recipes, _ = read_each(directory)
    others = [recipe for recipe in recipes if recipe.family != target.family]
    hint = f"add them at {target.where}: {', '.join(wheel.path for wheel in wheels)}"
    try:
        targets = check_draft(written, target.family, others, factory.bases)
    except RecipeError as error:
        raise UsageError(
            "recipe-not-writable", f"cannot write the wheels into {path}: {error.message}", hint=hint
        ) from error
    draft = next((member for member in targets if member.name == target.name), None)
    if draft is None or _deciding(draft) != _deciding(expected):
        raise UsageError(
            "recipe-not-writable",
            f"cannot write the wheels into {path}: the edited recipe would define another target",
            hint=hint,
        )
    return written, draft


def _write_recipe(factory: Project, target: Target, text: str) -> tuple[Project, Target]:
    """Write the recipe of a target and read it again. Raises UsageError if the file cannot be written."""
    path = recipes_directory(factory.settings) / f"{target.family}.yaml"
    try:
        replace_text(path, text)
    except OSError as error:
        raise UsageError(*os_problem("write", path, error), hint="check its permissions") from error
    whole = load_lenient(factory.settings, factory.environ, factory.tell)
    return whole, next(member for member in whole.targets if member.name == target.name)


def _deciding(target: Target) -> tuple[object, ...]:
    return set(target.requirements), set(target.pip), target.origins, target.sources, target.constraints
