"""What is wrong with the commands of a submit file by themselves: one function a rule, a table of them. Pure.

Each rule says what condor_submit does with a line and what to write instead. Seen with 23.9's `-dry-run`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from imagefactory.errors import UsageError
from imagefactory.pools.sites import Site
from imagefactory.submit.check.asked import BOUNDS, GPU_ATTRIBUTES, JobAsk, cancelled
from imagefactory.submit.check.classads import literal, parse_expression
from imagefactory.submit.check.language import ALIASES, Jobs, SubmitSetting
from imagefactory.versions import nearest


class Severity(StrEnum):
    """WRONG: jobs fail, wait for ever or are not what they seem. ADVICE: it can be had better."""

    WRONG = "wrong"
    ADVICE = "advice"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitFinding:
    """One thing about a file. `rule` is a word for tables, `hint` what to write."""

    line: int
    rule: str
    severity: Severity
    message: str
    hint: str = ""


def wrong(line: int, rule: str, message: str, hint: str = "") -> SubmitFinding:
    return SubmitFinding(line=line, rule=rule, severity=Severity.WRONG, message=message, hint=hint)


def advice(line: int, rule: str, message: str, hint: str = "") -> SubmitFinding:
    return SubmitFinding(line=line, rule=rule, severity=Severity.ADVICE, message=message, hint=hint)


DEPRECATED = {
    "CUDACapability": ("Capability", "gpus_minimum_capability = 8.0"),
    "CUDADriverVersion": ("DriverVersion", "gpus_minimum_runtime = 12.4"),
    "CUDARuntimeVersion": ("DriverVersion", "gpus_minimum_runtime = 12.4"),
    "CUDAMaxSupportedVersion": ("MaxSupportedVersion", "gpus_minimum_runtime = 12.4"),
    "CUDAGlobalMemoryMb": ("GlobalMemoryMb", "gpus_minimum_memory = 20GB"),
    "CUDADeviceName": ("DeviceName", 'require_gpus = DeviceName == "NVIDIA A100-SXM4-40GB"'),
}
"""Attributes of old machines: what GPUs tell instead, in nested ads of their own, and what to write."""
_LOOKED_AT = (
    "universe", "container_image", "docker_image", "requirements", "require_gpus", *BOUNDS, "request_gpus",
    "request_cpus", "request_memory", "request_disk",
)  # fmt: skip
_ALIKE = re.compile(r"g(pu|pus|pu_s)_|_gpus?$|^request_|^require|^gpus|^container_|^docker_image|^cuda")
_KNOWN = (
    *_LOOKED_AT, "cuda_version", "request_gpu_memory", "docker_network_type", "docker_pull_policy",
    "container_service_names", "container_target_dir", "docker_override_entrypoint", "requirement_suffix",
    "docker_send_credentials", "container_mount_automatically", "request_swap",
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


def command_findings(jobs: Jobs, asked: JobAsk) -> Iterator[SubmitFinding]:
    """All that the table of rules has to say of one `queue`."""
    for key, what in asked.faults:
        yield wrong(jobs.settings[key].line, "unreadable", f"{key}: {what}")
    for rule in RULES:
        yield from rule(jobs)


def site_findings(jobs: Jobs, site: Site) -> Iterator[SubmitFinding]:
    """What the site's own pages ask of jobs with GPUs; each of its lines has one attribute."""
    if not jobs.asks_gpus:
        return
    for line in site.commands:
        key, _, value = (part.strip() for part in line.partition("="))
        mine = f"my.{key.removeprefix('+').lower()}"
        if jobs.value(mine).lower() != value.lower():
            what = "is missing" if mine not in jobs.settings else f"is {jobs.value(mine)[:40]}"
            where = jobs.settings[mine].line if mine in jobs.settings else jobs.line
            why = f"{key} {what}: without it the GPUs that {site.title} shares never match"
            yield wrong(where, "site", why, f"write {line}")
    lengths = [one.line for one in site.lengths]
    if not lengths:
        return
    key = lengths[0].partition("=")[0].strip()
    mine = f"my.{key.removeprefix('+').lower()}"
    values = [line.partition("=")[2].strip() for line in lengths]
    if mine not in jobs.settings:
        text = f"{key} is missing: {site.title} takes its usual length for this job"
        yield advice(jobs.line, "site", text, f"write one of {', '.join(lengths)}")
    elif jobs.value(mine).lower() not in (value.lower() for value in values):
        text = f"{key} is {jobs.value(mine)[:40]}, which {site.title} does not know"
        yield wrong(jobs.settings[mine].line, "site", text, f"write one of {', '.join(lengths)}")


# --- the rules -----------------------------------------------------------------------------------


def _cancelled(jobs: Jobs) -> Iterator[SubmitFinding]:
    """condor_submit's manual: what `require_gpus` names is not added from `gpus_*`."""
    for key in cancelled(jobs):
        name, line = BOUNDS[key][0], jobs.settings["require_gpus"].line
        yield wrong(
            jobs.settings[key].line,
            "cancelled",
            f"{key} is ignored without a word, because require_gpus (line {line}) names {name}",
            f"write it into require_gpus, or take {name} out of there",
        )


def _overwritten(jobs: Jobs) -> Iterator[SubmitFinding]:
    for key in _LOOKED_AT:
        setting = jobs.settings.get(key)
        if setting and setting.before and setting.before.value != setting.value:
            text = f"{setting.written} is set again: line {setting.before.line} counts no more"
            joined = "join both with && in one line" if key.startswith("require") else "take one of them away"
            yield wrong(setting.line, "overwritten", text, joined)


def _without_request(jobs: Jobs) -> Iterator[SubmitFinding]:
    if jobs.asks_gpus:
        return
    keys = [key for key in ("require_gpus", *BOUNDS) if key in jobs.settings]
    if jobs.settings.get("my.wantgpulab") and not keys:
        keys = ["my.wantgpulab"]
    for key in keys:
        setting = jobs.settings[key]
        text = f"{setting.written} does nothing, because the job requests no GPU"
        yield wrong(setting.line, "no-request", text, "write request_gpus = 1")


def _deprecated(jobs: Jobs) -> Iterator[SubmitFinding]:
    if setting := jobs.settings.get("cuda_version"):
        text = "cuda_version is compared with CUDAMaxSupportedVersion of the machine, in another encoding"
        yield wrong(setting.line, "deprecated", text, f"write gpus_minimum_runtime = {setting.value[:8]}")
    for key in ("requirements", "require_gpus", "rank"):
        for name, (own, write) in DEPRECATED.items():
            if name.lower() in _names(jobs, key):
                text = f"{name} is of old machines; GPUs have {own}, in ads of their own"
                asked = re.search(rf"\b{name}\s*>=\s*([0-9.]+)", jobs.value(key), re.IGNORECASE)
                write = re.sub(r"[0-9]+\.[0-9]+", asked[1], write) if asked else write
                yield wrong(jobs.settings[key].line, "deprecated", text, f"write {write}")


def _flat(jobs: Jobs) -> Iterator[SubmitFinding]:
    for name in sorted(_names(jobs, "requirements")):
        own = next((one for one in GPU_ATTRIBUTES if name == f"gpus_{one.lower()}"), "")
        if own:
            text = f"GPUs_{own} holds what all GPUs of a machine share: one with mixed GPUs has none"
            yield advice(jobs.settings["requirements"].line, "flat", text, f"ask for {own} in require_gpus")


def _misplaced(jobs: Jobs) -> Iterator[SubmitFinding]:
    """Names that mean nothing where they stand: undefined, and nothing matches."""
    known = {name.lower(): name for name in GPU_ATTRIBUTES}
    for name in sorted(_names(jobs, "require_gpus")):
        if name.startswith("gpus_") and name.removeprefix("gpus_") in known:
            own = known[name.removeprefix("gpus_")]
            text = f"require_gpus is asked of each GPU, and there it is called {own}"
            yield wrong(jobs.settings["require_gpus"].line, "misplaced", text, f"write {own}")
        elif (near := nearest(name, known)) and name not in known and name not in _my_names(jobs):
            text = f"no GPU tells '{name}'; did you mean {known[near]}?"
            yield wrong(jobs.settings["require_gpus"].line, "misplaced", text, f"write {known[near]}")
    for name in sorted(_names(jobs, "requirements") & {*known} - {"id"}):
        text = f"{known[name]} is told of GPUs, not of machines: there it is undefined, and nothing matches"
        yield wrong(jobs.settings["requirements"].line, "misplaced", text, "ask for it in require_gpus")
    text = jobs.value("require_gpus")
    if re.search(r"\btarget\s*\.", text, re.IGNORECASE):
        why = "TARGET. is undefined in require_gpus, which is asked in the GPU's own ad: nothing matches"
        yield wrong(jobs.settings["require_gpus"].line, "misplaced", why, "write the name alone")


def _misspelt(jobs: Jobs) -> Iterator[SubmitFinding]:
    """condor_submit takes every name for a macro: a wrong one is a warning at most."""
    for key, setting in jobs.settings.items():
        if key in _SITES_OWN:
            text = f"{setting.written} is a macro that nothing uses: the job's attribute needs a +"
            yield wrong(setting.line, "misspelt", text, f"write +{setting.written} = {setting.value[:40]}")
        elif _ALIKE.search(key) and key not in {*_KNOWN, *ALIASES} and not _used(jobs, key):
            near = _nearest(key)
            if near and not key.startswith("my."):
                text = f"'{setting.written}' is no command; did you mean {near}?"
                yield wrong(setting.line, "misspelt", text, f"write {near}")


def _unquoted(jobs: Jobs) -> Iterator[SubmitFinding]:
    """`+GPUJobLength = short` asks for the attribute `short`, which is undefined."""
    for key, setting in jobs.settings.items():
        if (
            key.startswith("my.")
            and _WHOLE_WORDS.fullmatch(jobs.value(key))
            and literal(jobs.value(key)) is None
        ):
            text = f"{setting.written} is the attribute '{jobs.value(key)[:40]}', not a text"
            yield wrong(setting.line, "unquoted", text, f'write {setting.written} = "{jobs.value(key)[:40]}"')


def _undefined(jobs: Jobs) -> Iterator[SubmitFinding]:
    for key in _LOOKED_AT:
        for name in jobs.undefined(key):
            text = f"$({name}) is not set in this file, and empty unless a DAG or the site sets it"
            yield advice(
                jobs.settings[key].line, "undefined", text, f"set {name}, or write $({name}:default)"
            )
        if unknown := jobs.unknown(key):
            text = f"{key} is not judged: what {unknown} comes to is known when jobs are submitted"
            yield advice(jobs.settings[key].line, "unknown", text)


def _units(jobs: Jobs) -> Iterator[SubmitFinding]:
    for key, most in (("gpus_minimum_memory", 256), ("request_memory", 64), ("request_disk", 1 << 20)):
        text = jobs.value(key)
        if text.isascii() and text.isdigit() and 0 < int(text) < most:
            unit = "KB" if key == "request_disk" else "MB"
            why = f"{key} = {text} is {text} {unit}"
            yield wrong(jobs.settings[key].line, "unit", why, f"write the unit: {key} = {text}GB")
        elif key == "gpus_minimum_memory" and text.isascii() and text.isdigit():
            yield advice(jobs.settings[key].line, "unit", f"{key} = {text} is in MB", f"write {text}MB")


def _backwards(jobs: Jobs) -> Iterator[SubmitFinding]:
    low, high = (literal(jobs.value(f"gpus_{word}_capability") or "0") for word in ("minimum", "maximum"))
    numbers = isinstance(low, int | float) and isinstance(high, int | float)
    if numbers and high and low > high:  # type: ignore[operator]
        setting = jobs.settings["gpus_maximum_capability"]
        text = f"the highest capability, {high}, is below the lowest, {low}: nothing matches"
        yield wrong(setting.line, "backwards", text, "write the lower one as gpus_minimum_capability")


RULES: tuple[Callable[[Jobs], Iterator[SubmitFinding]], ...] = (
    _cancelled,
    _overwritten,
    _without_request,
    _deprecated,
    _flat,
    _misplaced,
    _misspelt,
    _unquoted,
    _undefined,
    _units,
    _backwards,
)


@cache
def _nearest(key: str) -> str:
    return nearest(key, _KNOWN)


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
