"""Commands that install packages -> what they ask for. Nothing is run.

What only tidies up, asks something or sets up an environment (every image has its own) is passed by; any
other command is told as left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from posixpath import basename, dirname, join, normpath

from imagefactory.model import Where
from imagefactory.recipes.container import Container
from imagefactory.recipes.image_parts import keep_debian
from imagefactory.recipes.pip_lines import MOST_FILES, take_pip_line
from imagefactory.recipes.shell_words import Command, Word, read_commands
from imagefactory.recipes.wish import take_channel, take_match_spec
from imagefactory.recipes.yaml_tree import show

_MOST_DEPTH = 4
_NOT_RUN = "do it where the image runs, or make what it brings a package on an index"
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
    r"|\S*python[0-9.]* (--version|-V|-m venv .*)|uv (venv.*|cache .*|--version)"
    r"|\S*pip[0-9.]* (cache|check|list|show|freeze|--version|debug)\b.*"
    r"|(apt-get|apt|aptitude) (\S+ )*(update|clean|autoclean|autoremove|upgrade|dist-upgrade)\b.*"
    r"|\S*(conda|mamba|micromamba) (\S+ )*(clean|init|activate|deactivate|info|list|shell)\b.*"
    r"|\S*(conda|mamba|micromamba) config (--system )?--set .*"
    r"|eval \"?\$\(\S*(conda|mamba|micromamba) .*",
    re.DOTALL,
)
# Options whose value stands in the next word: of pip what is read, and what says nothing of content.
_PIP_FILES = ("-r", "--requirement", "-c", "--constraint")
_PIP_TOLD = (
    *("-i", "--index-url", "--extra-index-url", "--index", "--default-index", "-f", "--find-links"),
    *("--trusted-host", "--no-binary", "--only-binary"),
)
_PIP_TOLD_ALONE = (
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
        "--python",
        "-w",
        "--wheel-dir",
    ),
    *("-C", "--config-settings", "--config-setting", "--global-option", "--install-option", "--build-option"),
    *("--platform", "--python-version", "--python-platform", "--abi", "--implementation", "--report"),
    *("--resolution", "--prerelease", "--exclude-newer", "--keyring-provider", "--use-feature"),
    *("--link-mode", "--index-strategy", "--proxy", "--cert", "-p", "--torch-backend", "--default-timeout"),
)
_PIP_PASSED_ALONE = re.compile(
    r"-[UqvIy]+|--(upgrade|quiet|verbose|user|no-cache-dir|no-cache|force-reinstall|no-input|ignore-installed|system"
    r"|disable-pip-version-check|break-system-packages|no-warn-script-location|compile|no-compile|compile-bytecode"
    r"|no-python-version-warning|isolated|yes|reinstall|editable-verbose|use-pep517|no-color|no-progress)"
)
_CONDA_VALUES = ("-n", "--name", "-p", "--prefix", "--solver", "--channel-priority", "--platform")
_APT_VALUES = ("-o", "-t", "--option", "--target-release", "--default-release", "-c")


def take_script(container: Container, text: str, where: Where, *, joined: bool = False) -> None:
    """What the commands of a script install. Raises RecipeError for text that no shell could read."""
    _Shell(container).script(text, where, joined=joined)


def take_words(container: Container, words: Sequence[Word], where: Where) -> None:
    """The same of one command whose words are given."""
    text = " ".join(word.text for word in words)
    _Shell(container).take(Command(where=where, text=text, words=list(words)))


class _Shell:
    """One run of a shell: its folder and its variables end with it."""

    def __init__(self, container: Container, depth: int = 0) -> None:
        self.container, self.wish, self.depth = container, container.wish, depth
        self.variables = dict(container.variables)
        self.folder = container.workdir

    def script(self, text: str, where: Where, *, joined: bool) -> None:
        for command in read_commands(text, where, self.variables, joined=joined):
            self.take(command)

    def take(self, command: Command) -> None:
        if _is_quiet(command):
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
            self.folder = normpath(join(self.folder, words[1].text)) if len(words) > 1 else "/root"
        elif words and (found := _reader(words)):
            read, rest = found
            read(self, command, rest)
        else:
            self._not_run(command)

    def _assign(self, words: Sequence[Word]) -> None:
        for word in words:
            name, _, value = word.text.partition("=")
            if word.known:
                self.variables[name] = value[:1000]
            else:
                self.variables.pop(name, None)

    def _inner(self, words: Sequence[Word], command: Command) -> bool:
        """A script within: behind `-c`, or as here-document."""
        if self.depth >= _MOST_DEPTH:
            return False
        inner = _Shell(self.container, self.depth + 1)
        inner.folder, inner.variables = self.folder, dict(self.variables)
        if command.script and command.script_where and not command.script.startswith("#!"):
            inner.script(command.script, command.script_where, joined=False)
            return True
        at = next((at for at, word in enumerate(words) if re.fullmatch(r"-[a-z]*c", word.text)), 0)
        if at and at + 1 < len(words) and words[at + 1].known:
            inner.script(words[at + 1].text, words[at + 1].where, joined=False)
            return True
        return False

    def _not_run(self, command: Command) -> None:
        what = f"{show(command.text, limit=120)} is not run"
        do = _NOT_RUN if command.plain else f"only a shell knows whether it runs: {_NOT_RUN}"
        self.container.leave(command.where, what, do)

    def _find(self, written: str) -> str:
        return self.container.find(join(self.folder, written))

    # --- pip

    def pip(self, command: Command, words: Sequence[Word]) -> None:
        at = next((at for at, word in enumerate(words) if not word.text.startswith("-")), len(words))
        if at == len(words) or words[at].text not in ("install", "wheel", "sync"):
            self._not_run(command)
            return
        wanted, wish, own = [], self.wish, command.where
        files = words[at].text == "sync"
        for option, word in _options(
            words[at + 1 :], (*_PIP_FILES, *_PIP_TOLD, *_PIP_PASSED, "-e", "--editable")
        ):
            if not word.known:
                do = "write it out; a recipe has no variables"
                wish.leave(word.where, f"{show(word.text)} holds what only a shell knows", do)
            elif option in _PIP_FILES or (files and not option):
                self._pip_file(option or "-r", word)
            elif option == "--torch-backend":
                wish.hints.append(f"/{word.text}")
            elif option in _PIP_TOLD or word.text in _PIP_TOLD_ALONE:
                take_pip_line(wish, f"{option} {word.text}".strip(), word.where, self.container.beside)
            elif option and "://" not in word.text and option in ("-e", "--editable"):
                self._project(word)
            elif option in ("-e", "--editable") or not (option or word.text.startswith("-")):
                wanted.append(word)
            elif not option and not _PIP_PASSED_ALONE.fullmatch(word.text):
                wish.leave(
                    word.where,
                    f"pip's option {show(word.text)} is not read",
                    "see what it and the word behind it ask for",
                )
        self._installers(wanted, own)
        for word in wanted:
            if word.text not in _INSTALLERS:
                self._requirement(word)
        if wanted and command.sent:
            do = f"write '{wanted[-1].text}{command.sent}' in quotes where a bound is meant"
            wish.leave(own, f"{show(command.sent)} without quotes is a file to a shell", do)

    def _installers(self, wanted: Sequence[Word], where: Where) -> None:
        if names := [word.text for word in wanted if word.text in _INSTALLERS]:
            do = "nothing to do, unless something imports them"
            self.wish.leave(where, f"{', '.join(names)}: images are made without them", do)

    def _pip_file(self, option: str, word: Word) -> None:
        if name := self._find(word.text):
            take_pip_line(self.wish, f"{option} {name}", word.where, self.container.beside)
        else:
            self._not_beside(word)

    def _not_beside(self, word: Word) -> None:
        do = "copy it there, or import it too: --from FILE"
        self.wish.leave(
            word.where, f"{show(word.text)} is none of the files that lie beside it and are copied", do
        )

    def _requirement(self, word: Word) -> None:
        local = re.match(r"\.{1,2}(?=[/\[]|$)|/|[\w.-]+/", word.text)
        if local and not re.search(r"\.(whl|zip|gz|tgz|bz2)$|\*", word.text):
            self._project(word)
        else:
            take_pip_line(self.wish, word.text, word.where, self.container.beside)

    def _project(self, word: Word) -> None:
        folder, bracket, extras = word.text.partition("[")
        if name := self._find(join(folder, "pyproject.toml")):
            text = f"./{dirname(name)}{bracket}{extras}"
            take_pip_line(self.wish, text, word.where, self.container.beside)
        else:
            why = "has no pyproject.toml that lies beside this file and is copied"
            do = "add what it needs, and put the project into an image by a wheel (./wheels/...)"
            self.wish.leave(word.where, f"the project {show(word.text)} {why}", do)

    # --- conda

    def conda(self, command: Command, words: Sequence[Word]) -> None:
        words = [word for word in words if word.text not in ("-y", "--yes", "-q", "--quiet")]
        names = [word.text for word in words[:2]]
        if names[:1] == ["run"]:
            rest = list(_options(words[1:], (*_CONDA_VALUES, "--cwd")))
            inner = [word for option, word in rest if not option]
            while inner and inner[0].text.startswith("-"):
                inner.pop(0)
            self.take(Command(where=command.where, text=" ".join(word.text for word in inner), words=inner))
        elif names[:1] == ["config"]:
            self._conda_config(command, words[1:])
        elif names[:1] == ["env"] and names[1:] in (["create"], ["update"]):
            self._conda_install(command, words[2:])
        elif names and names[0] in ("install", "create", "update"):
            self._conda_install(command, words[1:])
        else:
            self._not_run(command)

    def _conda_config(self, command: Command, words: Sequence[Word]) -> None:
        at = next(
            (at for at, word in enumerate(words) if word.text in ("--add", "--append", "--prepend")), -1
        )
        if at < 0 or len(words) < at + 3 or words[at + 1].text != "channels":
            self._not_run(command)
            return
        before = list(self.wish.channels)
        take_channel(self.wish, words[at + 2].text, words[at + 2].where)
        if words[at].text != "--append":  # the last that is added is asked first
            self.wish.channels.sort(key=lambda name: name in before)

    def _conda_install(self, command: Command, words: Sequence[Word]) -> None:
        wanted = []
        self.wish.defaults |= not any(word.text == "--override-channels" for word in words)
        values = (*_CONDA_VALUES, "-c", "--channel", "-f", "--file")
        for option, word in _options(words, values):
            if option in ("-c", "--channel"):
                take_channel(self.wish, word.text, word.where)
            elif option in ("-f", "--file"):
                self._conda_file(word)
            elif not option and not word.text.startswith("-"):
                wanted.append(word)
        self._installers(wanted, command.where)
        for word in wanted:
            if not word.known:
                do = "write it out; a recipe has no variables"
                self.wish.leave(word.where, f"{show(word.text)} holds what only a shell knows", do)
            elif word.text not in _INSTALLERS:
                take_match_spec(self.wish, word.text, word.where)

    def _conda_file(self, word: Word) -> None:
        name = self._find(word.text) if word.known else ""
        text = self.container.beside.read(name) if name else None
        self.wish.files += 1
        if text is None or self.wish.files > MOST_FILES:
            self._not_beside(word)
        elif re.search(r"\.(ya?ml|lock)$", name) or "@EXPLICIT" in text:
            self.wish.merge(self.container.around.parse(text, name))
        else:
            for number, line in enumerate(text.split("\n")):
                if spec := line.partition("#")[0].strip():
                    take_match_spec(self.wish, spec, Where(file=name, line=number + 1, column=1))

    # --- Debian's packages

    def apt(self, command: Command, words: Sequence[Word]) -> None:
        plain = [word for option, word in _options(words, _APT_VALUES) if not option]
        plain = [word for word in plain if not word.text.startswith("-")]
        if not plain or plain[0].text != "install":
            self._not_run(command)
            return
        for word in plain[1:]:
            if found := re.fullmatch(r"python(3\.[0-9]{1,2})", word.text):
                self.wish.bound_python("" if self.wish.python else found[1], word.where)
        if len(plain) > 1 and not self.container.packages_only:
            keep_debian(self.wish, [word.text for word in plain[1:]], command.where)

    def project(self, command: Command, _: Sequence[Word]) -> None:
        do = "import the project's lock or its pyproject.toml: --from FILE"
        self.wish.leave(command.where, f"{show(command.text, limit=120)} is not run", do)

    def other_system(self, command: Command, _: Sequence[Word]) -> None:
        do = "write Debian's names of the same under 'system'"
        self.container.leave(command.where, f"{show(command.text, limit=120)} is not Debian's", do)


_Read = Callable[[_Shell, Command, Sequence[Word]], None]
_BY_NAME: Mapping[str, _Read] = {
    **dict.fromkeys(_CONDAS, _Shell.conda),
    **dict.fromkeys(("apt-get", "apt", "aptitude"), _Shell.apt),
    **dict.fromkeys(("uv", "poetry", "pdm", "pipenv", "pixi", "hatch"), _Shell.project),
    **dict.fromkeys(("apk", "yum", "dnf", "microdnf", "zypper"), _Shell.other_system),
}


def _reader(words: Sequence[Word]) -> tuple[_Read, Sequence[Word]] | None:
    """What reads a command by its first words, and the words behind them."""
    name = basename(words[0].text)
    more = [word.text for word in words[1:3]]
    if re.fullmatch(r"pip[0-9.]*", name):
        return _Shell.pip, words[1:]
    if re.fullmatch(r"python[0-9.]*", name) and more == ["-m", "pip"]:
        return _Shell.pip, words[3:]
    if name == "uv" and more[:1] == ["pip"]:
        return _Shell.pip, words[2:]
    read = _BY_NAME.get(name)
    return (read, words[1:]) if read else None


def _is_quiet(command: Command) -> bool:
    """Whether it leaves nothing in an image that anyone could miss."""
    return not command.sent.startswith(">") and _QUIET.fullmatch(command.text) is not None


def _bare(words: Sequence[Word]) -> list[Word]:
    """Without what only says how a command is run."""
    rest = list(words)
    while rest and basename(rest[0].text) in ("sudo", "env", "exec", "command", "time", "nice", "nohup"):
        rest.pop(0)
        while rest and rest[0].text.startswith("-"):
            rest.pop(0)
    return rest


def _after_assignments(words: Sequence[Word]) -> list[Word]:
    rest = list(words)
    while rest and re.match(r"[A-Za-z_]\w*=", rest[0].text, re.ASCII):
        rest.pop(0)
    return _bare(rest)


def _options(words: Sequence[Word], valued: Sequence[str]) -> Iterator[tuple[str, Word]]:
    """Each word with the option of whose value it is, empty for others."""
    option = ""
    for word in words:
        name, equals, value = word.text.partition("=")
        short = next((one for one in valued if len(one) == 2 and word.text.startswith(one)), "")
        if option:
            yield option, word
            option = ""
        elif word.text in valued:
            option = word.text
        elif name in valued and equals:
            yield name, Word(value, word.where, word.known)
        elif short and not word.text.startswith("--"):
            yield short, Word(word.text[2:], word.where, word.known)
        else:
            yield "", word
