"""Read the other parts of an image from container files into `EnvironmentSpec.parts`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from posixpath import basename, dirname, join

from imagefactory.extras.importers.build_context import BuildContext
from imagefactory.extras.importers.pip_lines import ReferencedFiles, add_pip_line
from imagefactory.extras.importers.spec import EnvironmentSpec
from imagefactory.model import SourceLocation
from imagefactory.recipes.shell_words import RunWord
from imagefactory.recipes.values import RULES
from imagefactory.recipes.yaml_tree import show
from imagefactory.versions import natural

# --- COPY from the build context -> `files:` of a recipe, with paths relative to the project's root


_MOST_ENTRIES = 20_000
_MOST_DEPTH = 40
_MOST_PATTERNS = 200
# Hidden files that may contain secrets, which an image would show to anyone who has it.
_SECRETS = re.compile(
    r"\.(env|netrc|aws|ssh|pypirc|npmrc|docker|kube|gnupg|config|huggingface|wandb|credentials)\b|\.git-cred|.*_history$"
)
# Hidden files that no running program reads.
_TOOLS = {
    *(".git", ".gitignore", ".gitattributes", ".gitmodules", ".github", ".gitlab-ci.yml", ".dockerignore"),
    *(".pre-commit-config.yaml", ".venv", ".vscode", ".idea", ".mypy_cache", ".ruff_cache", ".pytest_cache"),
    *(
        ".editorconfig",
        ".flake8",
        ".DS_Store",
        ".ipynb_checkpoints",
        ".circleci",
        ".style.yapf",
        ".coveragerc",
    ),
    *(".readthedocs.yaml", ".readthedocs.yml", ".python-version", ".clang-format", ".isort.cfg", ".cache"),
}


@dataclass(slots=True)
class ContextFiles:
    """The files of one COPY: `entries` are directories in the image and patterns, `hidden` files were
    skipped.

    `lost` are the reasons why a part of the source is in no entry.
    """

    entries: list[tuple[str, str]] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def find_own_files(context: BuildContext, source: str, to: str) -> ContextFiles:
    """Return the entries for one source: a file becomes `to`, a directory's content goes into `to`."""
    files = ContextFiles()
    project_path = context.project_path(source)
    if project_path is None:
        files.lost.append("it is not in the imagefactory project")
    elif link := context.link_fault(source):
        files.lost.append(link)
    elif context.kind(source) == "file":
        _add(files, project_path, basename(to), dirname(to))
    else:
        walk = _ContextWalk(context, files)
        whole, parts = walk.cover(source, 0)
        base = "" if project_path == "." else project_path
        if walk.looks > _MOST_ENTRIES or len(parts) + len(walk.named) > _MOST_PATTERNS:
            files.lost.append("it has too many files to list: exclude some of them in .dockerignore")
            return files
        if whole and base and parts:
            plain = to.endswith(f"/{base}")
            directory = to.removesuffix(f"/{base}") or "/"
            _keep_pattern(files, directory, base) if plain else _keep_pattern(files, to, f"{base}/./*")
            parts = []
        for part in (*parts, *walk.named):
            name = part if source == "." else part[len(source) + 1 :]
            _add(files, join(base, name), name, to)
    return files


def _add(files: ContextFiles, path: str, name: str, directory: str) -> None:
    """Add a file or directory at `path` in the project; in the image it is `name` in a directory."""
    if path == name:
        _keep_pattern(files, directory, path)
    elif not path.endswith(f"/{name}"):
        files.lost.append(f"it gets another name there: {show(name)}")
    elif join(directory, name).endswith(f"/{path}"):
        _keep_pattern(files, join(directory, name)[: -len(path) - 1] or "/", path)
    else:
        _keep_pattern(files, directory, f"{path[: -len(name) - 1]}/./{name}")


def _keep_pattern(files: ContextFiles, directory: str, pattern: str) -> None:
    plain = pattern.removesuffix("/./*")
    if not RULES["folder"].allows(directory):
        files.lost.append(f"`files` of a recipe cannot be in {show(directory)}")
    elif not RULES["pattern"].allows(pattern) or any(char in plain for char in "*?["):
        files.lost.append(f"a recipe cannot name {show(pattern)}")
    elif (directory, pattern) not in files.entries:
        files.entries.append((directory, pattern))


class _ContextWalk:
    """A search for the fewest patterns that match the files in a directory of the context."""

    def __init__(self, context: BuildContext, files: ContextFiles) -> None:
        self.context, self.files = context, files
        self.looks = 0
        self.named: list[str] = []  # hidden files, which a pattern has to name
        self.keeps = any(rule.keeps for rule in context.rules.rules)

    def cover(self, directory: str, depth: int) -> tuple[bool, list[str]]:
        """Return whether a directory is copied completely, and the paths that match its content."""
        whole, parts = True, []
        for name in self.context.names(directory):
            path = name if directory == "." else f"{directory}/{name}"
            self.looks += 1
            if self.looks > _MOST_ENTRIES:
                return False, []
            if name == "__pycache__":
                continue
            kind, excluded = self.context.kind(path), bool(self.context.rules.excludes(path))
            link = "" if excluded else self.context.link_fault(path)
            if name.startswith("."):  # `files` leaves it out
                if name in _TOOLS or excluded:
                    continue
                if _SECRETS.match(name) or kind not in ("file", "folder") or self.context.link_fault(path):
                    self.files.hidden.append(path)
                else:
                    self.named.append(path)
            elif self.context.project_path(path) in self.context.reserved:
                whole = False
            elif link:
                whole = False
                self.files.lost.append(link)
            elif kind == "folder" and (not excluded or self.keeps) and depth < _MOST_DEPTH:
                inner_whole, inner = self.cover(path, depth + 1)
                whole &= inner_whole and not excluded
                parts += [path] if inner_whole and inner and not excluded else inner
            elif excluded:
                whole = False
            elif kind == "file":
                parts.append(path)
            else:  # a device, or too deep
                whole = False
                self.files.lost.append(f"{show(path)} is not a file that can be taken")
        return whole, parts


SHELL = ("/bin/sh", "-c")
_LONG = 400
_PYTHON = re.compile(
    r"(lib)?python3?(\.[0-9]+)?(-(dev|venv|pip|distutils|setuptools|wheel|minimal|full|virtualenv))?"
    r"|python-is-python3|python3?-(pip|dev|venv)(-whl)?"
)
# Packages of NVIDIA's archive: libraries in wheels, and packages neither there nor in Debian.
_OF_CUDA = re.compile(r"lib(cudnn|nccl|cublas|cufft|curand|cusparse|cusolver|cusparselt)[0-9a-z-]*")
_NVIDIA = re.compile(
    r"cuda-|libnvinfer|nsight|nvidia-(cuda|container|driver|utils)|libnvidia|tensorrt|libcuda"
)
# Lists of directories, and variables that describe the base image.
PATHS = (
    *("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"),
    *("PYTHONPATH", "PKG_CONFIG_PATH", "MANPATH", "INFOPATH", "CMAKE_PREFIX_PATH"),
)
_DESCRIBES = re.compile(
    r"CUDA_(HOME|PATH|ROOT|DIR|BIN_PATH|TOOLKIT_ROOT|TOOLKIT_ROOT_DIR|VERSION|PKG_VERSION)|CUDACXX"
    r"|(CUDNN|NCCL|PYTHON|PYTHON_PIP|CONDA|NVARCH|NV)(_[A-Z0-9_]+)?_?VERSION|NVARCH|CUDNN_(PATH|HOME|DIR|INSTALL_PATH)"
    r"|VIRTUAL_ENV|CONDA_(DIR|PREFIX|DEFAULT_ENV|HOME|ROOT)|MAMBA_(ROOT_PREFIX|DOCKERFILE_ACTIVATE)|MINICONDA_[A-Z]+"
    r"|NVIDIA_[A-Z_]+|PYTHON_ROOT|VENV(_PATH|_DIR)?"
)
_INDEXES = {
    **dict.fromkeys(("PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX"), "--index-url"),
    **dict.fromkeys(("PIP_EXTRA_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_INDEX"), "--extra-index-url"),
    **dict.fromkeys(("PIP_FIND_LINKS", "UV_FIND_LINKS"), "--find-links"),
}
# PyTorch's names in TORCH_CUDA_ARCH_LIST. Source: torch/utils/cpp_extension.py.
_ARCHITECTURES = {
    **{"Kepler+Tesla": ("3.7",), "Kepler": ("3.5",), "Maxwell+Tegra": ("5.3",), "Maxwell": ("5.0", "5.2")},
    **{"Pascal": ("6.0", "6.1"), "Volta+Tegra": ("7.2",), "Volta": ("7.0",), "Turing": ("7.5",)},
    **{"Ampere+Tegra": ("8.7",), "Ampere": ("8.0", "8.6"), "Ada": ("8.9",), "Hopper": ("9.0",)},
}
_BUILDS = re.compile(r"(PIP|UV|POETRY|PDM|PIXI|PIPENV|CONDA|MAMBA|DEBIAN|APT)_")
_OTHER_LAYOUT = r"(^|[:=, ])(/usr/local/(cuda|nvidia)|/opt/(conda|mamba|miniconda|miniforge)|/root/mini)[^:]*"
# Of a list: the system's own directories, and those of toolkits, environments and installers.
_LAYOUT = re.compile(
    rf"{_OTHER_LAYOUT}|^/(usr/(local/)?)?(s?bin|lib(32|64)?|include)(/(x86_64-linux-gnu|stubs|pkgconfig|python3[^/]*))*/?$"
    r"|/\.?(virtual|v)env(/|$)|/envs?/[^/]+/|/\.(local|cargo|pixi|poetry|uv)(/|$)|/(site|dist)-packages"
    r"|^(/opt|/root|/home/[^/]+|/usr/local)?/\.?(poetry|uv|(mini|ana|micro)?(conda|mamba|forge)[a-z]*[0-9]*)(/|$)"
    r"|^/opt/(env|hpcx|nvidia|amazon|ucx|tensorrt)(/|$)"
)


def add_debian_packages(spec: EnvironmentSpec, names: Sequence[str], location: SourceLocation) -> None:
    """Add Debian packages.

    The lock sets their versions. Python packages are skipped, since the environment has Python.
    """
    rule = RULES["debian package"]
    pinned, other, python, libraries = [], [], [], []
    for written in names:
        name, mark, rest = re.fullmatch(r"([^=/:]*)([=/:]?)(.*)", written, re.DOTALL).groups()  # type: ignore[union-attr]
        if mark == ":" and rest.partition("=")[0] in ("amd64", "any", "native"):
            mark, rest = rest.partition("=")[1], rest.partition("=")[2]
        if _PYTHON.fullmatch(name):
            python.append(written)
        elif _OF_CUDA.fullmatch(name):
            libraries.append(written)
        elif _NVIDIA.match(name) or not rule.allows(name) or mark == ":":
            other.append(written)
        else:
            pinned += [written] if mark and rest else []
            spec.parts.debian.setdefault(name, location)
    if pinned:
        do = "write the package under 'system': its version is that of the base's release, and is locked"
        spec.leave(location, f"the version of {_named(pinned)}", do)
    if python:
        spec.note(location, f"{_named(python)}: Python is the environment's own")
    if libraries:
        spec.note(location, f"{_named(libraries)}: the framework's packages bring these libraries")
    if other:
        do = "the base's release has no package of that name: write Debian's under 'system'"
        spec.leave(location, f"apt-get install {_named(other)}", do)


def drop_debian(spec: EnvironmentSpec, names: Sequence[str]) -> list[str]:
    """Remove packages again. Return the names that were not installed."""
    gone = [name for name in names if spec.parts.debian.pop(name, None)]
    return [name for name in names if name not in gone]


def lose_debian(spec: EnvironmentSpec, names: Sequence[str], suite: str) -> None:
    """Record as losses the packages that do not exist in Debian's `suite`."""
    for name in names:
        do = f"write the name that Debian {suite} has for it under 'system', or remove it"
        spec.leave(spec.parts.debian.pop(name), f"apt-get install {name}", do)


def _named(names: Sequence[str]) -> str:
    return show(" ".join(names), limit=_LONG)[1:-1]


# --- variables -----------------------------------------------------------------------------------


def add_variable(spec: EnvironmentSpec, name: str, value: RunWord) -> None:
    """Add a variable of the image, unless it only describes the base image, which is replaced."""
    text, location = value.text, value.where
    assignment = f"{name}={show(text, limit=100)}"
    if name in PATHS:
        _add_search_path(spec, name, value)
    elif name == "TORCH_CUDA_ARCH_LIST" and value.known:
        _add_driver_capabilities(spec, text, location)
    elif name in _INDEXES and value.known:
        for address in text.split():
            add_pip_line(spec, f"{_INDEXES[name]} {address}", location, ReferencedFiles(""))
    elif name == "UV_TORCH_BACKEND" and value.known:
        spec.hints.append(f"/{text}")
    elif name == "UV_PYTHON" and value.known and re.fullmatch(r"3\.[0-9]{1,2}", text):
        spec.bound_python(text, location)
    elif name == "NVIDIA_DRIVER_CAPABILITIES" and set(text.split(",")) - {"compute", "utility"}:
        do = "give it where the image runs: images have compute,utility"
        spec.leave(location, f"{assignment} is set by imagefactory", do)
    elif name == "NVIDIA_VISIBLE_DEVICES" and text != "all":
        spec.leave(location, f"{assignment} is set by imagefactory", "give it where the image runs")
    elif name == "HOME" or name.lower() in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        spec.note(
            location, f"{assignment} is not taken: it belongs to the machine where an image is built or runs"
        )
    elif _DESCRIBES.fullmatch(name) or (name == "LANG" and re.fullmatch(r"C\.UTF-?8", text, re.IGNORECASE)):
        spec.note(location, f"{assignment} describes the base image, which is replaced")
    elif not value.known:
        message = f"{show(name)} contains a variable of the base image or a shell: {show(text)}"
        spec.leave(location, message, "set it where the image runs")
    elif re.search(_OTHER_LAYOUT, text):
        message = f"{assignment} names a directory of the base image, which is replaced"
        spec.leave(location, message, "write it under environment, with a path that the image has")
    elif _BUILDS.match(name) and not (RULES["variable"].allows(name) and RULES["value"].allows(text)):
        spec.note(location, f"{assignment} is only for the build of the image")
    else:
        spec.variable(name, text, location)


def _add_search_path(spec: EnvironmentSpec, name: str, value: RunWord) -> None:
    """Add the user's directories in a search path. Directories of the base image are skipped."""
    added_paths = [
        part
        for part in value.text.split(":")
        if part and not re.fullmatch(rf"\$\{{?{name}(:?[-+][^}}]*)?\}}?", part) and not _LAYOUT.search(part)
    ]
    if not added_paths:
        message = f"{name}={show(value.text, limit=100)} describes the base image, which is replaced"
        spec.note(value.where, message)
    elif any("$" in part for part in added_paths):
        message = f"{show(name)} contains a variable of the base image or a shell: {show(value.text)}"
        spec.leave(value.where, message, "set it where the image runs")
    elif name == "PATH":
        do = "start programs by their absolute path: the image's PATH is the environment's and the system's"
        spec.leave(value.where, f"{show(':'.join(added_paths))} in PATH", do)
    else:
        spec.variable(name, ":".join(added_paths), value.where)
        if len(added_paths) < len([part for part in value.text.split(":") if part]):
            spec.note(
                value.where, f"{name}: only {show(':'.join(added_paths))} was taken, which are your own"
            )


def _add_driver_capabilities(spec: EnvironmentSpec, text: str, location: SourceLocation) -> None:
    words = [word for word in re.split(r"[ ;,]+", text) if word]
    words = [number for word in words for number in _ARCHITECTURES.get(word.removesuffix("+PTX"), (word,))]
    matches = [re.fullmatch(r"([0-9]{1,2}\.[0-9])[af]?(\+PTX)?", word) for word in words]
    variable_text = f"TORCH_CUDA_ARCH_LIST={show(text, limit=100)}"
    if all(matches):
        values = dict.fromkeys(match[1] for match in matches if match)
        spec.parts.capabilities = tuple(sorted(values, key=natural))
        capabilities = (
            f"capabilities: {', '.join(spec.parts.capabilities)}"
            if words
            else "the recipe's capabilities set it"
        )
        spec.note(location, f"{variable_text}: {capabilities}")
    else:
        spec.leave(location, variable_text, "write numbers, such as 8.0, under capabilities")


# --- files ---------------------------------------------------------------------------------------


def add_copied_files(
    spec: EnvironmentSpec, context: BuildContext | None, source: str, to: str, location: SourceLocation
) -> list[str]:
    """Add a file or directory that is copied to `to`. Return the lines of the losses.

    The caller drops these lines if the file is read.
    """
    instruction, before = f"COPY {show(source, limit=_LONG)[1:-1]} to {show(to)}", len(spec.lost)
    if context is None:
        spec.leave(
            location,
            instruction,
            "write files: {DIRECTORY: [PATH]}, each path relative to the root of the project",
        )
        return spec.lost[before:]
    own_files = find_own_files(context, source, to)
    spec.parts.files += [entry for entry in own_files.entries if entry not in spec.parts.files]
    if own_files.hidden:
        names = show(", ".join(own_files.hidden), limit=_LONG)[1:-1]
        spec.note(
            location,
            f"{instruction}: these may contain secrets, and are skipped unless `files` lists them: {names}",
        )
    for reason in own_files.lost:
        do = "write files: {DIRECTORY: [PATH]}, with paths that a recipe supports"
        if context.project_path(source) is None:
            do = f"run `imagefactory init {shlex.quote(str(context.root))}`, and this command there"
        spec.leave(location, f"{instruction}: {reason}", do)
    return spec.lost[before:]


# --- start --------------------------------------------------------------------------------------


def add_workdir(spec: EnvironmentSpec, directory: str, location: SourceLocation) -> None:
    spec.parts.workdir = directory if RULES["workdir"].allows(directory) else ""
    if not spec.parts.workdir and directory != "/":
        spec.leave(location, f"WORKDIR {show(directory)}", f"write workdir: with {RULES['workdir'].write}")


def add_user(spec: EnvironmentSpec, user: str, location: SourceLocation) -> None:
    spec.parts.user = user if RULES["user"].allows(user) else ""
    if not spec.parts.user and user != "root":
        spec.leave(location, f"USER {show(user)}", f"write user: with {RULES['user'].write}")


def add_entrypoint(
    spec: EnvironmentSpec, words: Sequence[str], location: SourceLocation, source: str = "ENTRYPOINT"
) -> str:
    spec.parts.entrypoint = _allowed(words)
    return _loss_line(spec, words, location, source)


def add_command(
    spec: EnvironmentSpec, words: Sequence[str], location: SourceLocation, source: str = "CMD"
) -> str:
    spec.parts.command = _allowed(words)
    return _loss_line(spec, words, location, source)


def _allowed(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(words) if all(RULES["argument"].allows(word) for word in words) else ()


def _loss_line(spec: EnvironmentSpec, words: Sequence[str], location: SourceLocation, source: str) -> str:
    """Return a line about a command that a recipe cannot contain, "" if it can."""
    if not words or _allowed(words):
        return ""
    command = show(words[2] if tuple(words[:2]) == SHELL else " ".join(words), limit=_LONG)
    spec.leave(location, f"{source} {command}", "put it into a script among the files, and write that")
    return spec.lost[-1]
