"""Definition files of apptainer and singularity -> what their last stage asks for. Nothing is built.

Source: apptainer's user guide, "Definition Files". A line of a section is a shell's in %post, %environment
and the scripts, words elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from imagefactory.model import Where
from imagefactory.extras.importers.container import LIMITS, Around, Container, check_text, refuse_other_context
from imagefactory.extras.importers.image_parts import SHELL, keep_entrypoint
from imagefactory.extras.importers.installs import take_script
from imagefactory.recipes.shell_words import MOST_CHARACTERS, Word, read_commands, split_words
from imagefactory.extras.importers.spec import Wish
from imagefactory.recipes.yaml_tree import first_place, refused, show, too_large

DEFINITION = re.compile(r"(?:\s|#.*\n)*bootstrap[ \t]*:", re.IGNORECASE)
_MOST_STAGES = 50
_SECTION = re.compile(r"[ \t]*%([^\s]*)[ \t]*(.*)")
_STAGE = re.compile(r"bootstrap[ \t]*:", re.IGNORECASE)
_SECTIONS = (
    "arguments", "environment", "files", "help", "labels", "post", "pre", "runscript", "setup", "startscript",
    "test",
)  # fmt: skip
_ARGUMENT = re.compile(r"\{\{\s*(\w+)\s*\}\}", re.ASCII)
_MOST_NESTED = 20
_COMMENT = re.compile(r"(?:^|\s)#(?!!)")
# Agents of Bootstrap whose From names an image of a registry.
_IMAGES = ("docker", "docker-daemon", "oras", "library", "shub")
# What says nothing to a program in the image, and what an image lacks without it.
_NOTED = {
    "test": "imagefactory tests each image itself; run yours in it: imagefactory run TARGET -- COMMAND",
    "help": "a recipe has a description",
    "apphelp": "a recipe has a description",
    "applabels": "a recipe has labels",
    "apptest": "imagefactory tests each image itself",
}
_HOST = "a build changes nothing outside of the image: put what it makes into the project's own files"
_LEFT = {
    "setup": _HOST,
    "pre": _HOST,
    "startscript": "start it by its command: imagefactory run TARGET -- COMMAND",
}
_APP = "one recipe makes one environment: write a recipe for it"


@dataclass(frozen=True, slots=True)
class Section:
    """`text` is what stands below its line, `said` what stands behind its name."""

    name: str
    said: str
    where: Where
    text: str

    def lines(self) -> Iterator[tuple[str, Where]]:
        for number, line in enumerate(self.text.split("\n")):
            if line.strip() and not line.lstrip().startswith("#"):
                yield line, self.place(number)

    def place(self, row: int = 0) -> Where:
        return Where(file=self.where.file, line=self.where.line + 1 + row, column=1)


@dataclass(slots=True)
class Stage:
    header: dict[str, Word] = field(default_factory=dict)
    sections: list[Section] = field(default_factory=list)


def read_definition(text: str, file: str, around: Around) -> Wish:
    """What the last stage asks for. Raises RecipeError for what is no definition file."""
    check_text(text, file)
    wish = Wish(file=file)
    stages = _stages(_filled(text.replace("\r\n", "\n"), file, around), file)
    around.refuse_unused(file)
    if not stages:
        raise refused(
            first_place(file),
            "no-base-image",
            "has no Bootstrap line",
            "pass a definition with Bootstrap and From",
        )
    _take(Container(wish=wish, around=around, rooted=False), stages, len(stages) - 1)
    refuse_other_context(around)
    return wish


def _filled(text: str, file: str, around: Around) -> str:
    """The text with build arguments in the place of `{{ NAME }}`, as apptainer fills them; comments stay.

    A stage's %arguments hold for it and those behind it. Raises RecipeError for an argument without a value.
    """
    lines = text.split("\n")
    starts = [number for number, line in enumerate(lines) if _STAGE.match(line)]
    values: dict[str, str] = {}
    filled, size = [], 0
    for start, end in pairwise([0, *starts, len(lines)]):
        inside = ""
        for line in lines[start:end]:
            found = _SECTION.match(line)
            inside = found[1].lower() if found else inside
            name, equals, value = line.partition("=")
            if inside == "arguments" and equals and not found and not line.lstrip().startswith("#"):
                values[name.strip()] = value.strip()
        arguments, inside = _Arguments(values, around), ""
        for number, line in enumerate(lines[start:end], start + 1):
            found = _SECTION.match(line)
            inside = found[1].lower() if found else inside
            place = Where(file=file, line=number, column=1)
            filled.append(line if inside == "arguments" else arguments.fill(line, place))
            size += len(filled[-1]) + 1
            if size > LIMITS.size:
                raise too_large(file, LIMITS)
    return "\n".join(filled)


class _Arguments:
    """The values of one stage's build arguments: those that a person gives, then `defaults`."""

    def __init__(self, defaults: Mapping[str, str], around: Around) -> None:
        self._defaults, self._around = defaults, around
        self._known: dict[str, str] = {}

    def fill(self, text: str, where: Where, *, inside: tuple[str, ...] = ()) -> str:
        """`inside` are the arguments whose value the text is."""
        comment = None if inside else _COMMENT.search(text)
        parts, end, size = [], 0, 0
        for found in _ARGUMENT.finditer(text, 0, comment.start() if comment else len(text)):
            place = where if inside else replace(where, column=found.start() + 1)
            parts += [text[end : found.start()], self._value(found[1], place, inside)]
            end = found.end()
            size += len(parts[-2]) + len(parts[-1])
            if size > MOST_CHARACTERS:
                what = f"has more than {MOST_CHARACTERS} characters after its build arguments are filled in"
                raise refused(place, "variables-too-long", what, "give them shorter values")
        return "".join(parts) + text[end:]

    def _value(self, name: str, where: Where, inside: tuple[str, ...]) -> str:
        if name in inside or len(inside) > _MOST_NESTED:
            raise refused(
                where,
                "build-argument-recursive",
                f"the build argument {show(name)} refers to itself",
                "write its value without it",
            )
        if name not in self._known:
            value = self._around.take_build_arg(name)
            value = self._defaults.get(name) if value is None else value
            if value is None:
                do = f"give its value, --build-arg {name[:80]}=VALUE, or set it under %arguments"
                raise refused(
                    where, "build-argument-missing", f"the build argument {show(name)} has no value", do
                )
            self._known[name] = self.fill(value, where, inside=(*inside, name))
        return self._known[name]


def _stages(text: str, file: str) -> list[Stage]:
    stages: list[Stage] = []
    lines, at = text.split("\n"), 0
    while at < len(lines):
        line, where = lines[at], Where(file=file, line=at + 1, column=1)
        at += 1
        if found := _SECTION.match(line):
            start, name = at, found[1].lower()
            if name not in _SECTIONS and not name.startswith("app"):
                what = f"{show(f'%{found[1]}', limit=60)} is not a section of apptainer"
                raise refused(
                    where,
                    "line-invalid",
                    what,
                    "put other text before the %: apptainer stops here, in a script too",
                )
            while at < len(lines) and not (_SECTION.match(lines[at]) or _STAGE.match(lines[at])):
                at += 1
            section = Section(name, found[2].strip(), where, "\n".join(lines[start:at]))
            if not stages:
                raise refused(
                    where,
                    "text-before-base",
                    f"{show(found[0])} is before Bootstrap",
                    "begin with Bootstrap",
                )
            stages[-1].sections.append(section)
        elif found := re.match(r"\s*([A-Za-z]+)\s*:\s*(.*?)\s*(#.*)?$", line):
            key = found[1].lower()
            if key == "bootstrap":
                if len(stages) >= _MOST_STAGES:
                    raise refused(
                        where, "too-many-stages", f"has more than {_MOST_STAGES} stages", "split it"
                    )
                stages.append(Stage())
            elif not stages:
                raise refused(
                    where,
                    "text-before-base",
                    f"{show(found[1])} is before Bootstrap",
                    "begin with Bootstrap",
                )
            place = Where(file=file, line=at, column=found.start(2) + 1)
            # apptainer fills no $NAME here
            stages[-1].header[key] = Word(re.sub("[\"']", "", found[2]), place, "$" not in found[2])
        elif line.strip() and not line.lstrip().startswith("#"):
            raise refused(
                where,
                "line-invalid",
                f"{show(line.strip())} is not a line of a header or section",
                "fix the line",
            )
    return stages


def _take(container: Container, stages: list[Stage], at: int) -> None:
    stage, wish = stages[at], container.wish
    agent, source = stage.header["bootstrap"], stage.header.get("from")
    if agent.text.lower() in _IMAGES and source:
        container.base(source)
    else:
        what = f"Bootstrap {show(agent.text)} {show(source.text) if source else ''}".strip()
        container.leave(agent.where, f"{what} is not taken", "the recipe has its own base")
    taken = {at}
    for section in sorted(stage.sections, key=lambda one: one.name != "files"):  # there before %post
        found = re.fullmatch(r"from\s+(\S+)", section.said) if section.name == "files" else None
        other = next((n for n, one in enumerate(stages[:at]) if found and _named(one) == found[1]), None)
        if other is not None and other not in taken:
            taken.add(other)
            _take_packages(container, stages[: other + 1], section)
        elif other is None:
            _section(container, section)
    if not container.packages_only:
        container.finish()
        for number, one in enumerate(stages):
            if number not in taken:
                what = f"the stage {show(_named(one))} is not part of the last one, and is not read"
                wish.note(one.header["bootstrap"].where, what)


def _named(stage: Stage) -> str:
    named = stage.header.get("stage")
    return named.text if named else ""


def _take_packages(container: Container, stages: list[Stage], section: Section) -> None:
    """The packages of a stage from which files are taken."""
    wish = container.wish
    before = (len(wish.pip), len(wish.conda))
    inner = Container(wish=wish, around=container.around, rooted=False, packages_only=True)
    _take(inner, stages, len(stages) - 1)
    name = show(_named(stages[-1]))
    if before != (len(wish.pip), len(wish.conda)):
        what = f"the packages of the stage {name} were taken, since files are copied from it"
        container.note(section.where, what)
    else:
        do = "make what it brings a package on an index"
        container.leave(section.where, f"the files of the stage {name} are not taken", do)


def _section(container: Container, section: Section) -> None:
    wish = container.wish
    match section.name:
        case "post":
            take_script(container, section.text, section.place())
        case "environment":
            _environment(container, section)
        case "files":
            for line, where in section.lines():
                words = [word.text for word in split_words(line, where, container.variables)]
                if words:
                    container.copy(words[:1], words[-1], where)
        case "labels" if not container.packages_only:
            for line, where in section.lines():
                name, _, value = line.strip().partition(" ")
                wish.label(name, value.strip().strip("\"'"), where)
        case "runscript" if not container.packages_only:
            text = "; ".join(line.strip() for line, _ in section.lines())
            keep_entrypoint(wish, [*SHELL, text, section.name], section.where, f"%{section.name}")
        case "arguments":
            for line, where in section.lines():
                if "=" not in line:
                    container.note(
                        where, f"{show(line.strip())} is no NAME=VALUE, and sets no build argument"
                    )
        case "labels" | "runscript":
            pass
        case name if name in _NOTED:
            container.note(section.where, f"%{name} is not taken: {_NOTED[name]}")
        case name:
            do = _LEFT.get(name) or (_APP if name.startswith("app") else "see whether what it does is needed")
            container.leave(section.where, f"%{name} is not taken", do)


def _environment(container: Container, section: Section) -> None:
    for command in read_commands(section.text, section.place(), container.variables, joined=False):
        words = command.words[1:] if command.words and command.words[0].text == "export" else command.words
        for word in words:
            name, equals, value = word.text.partition("=")
            if equals and command.plain:
                container.set(name, Word(value, word.where, word.known))
        plain = [word for word in words if "=" not in word.text]
        if not command.plain or (plain and words is command.words):
            container.leave(command.where, f"{show(command.text)} is not run", "set it where the image runs")
