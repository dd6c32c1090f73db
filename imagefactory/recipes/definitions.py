"""Definition files of apptainer and singularity -> what their last stage asks for. Nothing is built.

Source: apptainer's user guide, "Definition Files". A line of a section is a shell's in %post, %environment
and the scripts, words elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from imagefactory.model import Where
from imagefactory.recipes.container import Around, Container, check_text, refuse_other_context
from imagefactory.recipes.image_parts import SHELL, keep_entrypoint
from imagefactory.recipes.installs import take_script
from imagefactory.recipes.shell_words import Word, read_commands, split_words
from imagefactory.recipes.wish import Wish
from imagefactory.recipes.yaml_tree import first_place, refused, show

DEFINITION = re.compile(r"(?:\s|#.*\n)*bootstrap[ \t]*:", re.IGNORECASE)
_MOST_STAGES = 50
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
    stages = _stages(_with_arguments(text.replace("\r\n", "\n")), file)
    if not stages:
        raise refused(
            first_place(file), "has no Bootstrap", "give a definition that says what it starts from"
        )
    _take(Container(wish=wish, around=around, rooted=False), stages, len(stages) - 1)
    refuse_other_context(around)
    return wish


def _with_arguments(text: str) -> str:
    """The text with what %arguments sets in the place of `{{ NAME }}`."""
    values: dict[str, str] = {}
    for section in re.findall(r"^%arguments[^\n]*\n((?:(?!%)[^\n]*\n?)*)", text, re.MULTILINE):
        for line in section.split("\n"):
            name, equals, value = line.strip().partition("=")
            if equals:
                values[name.strip()] = value.strip().strip("\"'")[:200]
    return re.sub(r"\{\{ *(\w+) *\}\}", lambda found: values.get(found[1], found[0]), text)


def _stages(text: str, file: str) -> list[Stage]:
    stages: list[Stage] = []
    lines, at = text.split("\n"), 0
    while at < len(lines):
        line, where = lines[at], Where(file=file, line=at + 1, column=1)
        at += 1
        if found := re.match(r"%([A-Za-z]+)\s*(.*)", line):
            start = at
            while at < len(lines) and not re.match(r"%[A-Za-z]|bootstrap\s*:", lines[at], re.IGNORECASE):
                at += 1
            section = Section(found[1].lower(), found[2].strip(), where, "\n".join(lines[start:at]))
            if not stages:
                raise refused(where, f"{show(found[0])} stands before Bootstrap", "begin with Bootstrap")
            stages[-1].sections.append(section)
        elif found := re.match(r"\s*([A-Za-z]+)\s*:\s*(.*?)\s*(#.*)?$", line):
            key = found[1].lower()
            if key == "bootstrap":
                if len(stages) >= _MOST_STAGES:
                    raise refused(where, f"begins one stage more than {_MOST_STAGES}", "split it")
                stages.append(Stage())
            elif not stages:
                raise refused(where, f"{show(found[1])} stands before Bootstrap", "begin with Bootstrap")
            place = Where(file=file, line=at, column=found.start(2) + 1)
            stages[-1].header[key] = Word(found[2], place, "{{" not in found[2])
        elif line.strip() and not line.lstrip().startswith("#"):
            raise refused(where, f"{show(line.strip())} is no line of a header or section", "mend the line")
    return stages


def _take(container: Container, stages: list[Stage], at: int) -> None:
    stage, wish = stages[at], container.wish
    agent, source = stage.header["bootstrap"], stage.header.get("from")
    if agent.text.lower() in _IMAGES and source:
        container.base(source)
    else:
        what = f"Bootstrap {show(agent.text)} {show(source.text) if source else ''}".strip()
        container.leave(agent.where, f"{what} is not taken", "the recipe stands on a base of its own")
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
        case "arguments" | "labels" | "runscript":
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
