"""Dockerfiles and Containerfiles -> what their last stage asks for, and what it stands on. Nothing is built.

Source: Docker's "Dockerfile reference". The parsers at hand know no here-documents and lose words' places.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from posixpath import join, normpath

from imagefactory.extras.importers.container import (
    LIMITS,
    ContainerFile,
    ContainerFileReaders,
    check_context,
    check_text,
)
from imagefactory.extras.importers.image_parts import SHELL, add_command, add_entrypoint, add_user
from imagefactory.extras.importers.installs import read_install_command, read_install_script
from imagefactory.extras.importers.spec import EnvironmentSpec
from imagefactory.model import SourceLocation
from imagefactory.recipes.shell_words import MOST_CHARACTERS, RunWord, read_commands, split_shell_words
from imagefactory.recipes.yaml_tree import first_place, recipe_problem, show, too_large

# `FROM IMAGE` or `FROM IMAGE AS NAME` is all of its line: Python's `from setuptools import setup` is not.
DOCKERFILE = re.compile(
    r"(?:\s|#.*\n)*(?:FROM(?:[ \t]+--\S+)*[ \t]+[^\s-]\S*(?:[ \t]+AS[ \t]+\S+)?"
    r"|ARG[ \t]+[A-Za-z_]\w*(?:=.*)?)[ \t]*\\?\r?(?:\n|\Z)",
    re.IGNORECASE,
)
NAMED = re.compile(r"(.*\.)?(dockerfile|containerfile)([._-].*)?", re.IGNORECASE)
# What docker sets itself.
_PREDEFINED_ARGS = {
    "TARGETPLATFORM": "linux/amd64",
    "TARGETOS": "linux",
    "TARGETARCH": "amd64",
    "BUILDPLATFORM": "linux/amd64",
    "BUILDARCH": "amd64",
}
_FLAG = re.compile(r"(?:\s|\\\n)*--([a-z-]+)(?:=(\S*))?(?=\s|$)")
_MOST_STAGES = 50
_HEREDOC = re.compile(r"(?:^|\s)[0-9]*<<(-?)([\"']?)([A-Za-z_]\w*)\2(?=\s|$)", re.ASCII)
# What is said where an image runs, or says nothing to a program in it.
_NOTED = {
    "EXPOSE": "name the port where the image runs",
    "VOLUME": "mount it where the image runs",
    "HEALTHCHECK": "images of the OCI format have none: say it where the image runs",
    "MAINTAINER": "images have labels in its place",
}
_LEFT = {
    "STOPSIGNAL": "say it where the image runs: --stop-signal",
    "ONBUILD": "it is for images that are built on this one: write it there",
}
_UNPACKED = re.compile(r"\.(tar(\.\w+)?|tgz|tbz2?|txz)$")
# Directories that hold an environment, or a tool that makes one: their packages stand for them.
_ENVIRONMENT = re.compile(
    r"/(\.?(virtual|v)env|site-packages|dist-packages|envs|conda|miniconda3?|mambaforge|miniforge3?|micromamba)(/|$)"
    r"|^(/usr/local(/(bin|lib))?|/install|/opt/(python|env)|/root/\.local|/home/[^/]+/\.local|/wheels?|/root/\.cache)(/|$)"
    r"|/(uvx?|poetry|pip|micromamba)$"
)


@dataclass(slots=True, kw_only=True)
class DockerfileLine:
    """`text` is all behind the name, in its lines, with blanks for the name and the flags before it."""

    name: str
    where: SourceLocation
    text: str
    flags: list[tuple[str, str]] = field(default_factory=list)

    def start(self) -> SourceLocation:
        return SourceLocation(file=self.where.file, line=self.where.line, column=1)

    def plain(self) -> str:
        return " ".join(self.text.replace("\\\n", " ").split())

    def exec_form(self) -> list[str] | None:
        """The words of `["a", "b"]`, None for what a shell is to read."""
        try:
            words = json.loads(self.plain()) if self.plain().startswith("[") else None
        except (ValueError, RecursionError):
            return None
        return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


@dataclass(slots=True, kw_only=True)
class Stage:
    name: str
    base: RunWord
    platform: str = ""
    instructions: list[DockerfileLine] = field(default_factory=list)


def read_dockerfile(text: str, file: str, around: ContainerFileReaders) -> EnvironmentSpec:
    """What the last stage asks for. Raises RecipeError for what is no Dockerfile."""
    check_text(text, file)
    wish, given = EnvironmentSpec(file=file), dict(_PREDEFINED_ARGS)
    instructions = list(_instructions(text, file))
    for one in instructions:
        if one.name == "ARG":  # of a stage that is not read, too
            for name in re.findall(r"(?:^|\s)([A-Za-z_]\w*)", one.plain(), re.ASCII):
                around.take_build_arg(name)
    stages = _stages(instructions, given, around)
    if not stages:
        raise recipe_problem(
            first_place(file),
            "no-base-image",
            "has no FROM line",
            "pass a Dockerfile with a FROM line",
        )
    _StageReader(wish, around, stages, given).take(stages[-1])
    around.refuse_unused(file)
    check_context(around)
    return wish


# --- lines ---------------------------------------------------------------------------------------


def _instructions(text: str, file: str) -> Iterator[DockerfileLine]:
    lines, at, escape = text.replace("\r\n", "\n").split("\n"), 0, "\\"
    for line in lines:
        found = re.fullmatch(r"#\s*(\w+)\s*=\s*(\S+)\s*", line)
        if not found:
            break
        escape = found[2] if found[1].lower() == "escape" and found[2] == "`" else escape
    while at < len(lines):
        first, line = at, lines[at]
        at += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = re.match(r"(\s*)([A-Za-z]+)(?=\s|$)", line)
        where = SourceLocation(file=file, line=first + 1, column=len(line) - len(line.lstrip()) + 1)
        if not found:
            raise recipe_problem(
                where,
                "line-invalid",
                f"{show(line.strip())} is not an instruction",
                "fix the line, or end the line above with a backslash",
            )
        parts = [" " * found.end() + line[found.end() :]]
        while re.search(rf"{re.escape(escape)}[ \t]*$", parts[-1]) and at < len(lines):
            parts[-1] = _literal(re.sub(r".[ \t]*$", "", parts[-1]), escape) + "\\"
            comment = not lines[at].strip() or lines[at].lstrip().startswith("#")
            parts.append(escape if comment else lines[at])
            at += 1
        parts[-1] = "" if parts[-1].strip() == escape else _literal(parts[-1].rstrip(), escape)
        made = DockerfileLine(name=found[2].upper(), where=where, text="\n".join(parts))
        if made.name != "ONBUILD":
            _flags(made)
        if made.name in ("RUN", "COPY", "ADD"):
            for tabs, _, end in _HEREDOC.findall(made.text):
                start = at
                while at < len(lines) and (lines[at].lstrip("\t") if tabs else lines[at]) != end:
                    at += 1
                if at >= len(lines):
                    raise recipe_problem(
                        where,
                        "heredoc-unclosed",
                        f"a here-document (<<{end}) is not closed",
                        f"add a line {end}",
                    )
                made.text += "".join(f"\n{one}" for one in lines[start : at + 1])
                at += 1
            made.text += "\n" if _HEREDOC.search(made.text) else ""
        yield made


def _literal(line: str, escape: str) -> str:
    """Where ` escapes, a backslash is one."""
    return line if escape == "\\" else line.replace("\\", "\\\\")


def _flags(made: DockerfileLine) -> None:
    """Takes `--name=value` from before what the instruction says."""
    if made.name not in ("RUN", "COPY", "ADD", "FROM"):
        return
    end = 0
    while found := _FLAG.match(made.text, end):
        made.flags.append((found[1], found[2] or ""))
        end = found.end()
    made.text = re.sub(r"[^\n\\]|\\(?!\n)", " ", made.text[:end]) + made.text[end:]


def _stages(
    instructions: list[DockerfileLine], given: dict[str, str], around: ContainerFileReaders
) -> list[Stage]:
    """The stages; `given` gets what ARG says before the first."""
    stages: list[Stage] = []
    for one in instructions:
        if one.name == "FROM":
            words = split_shell_words(one.text, one.start(), given)
            if not words:
                raise recipe_problem(one.where, "no-base-image", "FROM has no image", "write FROM IMAGE")
            # docker splits the line at blanks and knows no comment behind it.
            plain = one.text.replace("\\\n", " ").split()
            if "$" not in one.text and not (
                len(plain) == 1 or (len(plain) == 3 and plain[1].lower() == "as")
            ):
                raise recipe_problem(
                    one.where,
                    "from-invalid",
                    f"FROM takes IMAGE or IMAGE AS NAME, not {show(' '.join(plain))}",
                    "put a comment on a line of its own",
                )
            if len(stages) >= _MOST_STAGES:
                raise recipe_problem(
                    one.where, "too-many-stages", f"has more than {_MOST_STAGES} stages", "split it"
                )
            named = len(words) == 3 and words[1].text.lower() == "as"
            name = words[2].text.lower() if named else str(len(stages))
            stages.append(Stage(name=name, base=words[0], platform=dict(one.flags).get("platform", "")))
        elif stages:
            stages[-1].instructions.append(one)
        elif one.name == "ARG":
            for word in split_shell_words(one.text, one.start(), given):
                name, equals, value = word.text.partition("=")
                own = around.take_build_arg(name)
                if own is not None or (equals and word.known):
                    given[name] = value if own is None else own
        else:
            raise recipe_problem(
                one.where, "text-before-base", f"{show(one.name)} is before FROM", "begin with FROM"
            )
    return stages


# --- stages --------------------------------------------------------------------------------------


class _StageReader:
    """Reads one stage and those below it; of stages that it copies from, their packages."""

    def __init__(
        self,
        wish: EnvironmentSpec,
        around: ContainerFileReaders,
        stages: list[Stage],
        given: Mapping[str, str],
    ) -> None:
        self.wish, self.around, self.stages, self.given = wish, around, stages, given
        self.taken: set[int] = set()
        self.read: dict[int, ContainerFile] = {}  # stages of which files are copied
        self.last: dict[str, str] = {}  # CMD and ENTRYPOINT: the last one counts

    def take(self, stage: Stage, *, packages_only: bool = False) -> ContainerFile:
        chain, container = self._chain(stage), self._container(packages_only=packages_only)
        container.base(chain[0].base)
        if not re.search(r"^$|\$|\bamd64\b|x86_64", chain[0].platform):
            what = f"the platform {show(chain[0].platform)}"
            container.leave(chain[0].base.where, what, "images here are for linux/amd64")
        for one in chain:
            # of one that others stand on too, what it installs is taken once
            container.wish = EnvironmentSpec(file=self.wish.file) if id(one) in self.taken else self.wish
            self.taken.add(id(one))
            for instruction in one.instructions:
                self._instruction(container, instruction)
        if not packages_only:
            container.finish()
            for left in self.stages:
                if id(left) not in self.taken:
                    what = f"the stage {show(left.name)} is not part of the last one, and is not read"
                    self.wish.note(left.base.where, what)
        return container

    def _container(self, *, packages_only: bool) -> ContainerFile:
        return ContainerFile(wish=self.wish, around=self.around, packages_only=packages_only)

    def _chain(self, stage: Stage) -> list[Stage]:
        """The stage and those that it stands on, the lowest first."""
        chain = [stage]
        while below := self._named(chain[0].base.text, chain[0]):
            chain.insert(0, below)
        return chain

    def _named(self, name: str, before: Stage | None = None) -> Stage | None:
        """The last stage of a name, or number, before another."""
        at = next((at for at, one in enumerate(self.stages) if one is before), len(self.stages))
        return next(
            (
                one
                for number, one in reversed([*enumerate(self.stages[:at])])
                if name.lower() in (one.name, str(number))
            ),
            None,
        )

    def _instruction(self, container: ContainerFile, one: DockerfileLine) -> None:
        match one.name:
            case "RUN":
                self._run(container, one)
            case "ENV" | "LABEL":
                self._pairs(container, one)
            case "ARG":
                for word in split_shell_words(one.text, one.start(), container.variables):
                    name, equals, value = word.text.partition("=")
                    own = self.around.take_build_arg(name)
                    if own is None and not equals and name in self.given:
                        own = self.given[name]
                    known = own is not None or (word.known and bool(equals))
                    if name not in container.own:
                        container.remember(name, RunWord(value if own is None else own, word.where, known))
            case "COPY" | "ADD":
                self._copy(container, one)
            case "WORKDIR":
                for word in split_shell_words(one.text, one.start(), container.variables)[:1]:
                    container.go(word)
            case "USER" | "CMD" | "ENTRYPOINT":
                self._start(container, one)
            case "SHELL" if re.search(r"\b(ba|z|da)?sh\b|\bconda\b|micromamba", one.plain()):
                pass
            case name if name in _NOTED:
                if one.plain() != "NONE":
                    container.note(one.where, f"{name} {show(one.plain())}: {_NOTED[name]}")
            case name if name in _LEFT:
                container.leave(one.where, f"{name} {show(one.plain())}", _LEFT[name])
            case name:
                do = "see whether what it does is needed"
                container.leave(one.where, f"{show(f'{name} {one.plain()}')} is not read", do)

    def _run(self, container: ContainerFile, one: DockerfileLine) -> None:
        before = list(container.copies)
        for name, value in one.flags:
            said = dict(re.findall(r"(\w+)=([^,]*)", value)) if name == "mount" else {}
            if (stage := said.get("from")) and self._named(stage):
                self._other(container, stage, one.where)
            elif said.get("type") == "bind":
                source, target = (
                    said.get("source") or said.get("src") or ".",
                    said.get("target") or said.get("dst"),
                )
                if target:
                    container.copy([source], target, one.where, quiet=True)
        if words := one.exec_form():
            read_install_command(container, [RunWord(word, one.where) for word in words], one.where)
        else:
            read_install_script(container, one.text, one.start(), joined=True)
        container.copies = before

    def _pairs(self, container: ContainerFile, one: DockerfileLine) -> None:
        words = split_shell_words(one.text, one.start(), container.variables)
        if words and "=" not in words[0].text:  # ENV NAME all the rest
            rest = " ".join(word.text for word in words[1:])
            known = all(word.known for word in words)
            words = [RunWord(f"{words[0].text}={rest}", words[0].where, known)]
        for word in words:
            name, _, value = word.text.partition("=")
            if one.name == "ENV":
                container.set(name, RunWord(value, word.where, word.known))
            elif not container.packages_only:
                self.wish.label(name, value, word.where)

    def _copy(self, container: ContainerFile, one: DockerfileLine) -> None:
        if _HEREDOC.search(one.text):
            what = f"{one.name} {show(one.text.strip().partition(chr(10))[0])} writes a file"
            container.leave(
                one.where, what, "mount it where the image runs, or make it a package on an index"
            )
            return
        split = split_shell_words(one.text, one.start(), container.variables)
        words = one.exec_form() or [word.text for word in split]
        flags = dict(one.flags)
        stage = flags.get("from", "")
        self._copy_flags(container, one, flags)
        if len(words) < 2:
            container.leave(
                one.where, f"{one.name} {show(one.plain())} is not read", "write what is copied and where to"
            )
        elif stage and self._named(stage):
            self._other(container, stage, one.where, words)
        elif stage and all(_ENVIRONMENT.search(word) for word in words[:-1]):
            what = f"{one.name} --from={show(stage)[1:-1]} {show(' '.join(words))}"
            container.note(one.where, f"{what} brings a tool that images are made without")
        elif stage:
            what = f"{one.name} --from={show(stage)[1:-1]} {show(' '.join(words))}"
            container.leave(
                one.where, what, "what that image holds is not known: add the packages that it is for"
            )
        else:
            if one.name == "ADD":
                for word in words[:-1]:
                    if _UNPACKED.search(word) and "://" not in word:
                        do = "unpack it in the project, and copy the directory"
                        container.leave(one.where, f"ADD unpacks {show(word)}", do)
                words = [*(one for one in words[:-1] if "://" in one or not _UNPACKED.search(one)), words[-1]]
            container.copy(words[:-1], words[-1], one.where)

    def _copy_flags(self, container: ContainerFile, one: DockerfileLine, flags: Mapping[str, str]) -> None:
        for name, value in flags.items():
            if name == "chown" and value not in ("root", "root:root", "0", "0:0"):
                container.note(
                    one.where, f"{one.name} --chown={show(value)[1:-1]}: files are root's, and can be read"
                )
            elif name == "chmod" and not re.fullmatch(r"0?[0-7]44|a?[+]r|0?644", value):
                container.note(
                    one.where, f"{one.name} --chmod={show(value)[1:-1]}: files keep their own mode"
                )
            elif name in ("exclude", "parents"):
                do = "write what is meant under files: of the recipe"
                container.leave(one.where, f"{one.name} --{name} is not read", do)

    def _other(
        self, container: ContainerFile, name: str, where: SourceLocation, words: Sequence[str] = ()
    ) -> None:
        """What is copied of a stage: its packages, and the files of the build context that it has there."""
        stage = self._named(name)
        wish = self.wish
        if stage is None:
            return
        before = (len(wish.pip), len(wish.conda))
        if id(stage) not in self.taken:
            self.read[id(stage)] = self.take(stage, packages_only=True)
            if before != (len(wish.pip), len(wish.conda)):
                what = f"the packages of the stage {show(name)} were taken, since files are copied from it"
                wish.note(where, what)
        other = self.read.get(id(stage))
        for source in words[:-1]:
            place = normpath(join(other.workdir if other else "/", source))
            taken = False
            for copied in other.copies if other else ():
                inside = normpath(copied.to)
                if f"{inside}/".startswith(f"{place.rstrip('/')}/"):
                    to = join(words[-1], inside[len(place) :].lstrip("/")) if inside != place else words[-1]
                    container.copy([copied.source], to, where)
                    taken = True
            if not taken and not _ENVIRONMENT.search(place):
                do = "make what it brings a package on an index, or one of the project's own files"
                container.leave(where, f"COPY --from={show(name)[1:-1]} {show(source, limit=120)}", do)

    def _start(self, container: ContainerFile, one: DockerfileLine) -> None:
        if container.packages_only:
            return
        if one.name == "USER":
            names = [word.text for word in split_shell_words(one.text, one.start(), container.variables)]
            name, colon, group = (names or [""])[0].partition(":")
            number = container.users.get(name, name)
            group = container.users.get(group, group)
            add_user(self.wish, f"{number}{colon}{group}" if group.isdecimal() else number, one.where)
            return
        if (before := self.last.get(one.name)) in self.wish.left:
            self.wish.left.remove(before or "")
        words = one.exec_form() or [*SHELL, one.plain()]
        keep = add_command if one.name == "CMD" else add_entrypoint
        self.last[one.name] = keep(self.wish, words, one.where)


# --- Definition files of apptainer and singularity -> what their last stage asks for. Nothing is built
# Source: apptainer's user guide, "Definition Files". A line of a section is a shell's in %post, %environment
# and the scripts, words elsewhere.


DEFINITION = re.compile(r"(?:\s|#.*\n)*bootstrap[ \t]*:", re.IGNORECASE)
_MOST_SECTIONS = 50
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
_SECTIONS_NOTED = {
    "test": "imagefactory tests each image itself; run yours in it: imagefactory run TARGET -- COMMAND",
    "help": "a recipe has a description",
    "apphelp": "a recipe has a description",
    "applabels": "a recipe has labels",
    "apptest": "imagefactory tests each image itself",
}
_HOST = "a build changes nothing outside of the image: put what it makes into the project's own files"
_SECTIONS_SKIPPED = {
    "setup": _HOST,
    "pre": _HOST,
    "startscript": "start it by its command: imagefactory run TARGET -- COMMAND",
}
_APP = "one recipe makes one environment: write a recipe for it"


@dataclass(frozen=True, slots=True)
class DefinitionSection:
    """`text` is what stands below its line, `said` what stands behind its name."""

    name: str
    said: str
    where: SourceLocation
    text: str

    def lines(self) -> Iterator[tuple[str, SourceLocation]]:
        for number, line in enumerate(self.text.split("\n")):
            if line.strip() and not line.lstrip().startswith("#"):
                yield line, self.place(number)

    def place(self, row: int = 0) -> SourceLocation:
        return SourceLocation(file=self.where.file, line=self.where.line + 1 + row, column=1)


@dataclass(slots=True)
class DefinitionStage:
    header: dict[str, RunWord] = field(default_factory=dict)
    sections: list[DefinitionSection] = field(default_factory=list)


def read_definition(text: str, file: str, around: ContainerFileReaders) -> EnvironmentSpec:
    """What the last stage asks for. Raises RecipeError for what is no definition file."""
    check_text(text, file)
    wish = EnvironmentSpec(file=file)
    stages = _definition_stages(_filled(text.replace("\r\n", "\n"), file, around), file)
    around.refuse_unused(file)
    if not stages:
        raise recipe_problem(
            first_place(file),
            "no-base-image",
            "has no Bootstrap line",
            "pass a definition with Bootstrap and From",
        )
    _take(ContainerFile(wish=wish, around=around, rooted=False), stages, len(stages) - 1)
    check_context(around)
    return wish


def _filled(text: str, file: str, around: ContainerFileReaders) -> str:
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
            place = SourceLocation(file=file, line=number, column=1)
            filled.append(line if inside == "arguments" else arguments.fill(line, place))
            size += len(filled[-1]) + 1
            if size > LIMITS.size:
                raise too_large(file, LIMITS)
    return "\n".join(filled)


class _Arguments:
    """The values of one stage's build arguments: those that a person gives, then `defaults`."""

    def __init__(self, defaults: Mapping[str, str], around: ContainerFileReaders) -> None:
        self._defaults, self._around = defaults, around
        self._known: dict[str, str] = {}

    def fill(self, text: str, where: SourceLocation, *, inside: tuple[str, ...] = ()) -> str:
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
                raise recipe_problem(place, "variables-too-long", what, "give them shorter values")
        return "".join(parts) + text[end:]

    def _value(self, name: str, where: SourceLocation, inside: tuple[str, ...]) -> str:
        if name in inside or len(inside) > _MOST_NESTED:
            raise recipe_problem(
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
                raise recipe_problem(
                    where, "build-argument-missing", f"the build argument {show(name)} has no value", do
                )
            self._known[name] = self.fill(value, where, inside=(*inside, name))
        return self._known[name]


def _definition_stages(text: str, file: str) -> list[DefinitionStage]:
    stages: list[DefinitionStage] = []
    lines, at = text.split("\n"), 0
    while at < len(lines):
        line, where = lines[at], SourceLocation(file=file, line=at + 1, column=1)
        at += 1
        if found := _SECTION.match(line):
            start, name = at, found[1].lower()
            if name not in _SECTIONS and not name.startswith("app"):
                what = f"{show(f'%{found[1]}', limit=60)} is not a section of apptainer"
                raise recipe_problem(
                    where,
                    "line-invalid",
                    what,
                    "put other text before the %: apptainer stops here, in a script too",
                )
            while at < len(lines) and not (_SECTION.match(lines[at]) or _STAGE.match(lines[at])):
                at += 1
            section = DefinitionSection(name, found[2].strip(), where, "\n".join(lines[start:at]))
            if not stages:
                raise recipe_problem(
                    where,
                    "text-before-base",
                    f"{show(found[0])} is before Bootstrap",
                    "begin with Bootstrap",
                )
            stages[-1].sections.append(section)
        elif found := re.match(r"\s*([A-Za-z]+)\s*:\s*(.*?)\s*(#.*)?$", line):
            key = found[1].lower()
            if key == "bootstrap":
                if len(stages) >= _MOST_SECTIONS:
                    raise recipe_problem(
                        where, "too-many-stages", f"has more than {_MOST_SECTIONS} stages", "split it"
                    )
                stages.append(DefinitionStage())
            elif not stages:
                raise recipe_problem(
                    where,
                    "text-before-base",
                    f"{show(found[1])} is before Bootstrap",
                    "begin with Bootstrap",
                )
            place = SourceLocation(file=file, line=at, column=found.start(2) + 1)
            # apptainer fills no $NAME here
            stages[-1].header[key] = RunWord(re.sub("[\"']", "", found[2]), place, "$" not in found[2])
        elif line.strip() and not line.lstrip().startswith("#"):
            raise recipe_problem(
                where,
                "line-invalid",
                f"{show(line.strip())} is not a line of a header or section",
                "fix the line",
            )
    return stages


def _take(container: ContainerFile, stages: list[DefinitionStage], at: int) -> None:
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


def _named(stage: DefinitionStage) -> str:
    named = stage.header.get("stage")
    return named.text if named else ""


def _take_packages(
    container: ContainerFile, stages: list[DefinitionStage], section: DefinitionSection
) -> None:
    """The packages of a stage from which files are taken."""
    wish = container.wish
    before = (len(wish.pip), len(wish.conda))
    inner = ContainerFile(wish=wish, around=container.around, rooted=False, packages_only=True)
    _take(inner, stages, len(stages) - 1)
    name = show(_named(stages[-1]))
    if before != (len(wish.pip), len(wish.conda)):
        what = f"the packages of the stage {name} were taken, since files are copied from it"
        container.note(section.where, what)
    else:
        do = "make what it brings a package on an index"
        container.leave(section.where, f"the files of the stage {name} are not taken", do)


def _section(container: ContainerFile, section: DefinitionSection) -> None:
    wish = container.wish
    match section.name:
        case "post":
            read_install_script(container, section.text, section.place())
        case "environment":
            _environment(container, section)
        case "files":
            for line, where in section.lines():
                words = [word.text for word in split_shell_words(line, where, container.variables)]
                if words:
                    container.copy(words[:1], words[-1], where)
        case "labels" if not container.packages_only:
            for line, where in section.lines():
                name, _, value = line.strip().partition(" ")
                wish.label(name, value.strip().strip("\"'"), where)
        case "runscript" if not container.packages_only:
            text = "; ".join(line.strip() for line, _ in section.lines())
            add_entrypoint(wish, [*SHELL, text, section.name], section.where, f"%{section.name}")
        case "arguments":
            for line, where in section.lines():
                if "=" not in line:
                    container.note(
                        where, f"{show(line.strip())} is no NAME=VALUE, and sets no build argument"
                    )
        case "labels" | "runscript":
            pass
        case name if name in _SECTIONS_NOTED:
            container.note(section.where, f"%{name} is not taken: {_SECTIONS_NOTED[name]}")
        case name:
            do = _SECTIONS_SKIPPED.get(name) or (
                _APP if name.startswith("app") else "see whether what it does is needed"
            )
            container.leave(section.where, f"%{name} is not taken", do)


def _environment(container: ContainerFile, section: DefinitionSection) -> None:
    for command in read_commands(section.text, section.place(), container.variables, joined=False):
        words = command.words[1:] if command.words and command.words[0].text == "export" else command.words
        for word in words:
            name, equals, value = word.text.partition("=")
            if equals and command.plain:
                container.set(name, RunWord(value, word.where, word.known))
        plain = [word for word in words if "=" not in word.text]
        if not command.plain or (plain and words is command.words):
            container.leave(command.where, f"{show(command.text)} is not run", "set it where the image runs")
