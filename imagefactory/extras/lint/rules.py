"""What is wrong with the commands of a submit file by themselves: one function a rule, a table of them. Pure.

Each rule says what condor_submit does with a line and what to write instead. Seen with 23.9's `-dry-run`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from functools import cache

from imagefactory.errors import UsageError
from imagefactory.submit.check.asked import BOUNDS, GPU_ATTRIBUTES, JobAsk, cancelled
from imagefactory.extras.lint.classads import MAX_EXPRESSION, conjuncts, literal, parse_expression
from imagefactory.submit.check.commands import COMMANDS
from imagefactory.submit.check.findings import Edit, SubmitFinding, advice, wrong
from imagefactory.submit.check.language import ALIASES, Jobs, SubmitSetting
from imagefactory.submit.check.old_gpus import is_cuda_alone, own_name
from imagefactory.versions import nearest

_LOOKED_AT = (
    "universe", "container_image", "docker_image", "requirements", "require_gpus", *BOUNDS, "request_gpus",
    "request_cpus", "request_memory", "request_disk",
)  # fmt: skip
_ALIKE = re.compile(r"g(pu|pus|pu_s)_|_gpus?$|^require_?gpu|^gpus|^container_|^docker_image|^cuda_")
_RESOURCES = {
    "gpu": "request_gpus", "cpu": "request_cpus", "core": "request_cpus", "cores": "request_cpus",
    "mem": "request_memory", "ram": "request_memory", "storage": "request_disk",
}  # fmt: skip
"""Resources by names that people give them; any other name may be one of the machine's own."""
_CLOSE = 0.9
"""How alike a name and a command are, of 1, that nobody means to be two."""
_NAMES_OF_FILES = (
    "executable", "input", "output", "error", "log", "initialdir", "transfer_input_files",
    "transfer_output_files", "docker_image", "container_image",
)  # fmt: skip
_COMMENTED = (
    *_NAMES_OF_FILES, "universe", "should_transfer_files", "when_to_transfer_output", "getenv",
    "notification", "stream_output", "stream_error", "requirements", "require_gpus", *BOUNDS,
    "request_gpus", "request_cpus", "request_memory", "request_disk",
)  # fmt: skip
_SITES_OWN = (
    "wantgpulab",
    "gpujoblength",
    "is_resumable",
    "jobdurationcategory",
    "wantflocking",
    "wantglidein",
)
_WHOLE_WORDS = re.compile(r"[A-Za-z_]+")
_LITERALS = ("true", "false", "undefined", "error")
_COMMENT = re.compile(r"(?:^|\s)(#.*)")
_MACHINE = re.compile(
    r'(?:TARGET\s*\.\s*)?(?:Machine|UtsnameNodename)\s*(?:==|=\?=)\s*"([^"]+)"', re.IGNORECASE
)


def command_findings(jobs: Jobs, asked: JobAsk) -> Iterator[SubmitFinding]:
    """All that the table of rules has to say of one `queue`."""
    for key, what in asked.faults:
        if not _comment_in(jobs, key):  # which has a finding of its own
            hint = f"write {key} = 1 or more" if "number" in what else f"write {key} = 8GB, say"
            hint = hint if key.startswith("request_") else ""
            yield wrong(jobs.settings[key].line, "unreadable", f"{key}: {what}", hint)
    for rule in RULES:
        yield from rule(jobs)


# --- the rules -----------------------------------------------------------------------------------


def _cancelled(jobs: Jobs) -> Iterator[SubmitFinding]:
    """condor_submit's manual: what `require_gpus` names is not added from `gpus_*`."""
    for key in cancelled(jobs):
        name, line = BOUNDS[key][0], jobs.settings["require_gpus"].line
        yield wrong(
            jobs.settings[key].line,
            "cancelled",
            f"condor_submit silently ignores {key}, because require_gpus (line {line}) names {name}",
            f"add it to require_gpus, or remove {name} from there",
        )


def _overwritten(jobs: Jobs) -> Iterator[SubmitFinding]:
    for key in _LOOKED_AT:
        setting = jobs.settings.get(key)
        if setting and setting.before and setting.before.value != setting.value:
            text = f"{setting.written} is set again, which overrides line {setting.before.line}"
            joined = "join both with && in one line" if key.startswith("require") else "remove one of them"
            yield wrong(setting.line, "overwritten", text, joined)


def _without_request(jobs: Jobs) -> Iterator[SubmitFinding]:
    if jobs.asks_gpus:
        return
    keys = [key for key in ("require_gpus", *BOUNDS) if key in jobs.settings]
    if jobs.settings.get("my.wantgpulab") and not keys:
        keys = ["my.wantgpulab"]
    for key in keys:
        setting = jobs.settings[key]
        text = f"{setting.written} has no effect, because the job requests no GPU"
        yield wrong(setting.line, "no-request", text, "write request_gpus = 1")


def _flat(jobs: Jobs) -> Iterator[SubmitFinding]:
    for name in sorted(_names(jobs, "requirements")):
        own = next((one for one in GPU_ATTRIBUTES if name == f"gpus_{one.lower()}"), "")
        if own:
            text = f"GPUs_{own} exists only on machines whose GPUs are all equal"
            yield advice(jobs.settings["requirements"].line, "flat", text, f"use {own} in require_gpus")


def _misplaced(jobs: Jobs) -> Iterator[SubmitFinding]:
    """Names that mean nothing where they stand: undefined, and nothing matches."""
    known = {name.lower(): name for name in GPU_ATTRIBUTES}
    for name in sorted(_names(jobs, "require_gpus")):
        if name.startswith("gpus_") and name.removeprefix("gpus_") in known:
            own = known[name.removeprefix("gpus_")]
            text = f"require_gpus is evaluated for each GPU, where the attribute is {own}"
            yield wrong(jobs.settings["require_gpus"].line, "misplaced", text, f"write {own}")
        elif own_name(name):
            continue  # which has a finding of its own
        elif (near := nearest(name, known)) and name not in known and name not in _my_names(jobs):
            text = f"GPUs have no attribute '{name}'; did you mean {known[near]}?"
            yield wrong(jobs.settings["require_gpus"].line, "misplaced", text, f"write {known[near]}")
    for name in sorted(_names(jobs, "requirements") & {*known} - {"id"}):
        text = f"{known[name]} is an attribute of GPUs, so it is undefined for machines and nothing matches"
        yield wrong(jobs.settings["requirements"].line, "misplaced", text, "use it in require_gpus")
    text = jobs.value("require_gpus")
    if re.search(r"\btarget\s*\.", text, re.IGNORECASE):
        why = "TARGET. is undefined in require_gpus, which sees only the ad of a GPU, so nothing matches"
        yield wrong(jobs.settings["require_gpus"].line, "misplaced", why, "write only the name")


def _misspelt(jobs: Jobs) -> Iterator[SubmitFinding]:
    """condor_submit takes every name for a macro: a wrong one is a warning at most."""
    for key, setting in jobs.settings.items():
        if key in {*COMMANDS, *ALIASES} or key.startswith("my.") or key in jobs.used or _used(jobs, key):
            continue
        if key in _SITES_OWN:
            text = f"{setting.written} is an unused macro: a job attribute requires a +"
            line = f"+{setting.written} = {setting.value}"
            yield wrong(setting.line, "misspelt", text, f"write {line[:60]}", edits=_instead(setting, line))
        elif near := _meant(key):
            text = f"'{setting.written}' is not a command; did you mean {near}?"
            edits = () if near in jobs.settings else _instead(setting, f"{near} = {setting.value}")
            yield wrong(setting.line, "misspelt", text, f"write {near}", edits=edits)


def _unquoted(jobs: Jobs) -> Iterator[SubmitFinding]:
    """`+GPUJobLength = short` asks for an attribute, which is undefined; `+A = a/b.sif` is refused."""
    for key, setting in jobs.settings.items():
        if not key.startswith("my.") or jobs.unknown(key) or "$$" in setting.value:
            continue
        value = jobs.value(key)
        if _WHOLE_WORDS.fullmatch(value):
            if value.lower() in _LITERALS or value.lower() in _my_names(jobs):
                continue
            text = f"{setting.written} is the attribute '{value[:40]}', not a string"
        elif value and len(value) <= MAX_EXPRESSION and not _is_expression(value):
            text = f"{setting.written}: '{value[:40]}' is not a value of an attribute; strings require quotes"
        else:
            continue
        line = f'{setting.written} = "{value}"'
        edits = () if '"' in value or setting.value != value else _instead(setting, line)
        yield wrong(setting.line, "unquoted", text, f"write {line[:60]}", edits=edits)


def _comments(jobs: Jobs) -> Iterator[SubmitFinding]:
    """`#` begins a comment at the beginning of a line alone."""
    for key in _COMMENTED:
        if comment := _comment_in(jobs, key):
            setting = jobs.settings[key]
            part = "the file name" if key in _NAMES_OF_FILES else "the value"
            text = f"'{comment[:30]}' is not a comment here, but part of {part}"
            value = setting.value.removesuffix(comment).rstrip()
            edits = (
                Edit(first=setting.line, last=setting.end, text=(comment, f"{setting.written} = {value}")),
            )
            hint = "write the comment on its own line"
            yield wrong(setting.line, "comment", text, hint, edits=edits if value else ())


def _pinned(jobs: Jobs) -> Iterator[SubmitFinding]:
    if machine := _one_machine(jobs):
        text = f"jobs run only on {machine[:60]}, and wait while it is busy or down"
        hint = "request what that machine has: gpus_minimum_capability, gpus_minimum_memory"
        yield advice(jobs.settings["requirements"].line, "pinned", text, hint)


def _one_machine(jobs: Jobs) -> str:
    """The one machine that `requirements` leave; empty where they leave more or it is not known."""
    for part in conjuncts(jobs.value("requirements")):
        if found := _MACHINE.fullmatch(part.strip()):
            return found[1]
    return ""


def _cuda_as_capability(jobs: Jobs) -> Iterator[SubmitFinding]:
    for key in ("gpus_minimum_capability", "gpus_maximum_capability"):
        value = jobs.value(key)
        if is_cuda_alone(value):
            text = f"{value} is a CUDA version, not a compute capability"
            yield advice(jobs.settings[key].line, "capability", text, f"write gpus_minimum_runtime = {value}")


def _undefined(jobs: Jobs) -> Iterator[SubmitFinding]:
    for key in _LOOKED_AT:
        for name in jobs.undefined(key):
            text = f"$({name}) is not set in this file, so it is empty unless a DAG or the site sets it"
            yield advice(
                jobs.settings[key].line, "undefined", text, f"set {name}, or write $({name}:default)"
            )
        if unknown := jobs.unknown(key):
            text = f"{key} is not checked: the value of {unknown} is known only when jobs are submitted"
            yield advice(jobs.settings[key].line, "unknown", text)


def _units(jobs: Jobs) -> Iterator[SubmitFinding]:
    """Numbers without a unit that only make sense as GB: nobody asks for 16 MB."""
    for key, most, unit in (
        ("gpus_minimum_memory", 256, "MB"),
        ("request_memory", 64, "MB"),
        ("request_disk", 1024, "KB"),
    ):
        text = jobs.value(key)
        if text.isascii() and text.isdigit() and 0 < int(text) < most:
            why = f"{key} = {text} is {text} {unit}"
            yield wrong(jobs.settings[key].line, "unit", why, f"write the unit: {key} = {text}GB")


def _retries(jobs: Jobs) -> Iterator[SubmitFinding]:
    """A list of sizes and expressions, each for one more try. HTCondor's version history, 25.6.1."""
    for key, unit in (("retry_request_memory", "MB"), ("retry_request_disk", "KB")):
        text = jobs.value(key) if key in jobs.settings and not jobs.unknown(key) else ""
        for one in map(str.strip, re.split(r",(?![^({\[]*[)}\]])", text)) if text else ():
            line = jobs.settings[key].line
            if one.isascii() and one.isdigit():
                yield advice(line, "unit", f"{one} in {key} is {one} {unit}", f"write the unit: {one}{unit}")
            elif re.fullmatch(r"[0-9.]+ ?[KMGT]", one, re.IGNORECASE):
                why = f"{one} in {key}: pools before HTCondor 25.6.1 silently ignore it"
                yield advice(line, "unit", why, f"write {one}B")
            elif not re.fullmatch(r"[0-9.]+ ?[KMGT]B", one, re.IGNORECASE) and not _is_expression(one):
                what = f"{key}: '{one[:40]}' is not a size or expression"
                yield wrong(line, "unreadable", what, "write 16GB, or RequestMemory * 2")


def _backwards(jobs: Jobs) -> Iterator[SubmitFinding]:
    low, high = (literal(jobs.value(f"gpus_{word}_capability") or "0") for word in ("minimum", "maximum"))
    numbers = isinstance(low, int | float) and isinstance(high, int | float)
    if numbers and high and low > high:  # type: ignore[operator]
        setting = jobs.settings["gpus_maximum_capability"]
        text = f"the highest capability, {high}, is below the lowest, {low}, so nothing matches"
        yield wrong(setting.line, "backwards", text, "write the lower one as gpus_minimum_capability")


RULES: tuple[Callable[[Jobs], Iterator[SubmitFinding]], ...] = (
    _cancelled,
    _overwritten,
    _without_request,
    _flat,
    _misplaced,
    _misspelt,
    _unquoted,
    _comments,
    _pinned,
    _cuda_as_capability,
    _undefined,
    _units,
    _retries,
    _backwards,
)


@cache
def _meant(key: str) -> str:
    """The command that a name is a misspelling of; empty for a macro of one's own."""
    if key.startswith("request_"):
        if key.removeprefix("request_") in _RESOURCES:
            return _RESOURCES[key.removeprefix("request_")]
    elif _ALIKE.search(key):
        return nearest(key, _LOOKED_AT)
    near = nearest(key, COMMANDS)
    same = near.replace("_", "") == key.replace("_", "")  # the name of the attribute, which counts too
    plural = near in (key.removesuffix("s"), key.rstrip("0123456789_"))
    alike = SequenceMatcher(None, near, key).ratio() >= _CLOSE
    return near if near and alike and not same and not plural else ""


def _instead(setting: SubmitSetting, line: str) -> tuple[Edit, ...]:
    return (Edit(first=setting.line, last=setting.end, text=(line,)),)


def _comment_in(jobs: Jobs, key: str) -> str:
    setting = jobs.settings.get(key)
    found = _COMMENT.search(setting.value) if setting else None
    return found[1] if found and '"' not in found[1] else ""


def _is_expression(text: str) -> bool:
    try:
        parse_expression(text)
    except UsageError:
        return False
    return True


def _names(jobs: Jobs, key: str) -> set[str]:
    """The attributes that an expression names, in small letters; none where it cannot be read."""
    try:
        text = jobs.value(key)
        return {name.lower() for name in parse_expression(text).names} if text else set()
    except UsageError:
        return set()


def _my_names(jobs: Jobs) -> set[str]:
    return {key.removeprefix("my.") for key in jobs.settings if key.startswith("my.")}


def _used(jobs: Jobs, key: str) -> bool:
    """Whether another command has it as a macro."""
    word = re.compile(rf"\$\({re.escape(key)}[:)]", re.IGNORECASE)
    others: tuple[SubmitSetting, ...] = tuple(jobs.settings.values())
    return any(word.search(one.value) for one in others)
