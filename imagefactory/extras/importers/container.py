"""The state while reading one container file: a Dockerfile or an Apptainer definition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from posixpath import basename, dirname, join, normpath

from packaging.requirements import InvalidRequirement, Requirement

from imagefactory.errors import Diagnostic, RecipeError, UsageError
from imagefactory.extras.importers.build_context import BuildContext, context_option
from imagefactory.extras.importers.framework_row import pypi_name
from imagefactory.extras.importers.image_parts import PATHS, add_copied_files, add_variable, add_workdir
from imagefactory.extras.importers.pip_lines import ReferencedFiles
from imagefactory.extras.importers.spec import EnvironmentSpec, add_channel
from imagefactory.model import SourceLocation
from imagefactory.recipes.edit import FRAMEWORKS
from imagefactory.recipes.shell_words import MOST_CHARACTERS, RunWord, split_shell_words
from imagefactory.recipes.values import parse_spec
from imagefactory.recipes.yaml_tree import YamlLimits, recipe_problem, show, too_large

# --- The Python, CUDA and framework of well-known images, by name. No registry is queried
# Sources are the images' own pages: their tags name versions by the patterns below.


_RELEASE = r"(?P<version>[0-9]+\.[0-9]+(\.[0-9]+)?)"
_CUDA = r"cuda-?(?P<cuda>[0-9]{2}\.[0-9])"
_PYTHON = r"(?P<python>3\.[0-9]{1,2})"
_NVIDIA = "it contains NVIDIA's build of the framework and other packages, which no index has"
# The Python that a distribution calls python3. Sources: packages.ubuntu.com, packages.debian.org.
_PYTHONS = {
    **{"18.04": "3.6", "20.04": "3.8", "22.04": "3.10", "24.04": "3.12", "bionic": "3.6", "focal": "3.8"},
    **{
        "jammy": "3.10",
        "noble": "3.12",
        "buster": "3.7",
        "bullseye": "3.9",
        "bookworm": "3.11",
        "trixie": "3.13",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBaseImage:
    """The known content of a base image.

    `framework` is its name on PyPI, `packages` are other packages in the image, `channels` are the channels
    of its conda. `lost` is content that a recipe cannot contain. `known` is False if the name of the image
    does not identify its content. `system_python` is the version of python3 in its distribution.
    """

    framework: str = ""
    version: str = ""
    cuda: str = ""
    python: str = ""
    channels: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    lost: str = ""
    known: bool = True
    system_python: str = ""

    def __str__(self) -> str:
        words = (
            f"{self.framework} {self.version}".strip(),
            f"CUDA {self.cuda}" if self.cuda else "",
            f"Python {self.python}" if self.python else "",
            "conda" if self.channels else "",
        )
        return ", ".join(filter(None, words))


@dataclass(frozen=True, slots=True, kw_only=True)
class _BaseImageRow:
    """A row that matches images by name and by `tag`, whose groups are named like fields of
    KnownBaseImage.
    """

    tag: str = "$"
    framework: str = ""
    channels: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    lost: str = ""


_PLAIN = _BaseImageRow()
_FORGE = ("conda-forge",)
_JUPYTER = "it contains JupyterLab and the packages of a notebook server"
# By repository, without the registry of docker and its "library".
_ROWS: Mapping[str, _BaseImageRow] = {
    "pytorch/pytorch": _BaseImageRow(
        tag=rf"^{_RELEASE}-{_CUDA}",
        framework="torch",
        packages=("torchvision", "torchaudio"),
    ),
    "anibali/pytorch": _BaseImageRow(tag=rf"^{_RELEASE}-{_CUDA}", framework="torch"),
    "tensorflow/tensorflow": _BaseImageRow(tag=rf"^{_RELEASE}", framework="tensorflow"),
    "huggingface/transformers-pytorch-gpu": _BaseImageRow(framework="torch", packages=("transformers",)),
    "nvcr.io/nvidia/pytorch": _BaseImageRow(framework="torch", lost=_NVIDIA),
    "nvcr.io/nvidia/tensorflow": _BaseImageRow(framework="tensorflow", lost=_NVIDIA),
    "nvcr.io/nvidia/jax": _BaseImageRow(framework="jax", lost=_NVIDIA),
    "ghcr.io/nvidia/jax": _BaseImageRow(framework="jax"),
    "nvidia/cuda": _BaseImageRow(tag=r"^(?P<cuda>[0-9]{2}\.[0-9])"),
    "python": _BaseImageRow(tag=rf"^{_PYTHON}"),
    "continuumio/miniconda3": _BaseImageRow(channels=("defaults",)),
    "continuumio/anaconda3": _BaseImageRow(
        channels=("defaults",),
        lost="it contains the packages of the Anaconda distribution",
    ),
    "condaforge/miniforge3": _BaseImageRow(channels=_FORGE),
    "condaforge/mambaforge": _BaseImageRow(channels=_FORGE),
    "mambaorg/micromamba": _BaseImageRow(channels=_FORGE),
    "rapidsai/base": _BaseImageRow(
        tag=rf"{_CUDA}-py{_PYTHON}", channels=("rapidsai", "conda-forge"), lost="it contains RAPIDS"
    ),
    "quay.io/jupyter/pytorch-notebook": _BaseImageRow(
        tag="^cuda(?P<cuda>[0-9]{2})", framework="torch", channels=_FORGE, lost=_JUPYTER
    ),
    "quay.io/jupyter/tensorflow-notebook": _BaseImageRow(
        framework="tensorflow", channels=_FORGE, lost=_JUPYTER
    ),
    "runpod/pytorch": _BaseImageRow(
        tag=rf"^{_RELEASE}-py{_PYTHON}-{_CUDA}", framework="torch", packages=("torchvision", "torchaudio")
    ),
    "ghcr.io/astral-sh/uv": _BaseImageRow(tag=rf"python{_PYTHON}"),
    **dict.fromkeys(("ubuntu", "debian", "buildpack-deps", "scratch"), _PLAIN),
}


def read_base_image(name: str) -> KnownBaseImage:
    """Return the known content of a base image, by its name."""
    plain = re.sub(r"^[a-z-]+://|@sha256:[0-9a-f]*$", "", name)
    plain = re.sub(r"^(index\.|registry-1\.)?docker\.io/|^public\.ecr\.aws/docker/(?=library/)", "", plain)
    repository, tag = re.fullmatch(r"(.*?)(?::([^:/]*))?", plain, re.DOTALL).groups("")  # type: ignore[union-attr]
    repository = repository.removeprefix("library/")
    if repository == "nvcr.io/nvidia/cuda":
        repository = "nvidia/cuda"
    row = _ROWS.get(repository)
    if row is None:
        matches = {
            key: re.search(pattern, tag)
            for key, pattern in (("cuda", _CUDA), ("python", f"py(thon)?-?{_PYTHON}"))
        }
        cuda, python = (match[key] if (match := matches[key]) else "" for key in ("cuda", "python"))
        return KnownBaseImage(
            cuda=cuda, python=python, known=False, system_python=_system_python(repository, tag)
        )
    tag_match = re.search(row.tag, tag)
    values = {key: value or "" for key, value in (tag_match.groupdict() if tag_match else {}).items()}
    return KnownBaseImage(
        framework=row.framework,
        version=values.get("version", ""),
        cuda=values.get("cuda", ""),
        python=values.get("python", ""),
        channels=row.channels,
        packages=row.packages,
        lost=row.lost,
        system_python=_system_python(repository, tag),
    )


def _system_python(repository: str, tag: str) -> str:
    release = "^([0-9]{2}\\.[0-9]{2})" if repository == "ubuntu" else "ubuntu-?([0-9]{2}\\.[0-9]{2})"
    match = re.search(release, tag) or re.search(rf"(?:^|-)({'|'.join(_PYTHONS)})(?:-|$)", tag)
    return _PYTHONS.get(match[1], "") if match else ""


LIMITS = YamlLimits(size=256 * 1024)
_MAX_LOOKUPS = 400
"""The limit of lookups of other files, for all names in commands."""
_MOST_COPIES = 200
"""The limit of COPY sources whose files are read, since each may be a large tree."""
_OWN_BASE = "the recipe has its own base"


def check_text(text: str, file: str) -> None:
    """Raise RecipeError if a container file is too large or has control characters."""
    if len(text) > LIMITS.size:
        raise too_large(file, LIMITS)
    if match := re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text):
        before = text[: match.start()]
        column = match.start() - before.rfind("\n")
        location = SourceLocation(file=file, line=before.count("\n") + 1, column=column)
        raise recipe_problem(
            location, "hidden-character", f"contains the invisible character {match[0]!a}", "remove it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DependencySelection:
    """The parts of a project that a command selects: extras, groups, a pixi environment.

    `python` are the bounds on the Python in which it is installed, empty if unknown.
    """

    python: str = ""
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    environment: str = ""


@dataclass(frozen=True, slots=True)
class ContextRequirement:
    """A file that a line needs from the build context: one of `names`. `source` is the one that exists."""

    where: SourceLocation
    names: tuple[str, ...]
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerFileReaders:
    """The readers of other files: `inside` (by bounds on Python) for pip files, `parse` for all others.

    `context` is None if only the text is read. `requirements` collects the files that were looked up in it,
    `parsed` the files that were read completely. `build_args` are the user's values, `used` the names that
    the file contains.
    """

    inside: Callable[[str], ReferencedFiles]
    parse: Callable[[str, str, DependencySelection], EnvironmentSpec]
    context: BuildContext | None = None
    requirements: list[ContextRequirement] = field(default_factory=list)
    parsed: set[tuple[str, DependencySelection]] = field(default_factory=set)
    build_args: Mapping[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def use_build_arg(self, name: str) -> str | None:
        """Return the user's value of a build argument, None if there is none."""
        self.used.update({name}.intersection(self.build_args))
        return self.build_args.get(name)

    def reject_unused(self, file: str) -> None:
        """Raise UsageError if the user sets a build argument that the file does not have."""
        if names := sorted(set(self.build_args) - self.used):
            has = "no build argument " + ", ".join(show(name) for name in names)
            raise UsageError(
                "build-argument-unknown",
                f"{file} has {has}",
                hint="remove it, or correct its name: --build-arg NAME=VALUE",
            )


@dataclass(frozen=True, slots=True)
class CopyInstruction:
    """A COPY of one source. `losses` are the lines about its lost content."""

    source: str
    to: str
    losses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GitClone:
    """A git repository that a command clones to `place`. `losses` are the lines about its loss."""

    place: str
    address: str
    revision: str = ""
    losses: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class ContainerFile:
    """One image, as far as its file was read.

    `variables` are the variables that words may contain, `own` those of them that stay in the image.
    `packages_only` is True for a stage from which only files are copied. `rooted` is True if a source that
    starts with / is in the context, as in Docker. `users` are the numbers of the users that the file creates,
    starting at `first_user`. `system_python` is where it installs the Python of the distribution. `clones`
    are repositories by directory, `folders` empty directories, `removed` packages that pip uninstalled.
    """

    spec: EnvironmentSpec
    around: ContainerFileReaders
    variables: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    own: set[str] = field(default_factory=set)
    copies: list[CopyInstruction] = field(default_factory=list)
    users: dict[str, str] = field(default_factory=dict)
    clones: dict[str, GitClone] = field(default_factory=dict)
    folders: list[RunWord] = field(default_factory=list)
    packages_only: bool = False
    rooted: bool = True
    below: KnownBaseImage | None = None
    below_where: SourceLocation | None = None
    system_python: SourceLocation | None = None
    first_user: int = 1000
    removed: set[str] = field(default_factory=set)
    looks: int = 0

    def leave(self, location: SourceLocation, message: str, do: str) -> None:
        if not self.packages_only:
            self.spec.leave(location, message, do)

    def note(self, location: SourceLocation, message: str) -> None:
        if not self.packages_only:
            self.spec.note(location, message)

    @property
    def beside(self) -> ReferencedFiles:
        return self.around.inside(self.spec.python)

    # --- base image

    def base(self, name: RunWord) -> None:
        """Read the base image by its name."""
        if self.packages_only:
            return
        if not name.known:
            do = "write the image out, or give the ARG a default (--build-arg); a definition has {{ NAME }}"
            self.leave(name.where, f"the base image {show(name.text)} is not known", do)
            return
        below = self.below = read_base_image(name.text)
        self.below_where = name.where
        if re.search(r"(ubuntu-?|^ubuntu:)24\.04|noble", name.text):  # which has the user `ubuntu`
            self.first_user = 1001
        self.spec.bound_python(below.python, name.where)
        base_text = f"the base image {show(name.text, limit=100)}"
        if not below.known:
            do = f"add what must be there; {_OWN_BASE}"
            self.leave(name.where, f"{base_text}: its content is unknown", do)
            return
        read = f"{base_text} was read as {below}" if str(below) else base_text
        self.note(name.where, f"{read}: {_OWN_BASE}")
        if below.lost:
            self.leave(name.where, f"{base_text}: {below.lost}", "add what you need of it to the file")

    def finish(self) -> None:
        """Add the packages of the base image that the file does not replace."""
        below, spec = self.below, self.spec
        if below is None or self.below_where is None or self.packages_only:
            return
        for channel in below.channels if spec.conda or spec.channels else ():
            add_channel(spec, channel, self.below_where)
        if self.system_python and below.system_python and not (spec.python or spec.conda):
            spec.bound_python(below.system_python, self.system_python)
            spec.note(
                self.system_python, f"Python {below.system_python}, as the base image's distribution has it"
            )
        by_conda = {FRAMEWORKS.get(parse_spec(text).name) for text in spec.conda}
        framework_packages = [text for text in spec.pip if pypi_name(text) == below.framework]
        pinned = [text for text in framework_packages if "==" in text or not _allows(text, below.version)]
        named = {pypi_name(text) for text in spec.pip} | self.removed
        pinned += [name for name in self.removed if name == below.framework]
        if below.framework and below.framework not in by_conda and not pinned:
            brought = [f"{below.framework}=={below.version}" if below.version else below.framework]
            brought += [name for name in below.packages if pypi_name(name) not in named]
            spec.pip[:0] = brought
            spec.hints += [f"cuda{below.cuda}"] if "." in below.cuda else []
            if len(brought) > 1:
                spec.note(
                    self.below_where, f"the base image brings {', '.join(brought)}: they are taken over"
                )
        spec.below = below.cuda if "." in below.cuda else ""

        for directory in self.folders:
            if directory.known and any(
                f"{resolved_path}/".startswith(f"{directory.text}/") for resolved_path in self._directories()
            ):
                continue
            if not re.match(r"/(tmp|var|run|root)(/|$)", directory.text) and "/.cache" not in directory.text:
                do = "a recipe makes no empty directory: put a file into it, under files"
                spec.leave(directory.where, f"the directory {show(directory.text)}", do)

    def _directories(self) -> list[str]:
        """Return the directories that exist in the image without mkdir."""
        parts = self.spec.parts
        directories = [parts.workdir, *("/" + directory.strip("/") for directory, _ in parts.files)]
        return [*directories, *(normpath(copied.to) for copied in self.copies), *self.clones]

    # --- variables

    def set(self, name: str, value: RunWord) -> None:
        """Set an environment variable of the image."""
        self.own.add(name)
        self.remember(name, value)
        if self.packages_only:
            return
        if name in PATHS and not value.known:  # with what stands before and behind the base image's own
            words = split_shell_words(value.text, value.where, {**self.variables, name: ""})
            whole = RunWord(
                "".join(word.text for word in words), value.where, all(word.known for word in words)
            )
            value = whole if whole.known else value
        add_variable(self.spec, name, value)

    def remember(self, name: str, value: RunWord) -> None:
        """Set a variable for the next words."""
        if value.known and len(value.text) < MOST_CHARACTERS:
            self.variables[name] = value.text
        else:
            self.variables.pop(name, None)

    def go(self, directory: RunWord) -> None:
        self.workdir = normpath(join(self.workdir, directory.text))
        if not self.packages_only:
            add_workdir(self.spec, self.workdir, directory.where)

    # --- copies

    def copy(self, sources: Sequence[str], to: str, location: SourceLocation, *, quiet: bool = False) -> None:
        """Copy files of the build context. With `quiet`, they exist only during one command."""
        resolved_path = normpath(join(self.workdir, to))
        into = to.endswith("/") or len(sources) > 1 or resolved_path in (normpath(self.workdir), "/")
        for written in sources:
            before = len(self.spec.lost)
            if not (self.packages_only or quiet):
                self._keep(written, resolved_path, location, into=into)
            lost = tuple(self.spec.lost[before:])
            self.copies.append(
                CopyInstruction(
                    written, f"{resolved_path}/" if into and resolved_path != "/" else resolved_path, lost
                )
            )

    def _keep(self, written: str, resolved_path: str, location: SourceLocation, *, into: bool) -> None:
        instruction, context = (
            f"COPY {show(written, limit=100)[1:-1]} to {show(resolved_path)}",
            self.around.context,
        )
        source = self.source(written)
        if re.search(r"://|^git@", written):
            do = "fetch it, and put it into the project's own files"
            self.spec.leave(location, f"{instruction} comes from an address", do)
            return
        if source is None:
            self.spec.leave(
                location, f"{instruction} is outside of the build context", "put it into the project"
            )
            return
        if context is None:
            add_copied_files(self.spec, None, source, resolved_path, location)
            return
        if len(self.spec.parts.files) + len(self.around.requirements) > _MOST_COPIES:
            do = "write the rest under files: of the recipe"
            self.spec.leave(location, f"{instruction} is one of more copies than are read", do)
            return
        there = [name for name in context.expand(source) if context.kind(name) in ("file", "folder")]
        there = [name for name in there if not self._is_excluded(name, instruction, location)]
        self.around.requirements.append(
            ContextRequirement(location, (source,), source=source if there else "")
        )
        if not there and not context.rules.excludes(source):
            do = "bring it, name another directory by --context, or remove the line"
            root = show(str(context.root), limit=200)
            self.spec.leave(location, f"{instruction} is not in the build context {root}", do)
        globbed = bool(re.search(r"[*?\[]", source))
        for name in there:
            directory = context.kind(name) == "folder"
            inside = (into or globbed) if not directory else (into and not self.rooted)
            add_copied_files(
                self.spec,
                context,
                name,
                join(resolved_path, basename(name)) if inside else resolved_path,
                location,
            )

    def _is_excluded(self, name: str, subject: str, location: SourceLocation) -> bool:
        """Return whether .dockerignore excludes a file or all of a directory. Record the loss."""
        context = self.around.context
        rule = context.rules.excludes(name) if context else ""
        if context is None or not rule:
            return False
        if context.kind(name) == "folder" and any(other.keeps for other in context.rules.rules):
            return False
        self.spec.leave(location, f"{subject}: {rule} excludes it", "remove that rule, or the line")
        return True

    def source(self, written: str) -> str | None:
        """Return a source as a path of the build context, None if it is outside."""
        if written.startswith("/") and not self.rooted:
            return None
        resolved_path = normpath(written.lstrip("/") or ".")
        return None if resolved_path == ".." or resolved_path.startswith("../") else resolved_path

    def find(self, path: str, location: SourceLocation, *, optional: bool = False) -> str:
        """Return the file of the context that is copied to a path in the image; empty if unreadable."""
        resolved_path = normpath(join(self.workdir, path))
        names: list[str] = []
        for copied in reversed(self.copies):
            for name in self._origins(copied, resolved_path):
                self.looks += 1
                if self.looks > _MAX_LOOKUPS:
                    return ""
                names.append(name)
                if self.beside.read(name) is not None:
                    self._was_read(copied, name, location)
                    return name
        context = self.around.context
        if context and not optional and names and not any(map(context.rules.excludes, names)):
            self.around.requirements.append(ContextRequirement(location, tuple(dict.fromkeys(names))))
        return ""

    def origin(self, path: str) -> str:
        """Return the path in the context that is copied to a path in the image, empty if there is none."""
        resolved_path, context = normpath(join(self.workdir, path)), self.around.context
        for copied in reversed(self.copies):
            for name in self._origins(copied, resolved_path):
                if context is not None and context.kind(name) and not context.rules.excludes(name):
                    return name
        return ""

    def clone_of(self, resolved_path: str) -> GitClone | None:
        """Return the repository that was cloned to a directory or to a parent of it."""
        places = [path for path in self.clones if f"{resolved_path}/".startswith(f"{path}/")]
        return self.clones[max(places, key=len)] if places else None

    def missing_reason(self, path: str) -> str:
        """Return why `find` returns no file for a path."""
        resolved_path, context = normpath(join(self.workdir, path)), self.around.context
        names = [name for copy in reversed(self.copies) for name in self._origins(copy, resolved_path)][
            :_MAX_LOOKUPS
        ]
        rules = [rule for name in names if context and (rule := context.rules.excludes(name))]
        if rules:
            return f"is excluded from the build context by {rules[0]}"
        if context is None or not names:
            return "is none of the files that are copied"
        return f"would be {show(names[0])}, which is not in the build context"

    def _was_read(self, copied: CopyInstruction, name: str, location: SourceLocation) -> None:
        """Remove the losses of a file that was copied and read, since the recipe has its content."""
        context = self.around.context
        if self.source(copied.source) == name or (
            basename(copied.source) != copied.source and fnmatchcase(name, copied.source)
        ):
            self.spec.lost = [line for line in self.spec.lost if line not in copied.losses]
        if context is not None:
            self.around.requirements.append(ContextRequirement(location, (name,), source=name))
            note_other_file(self.spec, context, name, location)

    def _origins(self, copied: CopyInstruction, resolved_path: str) -> Iterator[str]:
        """Yield the paths in the context from which a path in the image may be copied."""
        directory = normpath(copied.to)
        source = self.source(copied.source)
        if source is None or re.search(r"://|^<<|^git@", copied.source):
            return
        if not copied.to.endswith("/") and resolved_path == directory:
            yield source
        if dirname(resolved_path) == directory and fnmatchcase(basename(resolved_path), basename(source)):
            yield normpath(join(dirname(source), basename(resolved_path)))
        if resolved_path.startswith(f"{directory.rstrip('/')}/"):
            rest = resolved_path[len(directory.rstrip("/")) + 1 :]
            yield normpath(join(source, rest))
            if not self.rooted and rest.startswith(f"{basename(source)}/"):
                yield normpath(join(dirname(source), rest))


def _allows(requirement: str, version: str) -> bool:
    """Return whether a requirement allows a version, which may be empty."""
    try:
        return not version or Requirement(requirement).specifier.contains(version)
    except InvalidRequirement:
        return True


def note_other_file(
    spec: EnvironmentSpec, context: BuildContext, name: str, location: SourceLocation
) -> None:
    """Note a file with the same name and other content in another possible build context."""
    places = dict.fromkeys(
        [context.own / basename(name), *(directory / name for directory in context.others())]
    )
    for resolved_path in places:
        text = BuildContext(root=resolved_path.parent, own=resolved_path.parent).read(resolved_path.name)
        if resolved_path != context.root / name and text is not None and text != context.read(name):
            message = f"{show(name)} was read from the build context {show(str(context.root), limit=200)}"
            spec.note(location, f"{message}; {show(str(resolved_path), limit=200)} is another file")


def check_context(around: ContainerFileReaders) -> None:
    """Raise RecipeError if another directory contains more of the copied files than this context."""
    context = around.context
    missing = [requirement for requirement in around.requirements if not requirement.source]
    if context is None or not missing:
        return
    available = [(requirement.source,) for requirement in around.requirements if requirement.source]
    for directory in context.others():
        gained = [requirement for requirement in missing if context.holds_all(directory, [requirement.names])]
        if gained and context.holds_all(directory, available):
            option = context_option(directory)
            raise RecipeError(
                [
                    Diagnostic(
                        "file-not-in-context",
                        str(requirement.where),
                        f"{show(requirement.names[0])} is not in the build context {context.root}",
                        option,
                    )
                    for requirement in gained
                ],
                hint=f"pass {option}, which has these files",
            )
