"""Parse a batch script like sbatch: the options in its #SBATCH lines, then shell commands. Pure functions.

Observed with `sbatch --test-only -vv` of 22.05: options end at the first command. A `#` ends a line, even
within a word. A `#SBATCH` that does not start its line is a comment. Option names may be abbreviated if
unambiguous. Source: Slurm manual, sbatch(1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from imagefactory.errors import UsageError
from imagefactory.extras.lint.findings import FileLocation, SubmitFinding, advice, wrong
from imagefactory.extras.lint.reader import MAX_LINES
from imagefactory.recipes.shell_words import Shell, read_shell
from imagefactory.versions import nearest

_WITH_VALUE = (
    "array", "account", "bb", "bbf", "begin", "cpu-freq", "cpus-per-task", "comment", "container",
    "dependency", "deadline", "delay-boot", "chdir", "error", "export", "export-file", "gid", "gres",
    "gres-flags", "input", "job-name", "licenses", "clusters", "distribution", "mail-type", "mail-user",
    "mcs-label", "ntasks", "ntasks-per-node", "nodes", "output", "partition", "power", "priority",
    "profile", "qos", "core-spec", "signal", "switches", "thread-spec", "time", "time-min", "uid", "wckey",
    "wrap", "cluster-constraint", "constraint", "nodefile", "mem", "mincpus", "reservation", "tmp",
    "nodelist", "exclude", "mem-per-cpu", "sockets-per-node", "cores-per-socket", "threads-per-core",
    "extra-node-info", "ntasks-per-core", "ntasks-per-socket", "ntasks-per-gpu", "cpus-per-gpu", "gpus",
    "gpu-bind", "gpu-freq", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "mem-per-gpu", "mem-bind",
    "hint", "network", "acctg-freq", "open-mode", "prefer", "tres-per-task", "tres-bind", "container-id",
    "resv-ports", "segment", "extra",
)  # fmt: skip
_PYXIS = (
    "container-image", "container-mounts", "container-workdir", "container-name", "container-save",
    "container-env", "container-unshare", "environment", "edf",
)  # fmt: skip
_MAY_TAKE = ("get-user-env", "nice", "propagate", "exclusive", "no-kill")
_BARE = (
    "hold", "ignore-pbs", "no-requeue", "overcommit", "parsable", "quiet", "reboot", "requeue",
    "oversubscribe", "spread-job", "use-min-nodes", "verbose", "wait", "contiguous", "help", "usage",
    "version", "test-only", "share", "container-mount-home", "no-container-mount-home",
    "container-remap-root", "no-container-remap-root", "container-writable", "container-readonly",
    "no-container-entrypoint", "container-entrypoint", "container-entrypoint-log", "stepmgr",
)  # fmt: skip
LONG: Mapping[str, int] = {
    **dict.fromkeys(_BARE, 0), **dict.fromkeys(_MAY_TAKE, 2), **dict.fromkeys((*_WITH_VALUE, *_PYXIS), 1),
    "kill-on-invalid-dep": 1,
}  # fmt: skip
"""Options of sbatch, pyxis and the Container Engine: 0 without a value, 1 with a value, 2 with a value only
after `=`.
"""
SHORT = {
    "a": "array", "A": "account", "b": "begin", "c": "cpus-per-task", "d": "dependency", "D": "chdir",
    "e": "error", "H": "hold", "i": "input", "J": "job-name", "k": "no-kill", "L": "licenses",
    "M": "clusters", "m": "distribution", "n": "ntasks", "N": "nodes", "o": "output", "O": "overcommit",
    "p": "partition", "q": "qos", "Q": "quiet", "s": "oversubscribe", "S": "core-spec", "t": "time",
    "v": "verbose", "W": "wait", "C": "constraint", "F": "nodefile", "w": "nodelist", "x": "exclude",
    "B": "extra-node-info", "G": "gpus", "h": "help", "V": "version",
}  # fmt: skip
_SHELLS = re.compile(r"#!\s*(?:\S*/)?(?:env\s+)?(?:bash|sh|zsh|ksh|dash)\b")
_MARK = "#SBATCH"
_NEARLY = re.compile(r"\s+#SBATCH\s+-|#+\s+SBATCH\s+-|#(?!SBATCH)(?i:sbatch)\s+-")
_COMMENTED_SBATCH = re.compile(r"^\s*#(?!SBATCH).*\bsbatch\b(.*)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOption:
    """An option with its full name. `before` is the value from an earlier line, or None."""

    name: str
    written: str
    value: str
    at: FileLocation
    before: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScript:
    """A script. `shell` is None if the script is not run by a shell.

    `promised` are options that a comment shows for the submission: `# sbatch --time=1:00:00 FILE`.
    """

    name: str
    text: str
    options: Mapping[str, BatchOption]
    shell: Shell | None
    promised: frozenset[str]
    findings: tuple[SubmitFinding, ...]

    def option(self, *names: str) -> BatchOption | None:
        """Return the first of these options that the script sets."""
        return next((self.options[name] for name in names if name in self.options), None)

    def value(self, name: str) -> str:
        return self.options[name].value if name in self.options else ""


def is_batch(text: str, name: str) -> bool:
    """Return whether a file is a batch script, by its name or its #SBATCH lines."""
    return name.endswith((".sbatch", ".slurm")) or re.search(r"^\s*#SBATCH\b", text, re.MULTILINE) is not None


def parse_batch(text: str, name: str) -> BatchScript:
    """Parse a batch script. Raises UsageError for a file that is too long."""
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        raise UsageError(
            "job-file-too-large", f"{name} has more than {MAX_LINES} lines", hint="pass a batch script"
        )
    findings: list[SubmitFinding] = []
    options: dict[str, BatchOption] = {}
    if not text.startswith("#!"):
        message = "sbatch rejects a script whose first line names no interpreter"
        findings.append(wrong(1, "interpreter", message, "start it with #!/bin/bash"))
    if "\r\n" in text:
        message = "the file has Windows line endings, so sbatch rejects it"
        findings.append(wrong(1, "line-ends", message, f"sed -i 's/\\r$//' {name}"))
        lines = text.replace("\r\n", "\n").split("\n")
    command = 0
    for number, line in enumerate(lines, start=1):
        if not command and line.strip() and not line.lstrip().startswith("#"):
            command = number
        if not line.startswith(_MARK) or line[len(_MARK) :][:1] not in ("", " ", "\t"):
            if not command and _NEARLY.match(line):
                message = "sbatch takes this as a comment: it reads only #SBATCH at the start of a line"
                findings.append(advice(number, "comment", message, "write #SBATCH, or ## for a comment"))
            continue
        if command:
            message = f"sbatch ignores options after the first command, which is in line {command}"
            findings.append(wrong(number, "after", message, f"move it above line {command}"))
            continue
        words = list(split_directive(line, number))
        if words and words[0][0] == "hetjob":
            message = "the lines below belong to another part of the job (hetjob) and are not checked"
            findings.append(advice(number, "note", message))
            break
        _read_options(words, options, findings)
    promised = frozenset(
        option
        for command_line in _COMMENTED_SBATCH.findall(text)
        for option in _options_in(command_line)
        if option in LONG
    )
    shell = read_shell(text) if _SHELLS.match(text) or not text.startswith("#!") else None
    return BatchScript(
        name=name, text=text, options=options, shell=shell, promised=promised, findings=tuple(findings)
    )


def _options_in(command_line: str) -> Iterator[str]:
    for word in re.findall(r"(?<!\S)-{1,2}[A-Za-z][A-Za-z-]*", command_line):
        yield word.removeprefix("--") if word.startswith("--") else SHORT.get(word[1:2], "")


def split_directive(line: str, number: int) -> Iterator[tuple[str, FileLocation]]:
    """Yield the words of an #SBATCH line, which has its own quoting rules."""
    position = len(_MARK)
    while position < len(line):
        if line[position] in " \t":
            position += 1
            continue
        if line[position] == "#":
            return
        spot, word, quote = FileLocation(number, position + 1), "", ""
        while position < len(line) and (quote or line[position] not in " \t#"):
            letter = line[position]
            if quote and letter == quote:
                quote = ""
            elif not quote and letter in "\"'":
                quote = letter
            elif letter == "\\" and quote != "'":
                position += 1
                word += line[position : position + 1]
            else:
                word += letter
            position += 1
        if word or line[position - 1] in "\"'":
            yield word, spot


def _read_options(
    words: list[tuple[str, FileLocation]], options: dict[str, BatchOption], findings: list[SubmitFinding]
) -> None:
    rest = iter(words)
    for word, location in rest:
        if word in ("-", "--") or not word.startswith("-"):
            text = f"'{word[:60]}' is not an option, so sbatch rejects the script"
            hint = "quote values with spaces; write the program and its arguments below"
            findings.append(wrong(location.line, "option", text, hint, column=location.column))
            continue
        written, equals, value = word.partition("=")
        if word.startswith("--"):
            name, reason = _full_option_name(written[2:])
            if not name:
                findings.append(_unknown_option(written, reason, location))
                if not equals and reason:
                    next(rest, None)
                continue
        else:
            written, name = word[:2], SHORT.get(word[1], "")
            if not name:
                findings.append(_unknown_option(written, nearest(written[1:], SHORT), location))
                continue
            value, equals = word[2:], word[2:]
        takes = LONG[name]
        if not equals and takes == 1:
            value = next(rest, ("", location))[0]
            if not value:
                text = f"{written} has no value"
                findings.append(
                    wrong(location.line, "option", text, f"write {written}=...", column=location.column)
                )
                continue
        if value.startswith("=") and not word.startswith("--"):
            text = f"{word[:60]}: the = is part of the value"
            findings.append(
                wrong(location.line, "option", text, f"write {written} {value[1:60]}", column=location.column)
            )
            value = value[1:]
        if "$" in value and name not in ("wrap", "export", "comment"):
            text = f"{written} has {value[:60]}, but sbatch does not expand variables there"
            hint = f"write the value, or pass it on submission: sbatch {written}=..."
            findings.append(wrong(location.line, "variable", text, hint, column=location.column))
        earlier = options.get(name)
        before = earlier.value if earlier else None
        options[name] = BatchOption(name=name, written=written, value=value, at=location, before=before)


def _full_option_name(name: str) -> tuple[str, str]:
    """Return the full name of an abbreviated option, or "" and the nearest option."""
    if name in LONG:
        return name, ""
    fitting = [option for option in LONG if name and option.startswith(name)]
    return (fitting[0], "") if len(fitting) == 1 else ("", nearest(name, LONG))


def _unknown_option(written: str, suggestion: str, location: FileLocation) -> SubmitFinding:
    if suggestion:
        dashes = "--" if len(suggestion) > 1 else "-"
        text = (
            f"sbatch has no option {written[:60]} and rejects the script; did you mean {dashes}{suggestion}?"
        )
        return wrong(location.line, "option", text, f"write {dashes}{suggestion}", column=location.column)
    text = f"sbatch has no option {written[:60]}, unless a plugin of the site adds it"
    return advice(location.line, "option", text, "see man sbatch on the cluster", column=location.column)
