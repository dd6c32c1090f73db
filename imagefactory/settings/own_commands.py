"""Settings for the jobs of sweeps and of `job write`: submit commands, sbatch options, limits of sweeps.

    submit-commands    lines of an HTCondor submit file: accounting_group = ..., priority = ..., +WantX = true
    sbatch-options     options of sbatch: --account=... --partition=... --qos=... --time=...
    site-mounts        paths of the nodes that jobs bind into images: /opt/plugin, /usr/lib64/ofi:/opt/ofi
    sweep-machines     names of machines with * and ?; a ! excludes names: gpu* !gpu07
    sweep-gpu-hours    the limit of GPU hours of a sweep
    sweep-jobs         the limit of jobs of a sweep at the same time

Commands and options that imagefactory writes are errors here. Sources: HTCondor manual, condor_submit(1);
Slurm manual, sbatch(1).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from datetime import timedelta

from imagefactory.errors import UsageError

REQUIREMENTS, TIME = "requirements", "--time"
MOST_PATTERNS, LONGEST_PATTERNS = 100, 1000
_COMMANDS = frozenset({
    "universe", "container_image", "docker_image", "executable", "arguments", "initialdir", "input",
    "output", "error", "log", "queue", "include", "transfer_executable", "transfer_input_files",
    "transfer_output_files", "transfer_checkpoint_files", "transfer_container", "should_transfer_files",
    "when_to_transfer_output", "max_transfer_output_mb", "checkpoint_exit_code", "ulog_execute_attrs",
    "request_cpus", "request_memory", "request_disk", "request_gpus", "require_gpus",
    "gpus_minimum_capability", "gpus_maximum_capability", "gpus_minimum_memory", "gpus_minimum_runtime",
    "allowed_execute_duration", "job_lease_duration", "periodic_remove", "notification", "elsewhere", "first",
})  # fmt: skip
_OPTIONS = frozenset({
    "--job-name", "--array", "--output", "--error", "--open-mode", "--requeue", "--no-requeue", "--nodes",
    "--ntasks", "--cpus-per-task", "--mem", "--mem-per-cpu", "--mem-per-gpu", "--gres", "--gpus",
    "--gpus-per-node", "--gpus-per-task", "--constraint", "--exclude", "--deadline", "--signal", "--chdir",
    "--wrap",
})  # fmt: skip
_COMMAND = re.compile(r"([A-Za-z+][A-Za-z0-9_.+]{0,99})[ \t]*=[ \t]*([^\x00-\x1f\x7f\\{}]{1,500})")
_OPTION = re.compile(r"(--[a-z][a-z-]{1,50})(?:=[A-Za-z0-9_.,:/@%+=-]{1,500})?")
_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9_.+-]{1,255}){1,40}")
_MACHINE = re.compile(r"!?[A-Za-z0-9*?][A-Za-z0-9_.*?-]{0,254}")
_TIME = re.compile(r"(?:(?P<days>[0-9]+)-)?(?P<rest>[0-9]+(?::[0-9]+){0,2})")


def parse_commands(text: str) -> tuple[str, ...]:
    """Return the lines of `submit-commands` as `NAME = VALUE`. Raises UsageError."""
    commands: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        match = _COMMAND.fullmatch(line)
        if match is None:
            raise UsageError(
                "submit-command-invalid",
                f"'{line[:80]}' is not a submit command",
                hint="write NAME = VALUE, one on each line",
            )
        _check(match[1].lower(), _COMMANDS, commands)
        commands[match[1].lower()] = f"{match[1]} = {match[2].strip()}"
    return tuple(commands.values())


def parse_mounts(text: str) -> tuple[str, ...]:
    """Return the paths of `site-mounts` as `SOURCE:TARGET`. Raises UsageError."""
    mounts = []
    for item in filter(None, map(str.strip, text.split(","))):
        source, colon, target = item.partition(":")
        target = target if colon else source
        if not _PATH.fullmatch(source) or not _PATH.fullmatch(target):
            raise UsageError(
                "site-mount-invalid",
                f"'{item[:80]}' is not a mount",
                hint="write /PATH or /PATH:/PATH-IN-IMAGE, with letters, digits and . _ + - /, without '..'",
            )
        mounts.append(f"{source}:{target}")
    return tuple(mounts)


def parse_options(text: str) -> tuple[str, ...]:
    """Return the words of `sbatch-options`. Raises UsageError."""
    options: dict[str, str] = {}
    for word in text.split():
        match = _OPTION.fullmatch(word)
        if match is None:
            raise UsageError(
                "sbatch-option-invalid",
                f"'{word[:80]}' is not a long option of sbatch",
                hint="write --account=NAME --partition=NAME",
            )
        _check(match[1], _OPTIONS, options)
        options[match[1]] = word
    if TIME in options and time_of(options.values()) is None:
        raise UsageError(
            "sbatch-option-invalid",
            f"'{options[TIME][:80]}' is not a time",
            hint="write hours:minutes:seconds, such as --time=12:00:00",
        )
    return tuple(options.values())


def _check(name: str, own_names: Collection[str], names: Collection[str]) -> None:
    if name in own_names:
        raise UsageError(
            "submit-command-reserved", f"imagefactory sets '{name}' itself", hint=f"remove '{name}'"
        )
    if name in names:
        raise UsageError("setting-duplicate", f"'{name}' appears twice", hint="delete one of the two lines")


def split_requirements(commands: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the commands without `requirements`, and the expressions of `requirements`."""
    rest, needs = [], []
    for line in commands:
        name, _, value = line.partition(" = ")
        if name.lower() == REQUIREMENTS:
            needs.append(f"({value})")
        else:
            rest.append(line)
    return tuple(rest), tuple(needs)


def names_of(commands: Iterable[str]) -> frozenset[str]:
    """Return the names of the commands in lower case."""
    return frozenset(line.partition(" = ")[0].lower() for line in commands)


def parse_machines(text: str) -> tuple[str, ...]:
    """Return the patterns of `sweep-machines`. Raises UsageError."""
    patterns = tuple(dict.fromkeys(text.replace(",", " ").split()))
    for pattern in patterns:
        if not _MACHINE.fullmatch(pattern):
            raise UsageError(
                "machine-name-invalid",
                f"'{pattern[:80]}' is not a machine name",
                hint="write names with commas, * and ? for any letters, ! before those to avoid: gpu*,!gpu07",
            )
    if len(patterns) > MOST_PATTERNS or len(text) > LONGEST_PATTERNS:
        raise UsageError(
            "machine-list-too-long",
            f"more than {MOST_PATTERNS} machine names, or {LONGEST_PATTERNS} characters",
            hint="write one pattern for many machines: gpu*",
        )
    return patterns


def machine_expressions(patterns: Iterable[str]) -> tuple[str, str]:
    """Return two regular expressions, for included and for excluded names. An empty one matches any name.

    Python and HTCondor ClassAds interpret them in the same way. A name also matches by its first labels:
    `gpu07`.
    """
    every = tuple(patterns)

    def joined(chosen: list[str]) -> str:
        words = (word.replace(".", "[.]").replace("*", ".*").replace("?", ".") for word in chosen)
        return f"^({'|'.join(words)})([.].*)?$" if chosen else ""

    included = [pattern for pattern in every if not pattern.startswith("!")]
    return joined(included), joined(
        [pattern.removeprefix("!") for pattern in every if pattern.startswith("!")]
    )


def is_machine_selected(machine: str, patterns: Iterable[str]) -> bool:
    """Return whether jobs may run on a machine. For `glidein_7@gpu01`, only the last part counts."""
    name = machine.rpartition("@")[2]
    included, avoided = machine_expressions(patterns)
    if avoided and re.search(avoided, name, re.IGNORECASE):
        return False
    return not included or re.search(included, name, re.IGNORECASE) is not None


def parse_limit(text: str) -> int:
    """Return the number of `sweep-gpu-hours` or `sweep-jobs`, 0 for none. Raises UsageError."""
    if text and not re.fullmatch(r"[1-9][0-9]{0,6}", text):
        raise UsageError(
            "limit-invalid",
            f"'{text[:80]}' is not an integer of at least 1",
            hint="leave it empty for no limit",
        )
    return int(text or 0)


def time_of(options: Iterable[str]) -> timedelta | None:
    """Return the time limit in sbatch options, None for none or zero."""
    text = next((option.partition("=")[2] for option in options if option.startswith(f"{TIME}=")), "")
    return parse_time(text) or None


def parse_time(text: str) -> timedelta | None:
    """Parse a time in the format of sbatch: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
    ...
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    parts = [min(int(part), 10**6) for part in match["rest"].split(":")]
    if match["days"]:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return timedelta(days=min(int(match["days"]), 10**5), hours=hours, minutes=minutes, seconds=seconds)
    if len(parts) == 3:
        return timedelta(hours=parts[0], minutes=parts[1], seconds=parts[2])
    return timedelta(minutes=parts[0], seconds=parts[1] if len(parts) == 2 else 0)
