"""Read the requirements of the last stage of Dockerfiles, Containerfiles and Apptainer definitions.

Nothing is built. Source: Docker's "Dockerfile reference". The parsers on PyPI do not read here-documents and
lose the columns of words.
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
# The arguments that Docker sets itself.
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
# Instructions for the place where an image runs, or without effect on a program in it.
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
    """An instruction. `text` is its lines, with blanks in place of its name and flags."""

    name: str
    where: SourceLocation
    text: str
    flags: list[tuple[str, str]] = field(default_factory=list)

    def start(self) -> SourceLocation:
        return SourceLocation(file=self.where.file, line=self.where.line, column=1)

    def plain(self) -> str:
        return " ".join(self.text.replace("\\\n", " ").split())

    def exec_form(self) -> list[str] | None:
        """Return the words of `["a", "b"]`, None for a shell command."""
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
    """Return the requirements of the last stage. Raises RecipeError if the text is not a Dockerfile."""
    check_text(text, file)
    spec, arguments = EnvironmentSpec(file=file), dict(_PREDEFINED_ARGS)
    instructions = list(_instructions(text, file))
    for line in instructions:
        if line.name == "ARG":  # of a stage that is not read, too
            for name in re.findall(r"(?:^|\s)([A-Za-z_]\w*)", line.plain(), re.ASCII):
                around.use_build_arg(name)
    stages = _stages(instructions, arguments, around)
    if not stages:
        raise recipe_problem(
            first_place(file), "no-base-image", "has no FROM line", "pass a Dockerfile with a FROM line"
        )
    _StageReader(spec, around, stages, arguments).take(stages[-1])
    around.reject_unused(file)
    check_context(around)
    return spec


# --- lines ---------------------------------------------------------------------------------------


def _instructions(text: str, file: str) -> Iterator[DockerfileLine]:
    lines, line_index, escape = text.replace("\r\n", "\n").split("\n"), 0, "\\"
    for line in lines:
        match = re.fullmatch(r"#\s*(\w+)\s*=\s*(\S+)\s*", line)
        if not match:
            break
        escape = match[2] if match[1].lower() == "escape" and match[2] == "`" else escape
    while line_index < len(lines):
        first, line = line_index, lines[line_index]
        line_index += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = re.match(r"(\s*)([A-Za-z]+)(?=\s|$)", line)
        location = SourceLocation(file=file, line=first + 1, column=len(line) - len(line.lstrip()) + 1)
        if not match:
            raise recipe_problem(
                location,
                "line-invalid",
                f"{show(line.strip())} is not an instruction",
                "fix the line, or end the line above with a backslash",
            )
        parts = [" " * match.end() + line[match.end() :]]
        while re.search(rf"{re.escape(escape)}[ \t]*$", parts[-1]) and line_index < len(lines):
            parts[-1] = _literal(re.sub(r".[ \t]*$", "", parts[-1]), escape) + "\\"
            comment = not lines[line_index].strip() or lines[line_index].lstrip().startswith("#")
            parts.append(escape if comment else lines[line_index])
            line_index += 1
        parts[-1] = "" if parts[-1].strip() == escape else _literal(parts[-1].rstrip(), escape)
        instruction = DockerfileLine(name=match[2].upper(), where=location, text="\n".join(parts))
        if instruction.name != "ONBUILD":
            _flags(instruction)
        if instruction.name in ("RUN", "COPY", "ADD"):
            for tabs, _, end in _HEREDOC.findall(instruction.text):
                start = line_index
                while (
                    line_index < len(lines)
                    and (lines[line_index].lstrip("\t") if tabs else lines[line_index]) != end
                ):
                    line_index += 1
                if line_index >= len(lines):
                    raise recipe_problem(
                        location,
                        "heredoc-unclosed",
                        f"a here-document (<<{end}) is not closed",
                        f"add a line {end}",
                    )
                instruction.text += "".join(f"\n{part}" for part in lines[start : line_index + 1])
                line_index += 1
            instruction.text += "\n" if _HEREDOC.search(instruction.text) else ""
        yield instruction


def _literal(line: str, escape: str) -> str:
    """Escape the backslashes of a line if the escape character is a backtick."""
    return line if escape == "\\" else line.replace("\\", "\\\\")


def _flags(line: DockerfileLine) -> None:
    """Move `--name=value` from the start of an instruction's text into its flags."""
    if line.name not in ("RUN", "COPY", "ADD", "FROM"):
        return
    end = 0
    while match := _FLAG.match(line.text, end):
        line.flags.append((match[1], match[2] or ""))
        end = match.end()
    line.text = re.sub(r"[^\n\\]|\\(?!\n)", " ", line.text[:end]) + line.text[end:]


def _stages(
    instructions: list[DockerfileLine], arguments: dict[str, str], around: ContainerFileReaders
) -> list[Stage]:
    """Return the stages. The ARG instructions before the first one are added to `arguments`."""
    stages: list[Stage] = []
    for line in instructions:
        if line.name == "FROM":
            words = split_shell_words(line.text, line.start(), arguments)
            if not words:
                raise recipe_problem(line.where, "no-base-image", "FROM has no image", "write FROM IMAGE")
            # Docker splits the line at blanks and allows no comment after it.
            plain = line.text.replace("\\\n", " ").split()
            if "$" not in line.text and not (
                len(plain) == 1 or (len(plain) == 3 and plain[1].lower() == "as")
            ):
                raise recipe_problem(
                    line.where,
                    "from-invalid",
                    f"FROM takes IMAGE or IMAGE AS NAME, not {show(' '.join(plain))}",
                    "put a comment on a line of its own",
                )
            if len(stages) >= _MOST_STAGES:
                raise recipe_problem(
                    line.where, "too-many-stages", f"has more than {_MOST_STAGES} stages", "split it"
                )
            named = len(words) == 3 and words[1].text.lower() == "as"
            name = words[2].text.lower() if named else str(len(stages))
            stages.append(Stage(name=name, base=words[0], platform=dict(line.flags).get("platform", "")))
        elif stages:
            stages[-1].instructions.append(line)
        elif line.name == "ARG":
            for word in split_shell_words(line.text, line.start(), arguments):
                name, equals, value = word.text.partition("=")
                build_arg = around.use_build_arg(name)
                if build_arg is not None or (equals and word.known):
                    arguments[name] = value if build_arg is None else build_arg
        else:
            raise recipe_problem(
                line.where, "text-before-base", f"{show(line.name)} is before FROM", "begin with FROM"
            )
    return stages


# --- stages --------------------------------------------------------------------------------------


class _StageReader:
    """A reader of one stage and its parents.

    From a stage from which files are copied, only packages are read.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        around: ContainerFileReaders,
        stages: list[Stage],
        arguments: Mapping[str, str],
    ) -> None:
        self.spec, self.around, self.stages, self.arguments = spec, around, stages, arguments
        self.visited: set[int] = set()
        self.read: dict[int, ContainerFile] = {}  # stages of which files are copied
        self.last: dict[str, str] = {}  # CMD and ENTRYPOINT: the last one counts

    def take(self, stage: Stage, *, packages_only: bool = False) -> ContainerFile:
        chain, container = self._chain(stage), self._container(packages_only=packages_only)
        container.base(chain[0].base)
        if not re.search(r"^$|\$|\bamd64\b|x86_64", chain[0].platform):
            platform_text = f"the platform {show(chain[0].platform)}"
            container.leave(chain[0].base.where, platform_text, "images here are for linux/amd64")
        for parent in chain:
            # a parent of several stages installs its packages once
            container.spec = EnvironmentSpec(file=self.spec.file) if id(parent) in self.visited else self.spec
            self.visited.add(id(parent))
            for instruction in parent.instructions:
                self._instruction(container, instruction)
        if not packages_only:
            container.finish()
            for unread in self.stages:
                if id(unread) not in self.visited:
                    platform_text = (
                        f"the stage {show(unread.name)} is not part of the last one, and is not read"
                    )
                    self.spec.note(unread.base.where, platform_text)
        return container

    def _container(self, *, packages_only: bool) -> ContainerFile:
        return ContainerFile(spec=self.spec, around=self.around, packages_only=packages_only)

    def _chain(self, stage: Stage) -> list[Stage]:
        """Return the stage and its parents, the base stage first."""
        chain = [stage]
        while below := self._named(chain[0].base.text, chain[0]):
            chain.insert(0, below)
        return chain

    def _named(self, name: str, before: Stage | None = None) -> Stage | None:
        """Return the last stage with a name or number before another stage."""
        stage_index = next(
            (stage_index for stage_index, candidate in enumerate(self.stages) if candidate is before),
            len(self.stages),
        )
        return next(
            (
                candidate
                for number, candidate in reversed([*enumerate(self.stages[:stage_index])])
                if name.lower() in (candidate.name, str(number))
            ),
            None,
        )

    def _instruction(self, container: ContainerFile, line: DockerfileLine) -> None:
        match line.name:
            case "RUN":
                self._run(container, line)
            case "ENV" | "LABEL":
                self._pairs(container, line)
            case "ARG":
                for word in split_shell_words(line.text, line.start(), container.variables):
                    name, equals, value = word.text.partition("=")
                    build_arg = self.around.use_build_arg(name)
                    if build_arg is None and not equals and name in self.arguments:
                        build_arg = self.arguments[name]
                    known = build_arg is not None or (word.known and bool(equals))
                    if name not in container.own:
                        container.remember(
                            name, RunWord(value if build_arg is None else build_arg, word.where, known)
                        )
            case "COPY" | "ADD":
                self._copy(container, line)
            case "WORKDIR":
                for word in split_shell_words(line.text, line.start(), container.variables)[:1]:
                    container.go(word)
            case "USER" | "CMD" | "ENTRYPOINT":
                self._start(container, line)
            case "SHELL" if re.search(r"\b(ba|z|da)?sh\b|\bconda\b|micromamba", line.plain()):
                pass
            case name if name in _NOTED:
                if line.plain() != "NONE":
                    container.note(line.where, f"{name} {show(line.plain())}: {_NOTED[name]}")
            case name if name in _LEFT:
                container.leave(line.where, f"{name} {show(line.plain())}", _LEFT[name])
            case name:
                do = "see whether what it does is needed"
                container.leave(line.where, f"{show(f'{name} {line.plain()}')} is not read", do)

    def _run(self, container: ContainerFile, line: DockerfileLine) -> None:
        before = list(container.copies)
        for name, value in line.flags:
            settings = dict(re.findall(r"(\w+)=([^,]*)", value)) if name == "mount" else {}
            if (stage := settings.get("from")) and self._named(stage):
                self._other(container, stage, line.where)
            elif settings.get("type") == "bind":
                source, target = (
                    settings.get("source") or settings.get("src") or ".",
                    settings.get("target") or settings.get("dst"),
                )
                if target:
                    container.copy([source], target, line.where, quiet=True)
        if words := line.exec_form():
            read_install_command(container, [RunWord(word, line.where) for word in words], line.where)
        else:
            read_install_script(container, line.text, line.start(), joined=True)
        container.copies = before

    def _pairs(self, container: ContainerFile, line: DockerfileLine) -> None:
        words = split_shell_words(line.text, line.start(), container.variables)
        if words and "=" not in words[0].text:  # ENV NAME all the rest
            rest = " ".join(word.text for word in words[1:])
            known = all(word.known for word in words)
            words = [RunWord(f"{words[0].text}={rest}", words[0].where, known)]
        for word in words:
            name, _, value = word.text.partition("=")
            if line.name == "ENV":
                container.set(name, RunWord(value, word.where, word.known))
            elif not container.packages_only:
                self.spec.label(name, value, word.where)

    def _copy(self, container: ContainerFile, line: DockerfileLine) -> None:
        if _HEREDOC.search(line.text):
            message = f"{line.name} {show(line.text.strip().partition(chr(10))[0])} writes a file"
            container.leave(
                line.where, message, "mount it where the image runs, or make it a package on an index"
            )
            return
        split = split_shell_words(line.text, line.start(), container.variables)
        words = line.exec_form() or [word.text for word in split]
        flags = dict(line.flags)
        stage = flags.get("from", "")
        self._copy_flags(container, line, flags)
        if len(words) < 2:
            container.leave(
                line.where,
                f"{line.name} {show(line.plain())} is not read",
                "write what is copied and where to",
            )
        elif stage and self._named(stage):
            self._other(container, stage, line.where, words)
        elif stage and all(_ENVIRONMENT.search(word) for word in words[:-1]):
            message = f"{line.name} --from={show(stage)[1:-1]} {show(' '.join(words))}"
            container.note(line.where, f"{message} brings a tool that images do not need")
        elif stage:
            message = f"{line.name} --from={show(stage)[1:-1]} {show(' '.join(words))}"
            container.leave(
                line.where, message, "the content of that image is unknown: add its packages to the recipe"
            )
        else:
            if line.name == "ADD":
                for word in words[:-1]:
                    if _UNPACKED.search(word) and "://" not in word:
                        do = "unpack it in the project, and copy the directory"
                        container.leave(line.where, f"ADD unpacks {show(word)}", do)
                plain = [word for word in words[:-1] if "://" in word or not _UNPACKED.search(word)]
                words = [*plain, words[-1]]
            container.copy(words[:-1], words[-1], line.where)

    def _copy_flags(self, container: ContainerFile, line: DockerfileLine, flags: Mapping[str, str]) -> None:
        for name, value in flags.items():
            if name == "chown" and value not in ("root", "root:root", "0", "0:0"):
                container.note(
                    line.where, f"{line.name} --chown={show(value)[1:-1]}: files are root's, and can be read"
                )
            elif name == "chmod" and not re.fullmatch(r"0?[0-7]44|a?[+]r|0?644", value):
                container.note(
                    line.where, f"{line.name} --chmod={show(value)[1:-1]}: files keep their own mode"
                )
            elif name in ("exclude", "parents"):
                do = "write the paths under files: of the recipe"
                container.leave(line.where, f"{line.name} --{name} is not read", do)

    def _other(
        self, container: ContainerFile, name: str, location: SourceLocation, words: Sequence[str] = ()
    ) -> None:
        """Add another stage's packages, and the files of the build context that are copied through it."""
        stage = self._named(name)
        spec = self.spec
        if stage is None:
            return
        before = (len(spec.pip), len(spec.conda))
        if id(stage) not in self.visited:
            self.read[id(stage)] = self.take(stage, packages_only=True)
            if before != (len(spec.pip), len(spec.conda)):
                message = f"the packages of the stage {show(name)} were taken, since files are copied from it"
                spec.note(location, message)
        other = self.read.get(id(stage))
        for source in words[:-1]:
            source_path = normpath(join(other.workdir if other else "/", source))
            copied_files = False
            for copied in other.copies if other else ():
                inside = normpath(copied.to)
                if f"{inside}/".startswith(f"{source_path.rstrip('/')}/"):
                    to = (
                        join(words[-1], inside[len(source_path) :].lstrip("/"))
                        if inside != source_path
                        else words[-1]
                    )
                    container.copy([copied.source], to, location)
                    copied_files = True
            if not copied_files and not _ENVIRONMENT.search(source_path):
                do = "make what it brings a package on an index, or one of the project's own files"
                container.leave(location, f"COPY --from={show(name)[1:-1]} {show(source, limit=120)}", do)

    def _start(self, container: ContainerFile, line: DockerfileLine) -> None:
        if container.packages_only:
            return
        if line.name == "USER":
            names = [word.text for word in split_shell_words(line.text, line.start(), container.variables)]
            name, colon, group = (names or [""])[0].partition(":")
            number = container.users.get(name, name)
            group = container.users.get(group, group)
            add_user(self.spec, f"{number}{colon}{group}" if group.isdecimal() else number, line.where)
            return
        if (before := self.last.get(line.name)) in self.spec.lost:
            self.spec.lost.remove(before or "")
        words = line.exec_form() or [*SHELL, line.plain()]
        keep = add_command if line.name == "CMD" else add_entrypoint
        self.last[line.name] = keep(self.spec, words, line.where)


# --- Definition files of Apptainer and Singularity. Nothing is built
# Source: Apptainer's user guide, "Definition Files". The lines of %post, %environment and the scripts are a
# shell's, those of other sections are words.


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
# Sections without effect on a program in the image, and what replaces them.
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
    """A section. `argument` is the text after its name, `text` the lines below."""

    name: str
    argument: str
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
    """Return the requirements of the last stage. Raises RecipeError if the text is not a definition."""
    check_text(text, file)
    spec = EnvironmentSpec(file=file)
    stages = _definition_stages(_filled(text.replace("\r\n", "\n"), file, around), file)
    around.reject_unused(file)
    if not stages:
        raise recipe_problem(
            first_place(file),
            "no-base-image",
            "has no Bootstrap line",
            "pass a definition with Bootstrap and From",
        )
    _take(ContainerFile(spec=spec, around=around, rooted=False), stages, len(stages) - 1)
    check_context(around)
    return spec


def _filled(text: str, file: str, around: ContainerFileReaders) -> str:
    """Return the text with values in place of `{{ NAME }}`. Comments stay, as in Apptainer.

    The %arguments of a stage apply to it and to later stages. Raises RecipeError for an argument without a
    value.
    """
    lines = text.split("\n")
    starts = [number for number, line in enumerate(lines) if _STAGE.match(line)]
    values: dict[str, str] = {}
    filled, size = [], 0
    for start, end in pairwise([0, *starts, len(lines)]):
        inside = ""
        for line in lines[start:end]:
            match = _SECTION.match(line)
            inside = match[1].lower() if match else inside
            name, equals, value = line.partition("=")
            if inside == "arguments" and equals and not match and not line.lstrip().startswith("#"):
                values[name.strip()] = value.strip()
        arguments, inside = _Arguments(values, around), ""
        for number, line in enumerate(lines[start:end], start + 1):
            match = _SECTION.match(line)
            inside = match[1].lower() if match else inside
            source_location = SourceLocation(file=file, line=number, column=1)
            filled.append(line if inside == "arguments" else arguments.fill(line, source_location))
            size += len(filled[-1]) + 1
            if size > LIMITS.size:
                raise too_large(file, LIMITS)
    return "\n".join(filled)


class _Arguments:
    """The values of one stage's build arguments: the user's, or else `defaults`."""

    def __init__(self, defaults: Mapping[str, str], around: ContainerFileReaders) -> None:
        self._defaults, self._around = defaults, around
        self._known: dict[str, str] = {}

    def fill(self, text: str, location: SourceLocation, *, inside: tuple[str, ...] = ()) -> str:
        """Return the text with values. `inside` are the arguments whose values contain the text."""
        comment = None if inside else _COMMENT.search(text)
        parts, end, size = [], 0, 0
        for match in _ARGUMENT.finditer(text, 0, comment.start() if comment else len(text)):
            source_location = location if inside else replace(location, column=match.start() + 1)
            parts += [text[end : match.start()], self._value(match[1], source_location, inside)]
            end = match.end()
            size += len(parts[-2]) + len(parts[-1])
            if size > MOST_CHARACTERS:
                message = (
                    f"has more than {MOST_CHARACTERS} characters after its build arguments are filled in"
                )
                raise recipe_problem(
                    source_location, "variables-too-long", message, "give them shorter values"
                )
        return "".join(parts) + text[end:]

    def _value(self, name: str, location: SourceLocation, inside: tuple[str, ...]) -> str:
        if name in inside or len(inside) > _MOST_NESTED:
            raise recipe_problem(
                location,
                "build-argument-recursive",
                f"the build argument {show(name)} refers to itself",
                "write its value without it",
            )
        if name not in self._known:
            value = self._around.use_build_arg(name)
            value = self._defaults.get(name) if value is None else value
            if value is None:
                do = f"give its value, --build-arg {name[:80]}=VALUE, or set it under %arguments"
                raise recipe_problem(
                    location, "build-argument-missing", f"the build argument {show(name)} has no value", do
                )
            self._known[name] = self.fill(value, location, inside=(*inside, name))
        return self._known[name]


def _definition_stages(text: str, file: str) -> list[DefinitionStage]:
    stages: list[DefinitionStage] = []
    lines, line_index = text.split("\n"), 0
    while line_index < len(lines):
        line, location = lines[line_index], SourceLocation(file=file, line=line_index + 1, column=1)
        line_index += 1
        if match := _SECTION.match(line):
            start, name = line_index, match[1].lower()
            if name not in _SECTIONS and not name.startswith("app"):
                message = f"{show(f'%{match[1]}', limit=60)} is not a section of apptainer"
                raise recipe_problem(
                    location,
                    "line-invalid",
                    message,
                    "put other text before the %: apptainer stops here, in a script too",
                )
            while line_index < len(lines) and not (
                _SECTION.match(lines[line_index]) or _STAGE.match(lines[line_index])
            ):
                line_index += 1
            section = DefinitionSection(name, match[2].strip(), location, "\n".join(lines[start:line_index]))
            if not stages:
                raise recipe_problem(
                    location,
                    "text-before-base",
                    f"{show(match[0])} is before Bootstrap",
                    "begin with Bootstrap",
                )
            stages[-1].sections.append(section)
        elif match := re.match(r"\s*([A-Za-z]+)\s*:\s*(.*?)\s*(#.*)?$", line):
            key = match[1].lower()
            if key == "bootstrap":
                if len(stages) >= _MOST_SECTIONS:
                    raise recipe_problem(
                        location, "too-many-stages", f"has more than {_MOST_SECTIONS} stages", "split it"
                    )
                stages.append(DefinitionStage())
            elif not stages:
                raise recipe_problem(
                    location,
                    "text-before-base",
                    f"{show(match[1])} is before Bootstrap",
                    "begin with Bootstrap",
                )
            source_location = SourceLocation(file=file, line=line_index, column=match.start(2) + 1)
            # apptainer fills no $NAME here
            stages[-1].header[key] = RunWord(
                re.sub("[\"']", "", match[2]), source_location, "$" not in match[2]
            )
        elif line.strip() and not line.lstrip().startswith("#"):
            raise recipe_problem(
                location,
                "line-invalid",
                f"{show(line.strip())} is not a line of a header or section",
                "fix the line",
            )
    return stages


def _take(container: ContainerFile, stages: list[DefinitionStage], line_number: int) -> None:
    stage, spec = stages[line_number], container.spec
    agent, source = stage.header["bootstrap"], stage.header.get("from")
    if agent.text.lower() in _IMAGES and source:
        container.base(source)
    else:
        bootstrap_text = f"Bootstrap {show(agent.text)} {show(source.text) if source else ''}".strip()
        container.leave(agent.where, f"{bootstrap_text} is not taken", "the recipe has its own base")
    visited = {line_number}
    for section in sorted(stage.sections, key=lambda row: row.name != "files"):  # there before %post
        match = re.fullmatch(r"from\s+(\S+)", section.argument) if section.name == "files" else None
        names = map(_named, stages[:line_number])
        other = next((n for n, name in enumerate(names) if match and name == match[1]), None)
        if other is not None and other not in visited:
            visited.add(other)
            _take_packages(container, stages[: other + 1], section)
        elif other is None:
            _section(container, section)
    if not container.packages_only:
        container.finish()
        for unread in (row for number, row in enumerate(stages) if number not in visited):
            bootstrap_text = f"the stage {show(_named(unread))} is not part of the last one, and is not read"
            spec.note(unread.header["bootstrap"].where, bootstrap_text)


def _named(stage: DefinitionStage) -> str:
    named = stage.header.get("stage")
    return named.text if named else ""


def _take_packages(
    container: ContainerFile, stages: list[DefinitionStage], section: DefinitionSection
) -> None:
    """Add the packages of a stage from which files are copied."""
    spec = container.spec
    before = (len(spec.pip), len(spec.conda))
    inner = ContainerFile(spec=spec, around=container.around, rooted=False, packages_only=True)
    _take(inner, stages, len(stages) - 1)
    name = show(_named(stages[-1]))
    if before != (len(spec.pip), len(spec.conda)):
        message = f"the packages of the stage {name} were taken, since files are copied from it"
        container.note(section.where, message)
    else:
        do = "make what it brings a package on an index"
        container.leave(section.where, f"the files of the stage {name} are not taken", do)


def _section(container: ContainerFile, section: DefinitionSection) -> None:
    spec = container.spec
    match section.name:
        case "post":
            read_install_script(container, section.text, section.place())
        case "environment":
            _environment(container, section)
        case "files":
            for line, location in section.lines():
                words = [word.text for word in split_shell_words(line, location, container.variables)]
                if words:
                    container.copy(words[:1], words[-1], location)
        case "labels" if not container.packages_only:
            for line, location in section.lines():
                name, _, value = line.strip().partition(" ")
                spec.label(name, value.strip().strip("\"'"), location)
        case "runscript" if not container.packages_only:
            text = "; ".join(line.strip() for line, _ in section.lines())
            add_entrypoint(spec, [*SHELL, text, section.name], section.where, f"%{section.name}")
        case "arguments":
            for line, location in section.lines():
                if "=" not in line:
                    container.note(
                        location, f"{show(line.strip())} is not NAME=VALUE, and sets no build argument"
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
