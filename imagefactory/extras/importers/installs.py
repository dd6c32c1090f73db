"""Read the packages that commands install. No command is run.

Commands that clean up, query or set up an environment are skipped, since imagefactory does this for every
image. Any other command is reported as lost.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from posixpath import basename, dirname, join, normpath

from imagefactory.extras.importers.container import ContainerFile, DependencySelection, GitClone
from imagefactory.extras.importers.framework_row import pypi_name
from imagefactory.extras.importers.image_parts import add_debian_packages, drop_debian
from imagefactory.extras.importers.pip_lines import MOST_FILES, add_pip_line
from imagefactory.extras.importers.spec import add_channel, add_match_spec
from imagefactory.model import SourceLocation
from imagefactory.recipes.shell_words import RunCommand, RunWord, read_commands
from imagefactory.recipes.values import canonical
from imagefactory.recipes.yaml_tree import show

_MOST_DEPTH = 4
_NOT_RUN = "do it where the image runs, or make what it brings a package on an index"
_BUILDS = re.compile(
    r"\b(setup\.py|make|ninja|bazel|(pip|uv|poetry|conda|comfy|npm)\b.* install)\b|--install\b"
)
_SHELLS = ("sh", "bash", "dash", "zsh")
_CONDAS = ("conda", "mamba", "micromamba")
_INSTALLERS = {
    *(
        "pip",
        "setuptools",
        "wheel",
        "uv",
        "pipx",
        "poetry",
        "virtualenv",
        "conda",
        "mamba",
        "conda-libmamba-solver",
    )
}
_QUIET = re.compile(
    r"(rm|\[|\[\[|test|set|true|:|exit|ldconfig|which|sleep|date|hash|type|nvidia-smi)( .*)?"
    r"|(nvcc|virtualenv|source|\.)( .*)?"
    r"|(echo|printf) [^>]*"
    r"|\S*python[0-9.]* (--version|-V|-m venv .*)|uv (cache .*|--version)"
    r"|\S*pip[0-9.]* (cache|check|list|show|freeze|--version|debug)\b.*"
    r"|(apt-get|apt|aptitude) (\S+ )*(update|clean|autoclean|autoremove|upgrade|dist-upgrade)\b.*"
    r"|\S*(conda|mamba|micromamba) (\S+ )*(clean|init|activate|deactivate|info|list|shell)\b.*"
    r"|\S*(conda|mamba|micromamba) config (--system )?--set .*"
    r"|eval \"?\$\(\S*(conda|mamba|micromamba) .*"
    r"|(update-alternatives|locale-gen|update-locale|apt-mark|dpkg-reconfigure|tzdata|git config|chsh) .*"
    r"|git lfs install( .*)?|ln (-\w+ )*\S*(python|pip)[0-9.]* \S*(python|pip)[0-9.]*"
    r"|pip[0-9.]* config (unset|list|get) .*|(apt-key|add-apt-repository) .*",
    re.DOTALL,
)
_STARTUP = re.compile(
    r"/\.(bashrc|bash_profile|profile|bash_aliases|zshrc|condarc|inputrc|vimrc)$"
    r"|^/etc/(environment|profile|bash\.bashrc|apt/|ssh/|sudoers|pip\.conf|locale|timezone)"
)
# Commands that install a tool which images do not need, or that set up apt's sources.
_TOOLS = re.compile(
    r"astral\.sh/uv/|install\.python-poetry\.org|get-poetry\.py|get-pip\.py|pdm-project\.org/install"
    r"|(Miniconda|Miniforge|Mambaforge|Micromamba|Anaconda)([^\s\"']|\$\(uname -m\))*\.sh"
    r"|\b(miniconda|miniforge|mambaforge|mamba|conda|anaconda)[0-9]*\.sh|\.local/bin/(uvx?|poetry|pixi)\b"
    r"|micro\.mamba\.pm|pixi\.sh/install|cuda[-_]keyring[0-9A-Za-z._-]*\.deb"
    r"|/etc/apt/|/usr/share/keyrings/|/etc/pip\.conf"
)
_TOOLS_BY = re.compile(
    r"(\{ )?(sudo )?(\S*/)?(curl|wget|sh|bash|python[0-9.]*|POETRY\w*=\S*|dpkg|chmod|ln|mv|cp|sed|echo|gpg"
    r"|install)\b"
)
# Options of pip whose value is the next word: those that are read, and those without effect on content.
_PIP_FILES = ("-r", "--requirement", "-c", "--constraint")
_PIP_IGNORED_WITH_VALUE = (
    *("-i", "--index-url", "--extra-index-url", "--index", "--default-index", "-f", "--find-links"),
    *("--trusted-host", "--no-binary", "--only-binary"),
)
_PIP_IGNORED_FLAGS = (
    "--pre",
    "--no-index",
    "--no-deps",
    "--require-hashes",
    "--no-build-isolation",
    "--prefer-binary",
)
_PIP_PASSED = (
    *(
        "-t",
        "--target",
        "--prefix",
        "--root",
        "--timeout",
        "--retries",
        "--progress-bar",
        "--cache-dir",
        "--log",
    ),
    *(
        "--upgrade-strategy",
        "--src",
        "--root-user-action",
        "--exists-action",
        "-w",
        "--wheel-dir",
    ),
    *("-C", "--config-settings", "--config-setting", "--global-option", "--install-option", "--build-option"),
    *("--platform", "--python-version", "--python-platform", "--abi", "--implementation", "--report"),
    *("--keyring-provider", "--use-feature", "--python", "-p", "--cache-from", "--concurrent-builds"),
    *("--link-mode", "--index-strategy", "--proxy", "--cert", "--torch-backend", "--default-timeout"),
    *("--resume-retries", "--no-build-isolation-package", "--no-binary-package"),
)
_PIP_LOST_OPTIONS = (
    *("--resolution", "--prerelease", "--exclude-newer", "--override", "--overrides", "--fork-strategy"),
    *("--build-constraint", "--build-constraints", "-b"),
)
# Options of project tools whose value is the next word, and those that select parts.
_PIP_CHOOSING = {"--extra": "extra", "--group": "group"}
_CHOOSING = {
    **dict.fromkeys(("--extra", "-E", "--extras"), "extra"),
    **dict.fromkeys(("--group", "-G", "--with", "--only", "--only-group"), "group"),
    **dict.fromkeys(("-e", "--environment"), "environment"),
}
_TOOL_VALUES = (
    *("--project", "--directory", "-C", "--manifest-path", "-p", "--python", "--package", "--without"),
    *("--no-group", "--no-install-package", "--no-extra", "--cache-dir", "--link-mode"),
    *(
        "--index",
        "--default-index",
        "--index-url",
        "--extra-index-url",
        "--config-file",
        "-P",
        "--refresh-package",
    ),
)
_ALL = ("--all-extras", "--all-groups", "--all-packages", "--all")
_PROJECT_FILES = ("pyproject.toml", "setup.cfg", "setup.py")
_PYTHON_NAME = r"(?:cpython-?|python)?(3\.[0-9]{1,2})(?:\.[0-9]+)?"
_PIP_PASSED_ALONE = re.compile(
    r"-[UqvIy]+|--(upgrade|quiet|verbose|user|no-cache-dir|no-cache|force-reinstall|no-input|ignore-installed|system"
    r"|disable-pip-version-check|break-system-packages|no-warn-script-location|compile|no-compile|compile-bytecode"
    r"|no-python-version-warning|isolated|yes|reinstall|editable-verbose|use-pep517|no-color|no-progress)"
)
_CONDA_VALUES = ("-n", "--name", "-p", "--prefix", "--solver", "--channel-priority", "--platform")
_USER_VALUES = (
    *("-u", "--uid", "-g", "--gid", "-s", "--shell", "-d", "--home", "-c", "--comment", "-G", "--groups"),
    *("--ingroup", "--home-dir", "--gecos", "--base-dir", "-b", "-p", "--password", "-K"),
)
_GIT_VALUES = ("-b", "--branch", "--depth", "-j", "--jobs", "-o", "--origin", "--filter", "-c", "--config")
_APT_VALUES = ("-o", "-t", "--option", "--target-release", "--default-release", "-c")


def read_install_script(
    container: ContainerFile, text: str, location: SourceLocation, *, joined: bool = False
) -> None:
    """Read the packages that a script installs. Raises RecipeError for invalid shell syntax."""
    _Shell(container).script(text, location, joined=joined)


def read_install_command(
    container: ContainerFile, words: Sequence[RunWord], location: SourceLocation
) -> None:
    """Read the packages that one command installs, from its words."""
    text = " ".join(word.text for word in words)
    _Shell(container).take(RunCommand(where=location, text=text, words=list(words)))


class _Shell:
    """A shell with its current directory and variables."""

    def __init__(self, container: ContainerFile, depth: int = 0) -> None:
        self.container, self.spec, self.depth = container, container.spec, depth
        self.variables = {"HOME": "/root", **container.variables}
        self.folder = container.workdir
        self.stack: list[str] = []

    def script(self, text: str, location: SourceLocation, *, joined: bool) -> None:
        for command in read_commands(text, location, self.variables, joined=joined):
            self.take(command)

    def take(self, command: RunCommand) -> None:
        if _is_quiet(command):
            return
        if _TOOLS.search(command.text) and _TOOLS_BY.match(command.text):
            self.container.note(
                command.where, f"{show(command.text, limit=120)} sets up a tool that images do not need"
            )
            return
        if not command.plain:
            self._not_run(command)
            for name in re.findall(r"\b([A-Za-z_]\w*)=", command.text):
                self.variables.pop(name, None)
            return
        words = _bare(command.words)
        assigned = [word for word in words if re.match(r"[A-Za-z_]\w*=", word.text, re.ASCII)]
        if assigned == words or words[0].text in ("export", "declare"):
            self._assign(assigned)
            if not command.script:
                return
        words = _after_assignments(words)
        name = basename(words[0].text) if words and words[0].known else ""
        if (name in _SHELLS or not words) and self._inner(words, command):
            pass
        elif name == "cd":
            self.folder = self._place(words[1].text if len(words) > 1 else "~")
        elif name in ("pushd", "popd"):
            if name == "pushd" and len(words) > 1:
                self.stack.append(self.folder)
                self.folder = self._place(words[1].text)
            elif self.stack:
                self.folder = self.stack.pop()
        elif name == "unset":
            for word in words[1:]:
                self.variables.pop(word.text, None)
        elif words and (reader := _reader(words)):
            read, rest = reader
            read(self, command, rest)
        else:
            self._not_run(command)

    def _assign(self, words: Sequence[RunWord]) -> None:
        for word in words:
            name, _, value = word.text.partition("=")
            if word.known:
                self.variables[name] = value[:1000]
            else:
                self.variables.pop(name, None)

    def _inner(self, words: Sequence[RunWord], command: RunCommand) -> bool:
        """Read a nested script: after `-c`, or in a here-document."""
        if self.depth >= _MOST_DEPTH:
            return False
        inner = _Shell(self.container, self.depth + 1)
        inner.folder, inner.variables = self.folder, dict(self.variables)
        if command.script and command.script_where and not command.script.startswith("#!"):
            inner.script(command.script, command.script_where, joined=False)
            return True
        position = next(
            (position for position, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word.text)), 0
        )
        if position and position + 1 < len(words) and words[position + 1].known:
            inner.script(words[position + 1].text, words[position + 1].where, joined=False)
            return True
        return False

    def _not_run(self, command: RunCommand) -> None:
        message = f"{show(command.text, limit=120)} is not run"
        if self.container.packages_only:  # of a stage whose files are copied, but not all
            if _BUILDS.search(command.text):
                self.spec.leave(command.where, message, _NOT_RUN)
            else:
                self.spec.note(command.where, f"{message}: only the packages of its stage are read")
            return
        do = _NOT_RUN if command.plain else f"only a shell knows whether it runs: {_NOT_RUN}"
        self.container.leave(command.where, message, do)

    def _place(self, written: str) -> str:
        home = self.variables.get("HOME", "/root")
        return normpath(join(self.folder, re.sub(r"^~(?=/|$)", home, written)))

    def _leave_unknown(self, word: RunWord) -> None:
        do = "write it out; a recipe has no variables"
        self.spec.leave(word.where, f"{show(word.text)} has a value that is known only to a shell", do)

    def _find(self, written: str, location: SourceLocation) -> str:
        return self.container.find(self._place(written), location)

    # --- pip

    def pip(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        position = next(
            (position for position, word in enumerate(words) if not word.text.startswith("-")), len(words)
        )
        if [word.text for word in words[position : position + 2]] == ["config", "set"] and self._pip_setting(
            words[position + 2 :]
        ):
            return
        if position < len(words) and words[position].text == "uninstall":
            self._uninstall(
                command, [word for word in words[position + 1 :] if not word.text.startswith("-")]
            )
            return
        if position == len(words) or words[position].text not in ("install", "wheel", "sync"):
            self._not_run(command)
            return
        self._pip_install(command, words[position + 1 :], files=words[position].text == "sync")

    def _pip_install(self, command: RunCommand, words: Sequence[RunWord], *, files: bool = False) -> None:
        requirements, spec = [], self.spec
        values = (*_PIP_FILES, *_PIP_IGNORED_WITH_VALUE, *_PIP_PASSED, *_PIP_LOST_OPTIONS, "-e", "--editable")
        words, chosen = _selection(words, _PIP_CHOOSING, values)
        for option, word in _options(words, values):
            if not word.known:
                self._leave_unknown(word)
            elif option in _PIP_FILES or (files and not option and not word.text.startswith("-")):
                self._pip_file(option or "-r", word, chosen)
            elif option == "--torch-backend":
                spec.hints.append(f"/{word.text}")
            elif option in ("--python", "-p") and (match := re.fullmatch(_PYTHON_NAME, word.text)):
                spec.bound_python(match[1], word.where)
            elif option in _PIP_IGNORED_WITH_VALUE or word.text in _PIP_IGNORED_FLAGS:
                add_pip_line(spec, f"{option} {word.text}".strip(), word.where, self.container.beside)
            elif option in _PIP_LOST_OPTIONS:
                do = "write bounds that ask for the versions that you mean"
                spec.leave(word.where, f"{option} {show(word.text)} decides on versions", do)
            elif option and "://" not in word.text and option in ("-e", "--editable"):
                self._project(word)
            elif option in ("-e", "--editable") or not (option or word.text.startswith("-")):
                requirements.append(word)
            elif not option and not _PIP_PASSED_ALONE.fullmatch(word.text):
                spec.leave(
                    word.where,
                    f"pip's option {show(word.text)} is not read",
                    "check what it and the next word ask for",
                )
        self._installers(requirements, command.where)
        for word in requirements:
            if not _is_installer(word):
                self._requirement(word)
        self._redirected(command, requirements)

    def _pip_setting(self, words: Sequence[RunWord]) -> bool:
        """Apply `pip config set global.index-url ADDRESS` as an option of each later command."""
        match = (
            re.fullmatch(r"\w+\.((extra-)?index-url|find-links)", words[0].text) if len(words) == 2 else None
        )
        if not match or not words[1].known:
            return False
        add_pip_line(self.spec, f"--{match[1]} {words[1].text}", words[1].where, self.container.beside)
        return True

    def _uninstall(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        """Remove installed packages. The solver adds those again that others need."""
        names = {canonical(word.text) for word in words if word.known}
        self.spec.pip = [text for text in self.spec.pip if pypi_name(text) not in names]
        self.container.removed |= names
        message = f"{show(command.text, limit=120)}: no longer required"
        self.spec.note(command.where, f"{message}, and installed where other packages need it")

    def _redirected(self, command: RunCommand, requirements: Sequence[RunWord]) -> None:
        """Report bounds without quotes, which a shell interprets as redirections."""
        for word in requirements:
            files = [redirection for redirection in command.sent if redirection.word == word]
            bounds = "".join(map(str, files))
            if not files or not (files[0].joined or files[0].target.startswith("=")):
                continue
            message = f"{word.text}{bounds} without quotes: a shell takes {show(bounds)} for files"
            if any(redirection.operator.startswith("<") for redirection in files):
                do = f"write '{word.text}{bounds}' in quotes to write a bound"
                self.spec.leave(word.where, f"{message}, and fails if there is no such file", do)
            else:
                message = f"{message}, and installs {word.text} without the bound, as the recipe does"
                self.spec.note(word.where, f"{message}; '{word.text}{bounds}' in quotes is a bound")

    def _installers(self, requirements: Sequence[RunWord], location: SourceLocation) -> None:
        if names := [word.text for word in requirements if _is_installer(word)]:
            self.spec.note(location, f"{', '.join(names)}: images do not need them")

    def _pip_file(self, option: str, word: RunWord, chosen: DependencySelection) -> None:
        name = self._find(word.text, word.where)
        text = self.container.beside.read(name) if name else None
        if not name or text is None:
            self._not_beside(word)
        elif re.search(r"\.(toml|lock|cfg|py)$", name):
            self._parse(name, text, chosen, word)
        else:
            add_pip_line(self.spec, f"{option} {name}", word.where, self.container.beside)

    def _parse(self, name: str, text: str, chosen: DependencySelection, word: RunWord) -> bool:
        """Read another file of the context, once for each selection of its parts."""
        if (name, chosen) in self.container.around.parsed:
            return True
        self.container.around.parsed.add((name, chosen))
        self.spec.files += 1
        if self.spec.files > MOST_FILES:
            self._not_beside(word)
            return False
        self.spec.merge(self.container.around.parse(text, name, replace(chosen, python=self.spec.python)))
        return True

    def _not_beside(self, word: RunWord) -> None:
        reason = self.container.missing_reason(join(self.folder, word.text))
        do = "copy it there, or import it too: imagefactory recipe import FILE"
        self.spec.leave(word.where, f"{show(word.text)} {reason}", do)

    def _requirement(self, word: RunWord) -> None:
        local = re.match(r"\.{1,2}(?=[/\[]|$)|/|[\w.-]+/", word.text)
        if local and not re.search(r"\.(whl|zip|gz|tgz|bz2)$|\*", word.text):
            self._project(word)
        else:
            add_pip_line(self.spec, word.text, word.where, self.container.beside)

    def _project(self, word: RunWord) -> None:
        directory, bracket, extras = word.text.partition("[")
        project_path = normpath(join(self.folder, directory))
        if (clone := self.container.clone_of(project_path)) and clone.address:
            self._cloned_project(clone, project_path, f"{bracket}{extras}", word.where)
            return
        for file in _PROJECT_FILES:
            optional = file != "pyproject.toml"
            if name := self.container.find(join(self.folder, directory, file), word.where, optional=optional):
                text = f"./{dirname(name)}{bracket}{extras}"
                add_pip_line(self.spec, text, word.where, self.container.beside)
                return
        reason = self.container.missing_reason(join(self.folder, directory, "pyproject.toml"))
        do = "add what it needs, and put the project into an image by a wheel (./wheels/...)"
        self.spec.leave(word.where, f"the project {show(word.text)}: its pyproject.toml {reason}", do)

    def setup_py(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        """Read `python setup.py install`, which installs the project in the current directory."""
        if any(word.text in ("install", "develop") for word in words):
            self._project(RunWord(".", command.where))
        else:
            self._not_run(command)

    # --- repositories that are cloned

    def git(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        words = _without_options(words, ("-C", "-c"))
        doing = words[0].text if words else ""
        plain, branch = [], ""
        for option, word in _options(words[1:], _GIT_VALUES):
            branch = word.text if option in ("-b", "--branch") and word.known else branch
            if not option and not word.text.startswith("-"):
                plain.append(word)
        here = self.container.clone_of(self.folder)
        if doing == "clone" and plain:
            name = basename(plain[0].text.rstrip("/")).removesuffix(".git")
            project_path = normpath(join(self.folder, plain[1].text if len(plain) > 1 else name))
            before = len(self.spec.lost)
            self._not_run(command)
            address = plain[0].text if plain[0].known else ""
            self.container.clones[project_path] = GitClone(
                project_path, address, branch, tuple(self.spec.lost[before:])
            )
        elif doing in ("checkout", "reset", "switch") and here and plain and plain[-1].known:
            self.container.clones[here.place] = replace(here, revision=plain[-1].text)
        elif doing not in ("submodule", "lfs", "fetch", "pull", "clean", "config", "init") or not here:
            self._not_run(command)

    def _cloned_project(
        self, clone: GitClone, project_path: str, extras: str, location: SourceLocation
    ) -> None:
        """Add a project in a cloned repository, by the address of the repository."""
        self.spec.lost = [line for line in self.spec.lost if line not in clone.losses]
        self.spec.note(
            location, f"of {show(clone.address, limit=120)} the package is taken, not its other files"
        )
        revision = f"@{clone.revision}" if clone.revision else ""
        inner = project_path[len(clone.place) :].strip("/")
        name = basename(clone.address.rstrip("/")).removesuffix(".git")
        written = f"git+{clone.address}{revision}{f'#subdirectory={inner}' if inner else ''}"
        written = f"{name}{extras} @ {written}" if extras else written
        add_pip_line(self.spec, written, location, self.container.beside)

    # --- files

    def mkdir(self, _: RunCommand, words: Sequence[RunWord]) -> None:
        for option, word in _options(words, ("-m", "--mode")):
            if not option and not word.text.startswith("-"):
                self.container.folders.append(RunWord(self._place(word.text), word.where, word.known))

    def chmod(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        """Check that files are executable in the project, since recipes copy files with their mode."""
        plain = [word for word in words if not re.fullmatch(r"-[a-zA-Z]+|--[a-z-]+", word.text)]
        context = self.container.around.context
        starts = bool(plain) and re.search(r"[xX]|[1357]", plain[0].text) is not None
        directories = [directory.text for directory in self.container.folders]
        for word in plain[1:]:
            if self._place(word.text) in (*directories, "/tmp"):  # noqa: S108 -- a path in an image
                continue
            name = self.container.origin(self._place(word.text)) if word.known else ""
            if not name or context is None:
                self._not_run(command)
                return
            if starts and context.kind(name) == "file" and not os.access(context.root / name, os.X_OK):
                do = f"chmod +x {shlex.quote(str(context.root / name))}: own files keep their mode"
                self.container.leave(command.where, f"{show(command.text, limit=120)} is not run", do)

    def chown(self, command: RunCommand, _: Sequence[RunWord]) -> None:
        self.container.note(
            command.where, f"{show(command.text, limit=120)}: files are root's, and can be read"
        )

    # --- projects, by the tools that manage them

    def uv(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        words = _without_options(words, _TOOL_VALUES)
        name = words[0].text if words else ""
        rest = words[1:]
        if name == "pip":
            self.pip(command, rest)
        elif name in ("sync", "run"):
            self._sync(command, rest, ("uv.lock", "pyproject.toml"))
            if name == "run":
                self._not_run(command)
        elif name == "add":
            self._pip_install(command, rest)
        elif name in ("venv", "python"):
            self._python(rest)
        else:
            self._not_run(command)

    def poetry(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        words = _without_options(words, _TOOL_VALUES)
        name = words[0].text if words else ""
        if name in ("install", "sync"):
            self._sync(command, words[1:], ("poetry.lock", "pyproject.toml"))
        elif name == "add":
            self._pip_install(command, words[1:])
        elif name not in ("config", "lock", "check", "self", "env", "cache", "version"):
            self._not_run(command)

    def pdm(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        words = _without_options(words, _TOOL_VALUES)
        if words and words[0].text in ("install", "sync"):
            words = [RunWord("-E", word.where) if word.text == "-G" else word for word in words[1:]]
            self._sync(command, words, ("pyproject.toml",), unread="pdm.lock")
        elif not words or words[0].text not in ("config", "use", "lock", "venv", "cache"):
            self._not_run(command)

    def pixi(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        words = _without_options(words, _TOOL_VALUES)
        if words and words[0].text == "install":
            self._sync(command, words[1:], ("pixi.lock", "pixi.toml", "pyproject.toml"))
        else:
            self._not_run(command)

    def pipenv(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        if words and words[0].text == "install" and any(word.text in _PIP_FILES for word in words):
            self._pip_install(
                command, [word for word in words[1:] if word.text not in ("--system", "--deploy")]
            )
        else:
            do = "import what it locks: `pipenv requirements > requirements.txt`, then import that file"
            self.spec.leave(command.where, f"{show(command.text, limit=120)}: its Pipfile is not read", do)

    def _sync(
        self, command: RunCommand, words: Sequence[RunWord], files: Sequence[str], *, unread: str = ""
    ) -> None:
        """Read the lock of a project, or else its manifest, with the selected extras."""
        words, chosen = _selection(words, _CHOOSING, _TOOL_VALUES)
        for word in words:
            if not word.known:
                self._leave_unknown(word)
        directory = next(
            (
                word.text
                for option, word in _options(words, _TOOL_VALUES)
                if option in ("--project", "--directory", "-C", "--manifest-path") and word.known
            ),
            ".",
        )
        directory = directory.removesuffix("pixi.toml") or "."
        if unread and self._find(join(directory, unread), command.where):
            do = "import what it locks: `pdm export -o requirements.txt`, then import that file"
            self.spec.leave(command.where, f"{unread} is not read", do)
            return
        for number, file in enumerate(files):
            last = number == len(files) - 1
            name = self.container.find(join(self.folder, directory, file), command.where, optional=not last)
            text = self.container.beside.read(name) if name else None
            if text is not None:
                word = RunWord(join(directory, file), command.where)
                self._parse(name, text, chosen, word)
                if any(word.text in _ALL for word in words):
                    do = "name them in the command: --extra NAME, --group NAME"
                    self.spec.leave(command.where, f"{show(command.text, limit=120)} takes all extras", do)
                return
        reason = self.container.missing_reason(join(self.folder, directory, files[-1]))
        do = "import the project's lock or its pyproject.toml"
        self.spec.leave(command.where, f"{show(command.text, limit=120)}: {files[-1]} {reason}", do)

    def _python(self, words: Sequence[RunWord]) -> None:
        """Read the Python version of a new environment: `uv venv --python 3.11`, `uv python install 3.11`."""
        for option, word in _options(words, ("--python", "-p", "--prompt", "--cache-dir", "--index-url")):
            match = re.fullmatch(_PYTHON_NAME, word.text) if option in ("--python", "-p", "") else None
            if match and not self.container.packages_only:
                self.spec.bound_python(match[1], word.where)

    # --- conda

    def conda(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        words = [word for word in words if word.text not in ("-y", "--yes", "-q", "--quiet")]
        names = [word.text for word in words[:2]]
        if names[:1] == ["run"]:
            rest = list(_options(words[1:], (*_CONDA_VALUES, "--cwd")))
            inner = [word for option, word in rest if not option]
            while inner and inner[0].text.startswith("-"):
                inner.pop(0)
            self.take(
                RunCommand(where=command.where, text=" ".join(word.text for word in inner), words=inner)
            )
        elif names[:1] == ["config"]:
            self._conda_config(command, words[1:])
        elif names[:1] == ["env"] and names[1:] in (["create"], ["update"]):
            self._conda_install(command, words[2:])
        elif names and names[0] in ("install", "create", "update"):
            self._conda_install(command, words[1:])
        else:
            self._not_run(command)

    def _conda_config(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        position = next(
            (
                position
                for position, word in enumerate(words)
                if word.text in ("--add", "--append", "--prepend")
            ),
            -1,
        )
        if position < 0 or len(words) < position + 3 or words[position + 1].text != "channels":
            self._not_run(command)
            return
        before = list(self.spec.channels)
        add_channel(self.spec, words[position + 2].text, words[position + 2].where)
        if words[position].text != "--append":  # the last that is added is asked first
            self.spec.channels.sort(key=lambda name: name in before)

    def _conda_install(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        packages = []
        self.spec.defaults |= not any(word.text == "--override-channels" for word in words)
        values = (*_CONDA_VALUES, "-c", "--channel", "-f", "--file")
        for option, word in _options(words, values):
            if option in ("-c", "--channel"):
                add_channel(self.spec, word.text, word.where)
            elif option in ("-f", "--file"):
                self._conda_file(word)
            elif not option and not word.text.startswith("-"):
                packages.append(word)
        self._installers(packages, command.where)
        for word in packages:
            if not word.known:
                self._leave_unknown(word)
            elif not _is_installer(word):
                add_match_spec(self.spec, word.text, word.where)

    def _conda_file(self, word: RunWord) -> None:
        name = self._find(word.text, word.where) if word.known else ""
        text = self.container.beside.read(name) if name else None
        self.spec.files += 1
        if text is None or self.spec.files > MOST_FILES:
            self._not_beside(word)
        elif re.search(r"\.(ya?ml|lock)$", name) or "@EXPLICIT" in text:
            self.spec.merge(self.container.around.parse(text, name, DependencySelection()))
        else:
            for number, line in enumerate(text.split("\n")):
                if spec := line.partition("#")[0].strip():
                    add_match_spec(self.spec, spec, SourceLocation(file=name, line=number + 1, column=1))

    # --- Debian's packages

    def apt(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        plain = [word for option, word in _options(words, _APT_VALUES) if not option]
        plain = [word for word in plain if not word.text.startswith("-")]
        names = [word.text for word in plain[1:]]
        doing = plain[0].text if plain else ""
        if doing in ("remove", "purge") and drop_debian(self.spec, names) != names:
            return  # what was installed for a while is gone again
        if doing != "install":
            self._not_run(command)
            return
        for word in plain[1:]:
            if match := re.match(r"python(3\.[0-9]{1,2})($|-)", word.text):
                self.spec.bound_python("" if self.spec.python else match[1], word.where)
            elif re.fullmatch(r"python3?(-pip|-venv|-dev)?|python-is-python3", word.text):
                self.container.system_python = word.where
        if names and not self.container.packages_only:
            add_debian_packages(self.spec, names, command.where)

    def user(self, command: RunCommand, words: Sequence[RunWord]) -> None:
        """Record the number of a new user. `USER` names the user later, but a recipe has the number."""
        options = list(_options(words, _USER_VALUES))
        names = [word.text for option, word in options if not option and not word.text.startswith("-")]
        number = next((word.text for option, word in options if option in ("-u", "--uid")), "")
        group = re.search(r"\b(useradd|adduser)\b", command.text) is None
        system = any(word.text in ("-r", "--system") for option, word in options if not option)
        if not (
            number or group or system
        ):  # the first that Debian and Ubuntu give; Ubuntu 24.04 has one user
            number = str(self.container.first_user + len(self.container.users))
        if group or not names or not number.isdecimal():
            self.container.note(
                command.where, f"{show(command.text, limit=120)}: images have no users of their own"
            )
            return
        self.container.users[names[0]] = number
        self.container.note(command.where, f"the user {show(names[0])} is known by its number, {number}")

    def other_system(self, command: RunCommand, _: Sequence[RunWord]) -> None:
        do = "write Debian's names of the same under 'system'"
        self.container.leave(command.where, f"{show(command.text, limit=120)} is not Debian's", do)


_Read = Callable[[_Shell, RunCommand, Sequence[RunWord]], None]
_BY_NAME: Mapping[str, _Read] = {
    **dict.fromkeys(_CONDAS, _Shell.conda),
    **dict.fromkeys(("apt-get", "apt", "aptitude"), _Shell.apt),
    **{"uv": _Shell.uv, "poetry": _Shell.poetry, "pdm": _Shell.pdm, "pixi": _Shell.pixi},
    **{"git": _Shell.git, "mkdir": _Shell.mkdir, "chmod": _Shell.chmod, "chown": _Shell.chown},
    **dict.fromkeys(("groupadd", "addgroup", "usermod", "groupmod", "passwd", "chpasswd"), _Shell.user),
    **{"pipenv": _Shell.pipenv, "useradd": _Shell.user, "adduser": _Shell.user},
    **dict.fromkeys(("apk", "yum", "dnf", "microdnf", "zypper"), _Shell.other_system),
}


def _reader(words: Sequence[RunWord]) -> tuple[_Read, Sequence[RunWord]] | None:
    """Return the reader of a command, and the words after the command's name."""
    name = basename(words[0].text)
    more = [word.text for word in words[1:3]]
    if re.fullmatch(r"pip[0-9.]*", name):
        return _Shell.pip, words[1:]
    if re.fullmatch(r"python[0-9.]*", name) and more == ["-m", "pip"]:
        return _Shell.pip, words[3:]
    if (
        re.fullmatch(r"python[0-9.]*", name)
        and more[:1] == ["-m"]
        and more[1:] in (["uv"], ["poetry"], ["pdm"])
    ):
        return _BY_NAME[more[1]], words[3:]
    if re.fullmatch(r"python[0-9.]*", name) and more[:1] in (["setup.py"], ["./setup.py"]):
        return _Shell.setup_py, words[2:]
    read = _BY_NAME.get(name)
    return (read, words[1:]) if read else None


def _is_installer(word: RunWord) -> bool:
    """Return whether a package only installs others. Bounds on setuptools count, since code may import it."""
    name, bounds = re.fullmatch(r"([^\[<>=!~ ]*)(.*)", word.text, re.DOTALL).groups()  # type: ignore[union-attr]
    return name in _INSTALLERS and not (bounds and name in ("setuptools", "wheel"))


def _is_quiet(command: RunCommand) -> bool:
    """Return whether a command adds nothing to the image that a user could need."""
    writes = [output.target for output in command.sent if output.operator.startswith((">", "&>"))]
    if writes:  # what shells read that a person starts, and apt of a base that is replaced
        return (
            all(map(_STARTUP.search, writes)) and re.match(r"(echo|printf|cat)\b", command.text) is not None
        )
    words = " ".join(word.text for word in _after_assignments(_bare(command.words)))
    return any(map(_QUIET.fullmatch, (command.text, words)))


def _bare(words: Sequence[RunWord]) -> list[RunWord]:
    """Return the words without prefixes such as `sudo` or `env`."""
    rest = list(words)
    while rest and basename(rest[0].text) in ("sudo", "env", "exec", "command", "time", "nice", "nohup"):
        rest.pop(0)
        while rest and rest[0].text.startswith("-"):
            rest.pop(0)
    return rest


def _after_assignments(words: Sequence[RunWord]) -> list[RunWord]:
    rest = list(words)
    while rest and re.match(r"[A-Za-z_]\w*=", rest[0].text, re.ASCII):
        rest.pop(0)
    return _bare(rest)


def _without_options(words: Sequence[RunWord], valued: Sequence[str]) -> list[RunWord]:
    """Return the words from the subcommand on: `uv --no-progress sync` becomes `uv sync`."""
    for option, word in _options(words, valued):
        if not option and not word.text.startswith("-"):
            return list(words[words.index(word) :])
    return []


def _selection(
    words: Sequence[RunWord], choosing: Mapping[str, str], valued: Sequence[str]
) -> tuple[list[RunWord], DependencySelection]:
    """Return the words without the options in `choosing`, and the parts that these options select."""
    choices: dict[str, list[str]] = {"extra": [], "group": [], "environment": []}
    rest: list[RunWord] = []
    for option, word in _options(words, (*choosing, *valued)):
        if option in choosing and word.known:
            names = [name for name in re.split(r"[, ]+", word.text) if name]
            choices[choosing[option]] += [name for name in names if name not in ("main", "default")]
        else:
            rest += [RunWord(option, word.where), word] if option else [word]
    environment = next(iter(choices["environment"]), "")
    return rest, DependencySelection(
        extras=tuple(choices["extra"]), groups=tuple(choices["group"]), environment=environment
    )


def _options(words: Sequence[RunWord], valued: Sequence[str]) -> Iterator[tuple[str, RunWord]]:
    """Yield each word with the option whose value it is, empty for others."""
    option = ""
    for word in words:
        name, equals, value = word.text.partition("=")
        short = next((known for known in valued if len(known) == 2 and word.text.startswith(known)), "")
        if option:
            yield option, word
            option = ""
        elif word.text in valued:
            option = word.text
        elif name in valued and equals:
            yield name, RunWord(value, word.where, word.known)
        elif short and not word.text.startswith("--"):
            yield short, RunWord(word.text[2:], word.where, word.known)
        else:
            yield "", word
