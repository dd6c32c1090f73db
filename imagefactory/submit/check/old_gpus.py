"""What files ask of GPUs in the words of old machines, and the same in today's, the meaning kept. Pure.

Machines told of their first GPU in attributes of their own (`CUDACapability`, `CUDA0DeviceName`); now each
GPU has an ad, which `require_gpus` and the commands `gpus_*` ask. Those commands are all "at least" or "at
most", and condor_submit drops them where `require_gpus` names what they compare: so it is all the one or
all the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from imagefactory.errors import UsageError
from imagefactory.gpu.knowledge.tables import read_table
from imagefactory.gpu.knowledge.toolkits import cuda_targets
from imagefactory.schedulers.sizes import MB, format_size
from imagefactory.submit.check.asked import BOUNDS, GPU_ATTRIBUTES
from imagefactory.extras.lint.classads import conjuncts, parse_expression, renamed
from imagefactory.submit.check.findings import Edit, Severity, SubmitFinding
from imagefactory.submit.check.language import Jobs, SubmitSetting

_OLD = re.compile(r"CUDA[0-9]*([A-Za-z]+)", re.IGNORECASE)
_OWN = {name.lower(): name for name in GPU_ATTRIBUTES} | {"runtimeversion": "DriverVersion"}
_PLAIN = re.compile(r"([A-Za-z]+) *(>=|<=|==|=\?=|>|<) *([0-9]+(?:\.[0-9]+)?)")
_TURNED = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(>=|<=|==|=\?=|>|<) *([A-Za-z]+)")
_TURN = {">=": "<=", "<=": ">=", ">": "<", "<": ">", "==": "==", "=?=": "=?="}
_DRIVERS = 100
"""CUDA's versions are below, those of drivers above."""
_WHERE = ("requirements", "require_gpus", "rank")


def own_name(name: str) -> str:
    """What a GPU's own ad calls an attribute of an old machine; empty for any other name."""
    found = _OLD.fullmatch(name)
    return _OWN.get(found[1].lower(), "") if found else ""


def old_gpu_findings(jobs: Jobs, severity: Severity, told: frozenset[str]) -> Iterator[SubmitFinding]:
    """One finding a command that has such names. `told` are names, in small letters, that machines tell."""
    for key in _WHERE:
        names = [name for name in _names(jobs, key) if own_name(name) and name.lower() not in told]
        if not names:
            continue
        setting, what = jobs.settings[key], " and ".join(dict.fromkeys(names))
        own = " and ".join(dict.fromkeys(own_name(name) for name in names))
        text = f"{what} {'is' if len(set(names)) == 1 else 'are'} only on old machines; GPUs have {own}"
        if key == "rank":
            hint = f"write rank = {renamed(jobs.value(key), lambda name: _with(name, 'GPUs_'))}"
            text += ", and machines with equal GPUs have GPUs_..."
            yield _finding(setting, Severity.ADVICE, text, hint)
        elif key == "require_gpus":
            mended = renamed(jobs.value(key), lambda name: _with(name, ""))
            edits = _replaced(setting, (f"{setting.written} = {mended}",))
            yield _finding(setting, Severity.WRONG, text, f"write {mended}", edits)
        else:
            asked = _Asked.of(jobs.value(key))
            text += ", for require_gpus"
            text += f"; and {asked.doubt}" if asked.doubt else ""
            yield _finding(setting, severity, text, _hint(jobs, asked), _edits(jobs, setting, asked))
    version = jobs.settings.get("cuda_version")
    if version and "cudamaxsupportedversion" not in told:
        text = "cuda_version is compared with an attribute that only old machines have"
        line = f"gpus_minimum_runtime = {jobs.value('cuda_version')[:8]}"
        clear = re.fullmatch(r"[0-9]{1,2}(\.[0-9]{1,2})?", jobs.value("cuda_version"))
        free = clear and "gpus_minimum_runtime" not in jobs.settings
        edits = _replaced(version, (line,)) if free and jobs.asks_gpus else ()
        yield _finding(version, severity, text, f"write {line}", edits)


@cache
def is_cuda_alone(number: str) -> bool:
    """Whether it is a version of CUDA, and no GPU has such a capability."""
    capabilities = {group["capability"] for group in read_table("gpus")["group"]}
    return number in cuda_targets() and number not in capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What `requirements` ask of old machines' GPUs, taken apart.

    `commands` say all of it, empty where none do; `clauses` are the same for `require_gpus`. `others` is
    what else is asked; `mixed` is whether GPUs and other things stand in one part. `doubt` says of a number
    that it is no such thing, so that what is meant is guessed.
    """

    commands: tuple[str, ...]
    clauses: tuple[str, ...]
    others: tuple[str, ...]
    mixed: bool
    doubt: str

    @staticmethod
    def of(text: str) -> _Asked:
        commands, clauses, others = list[str](), list[str](), list[str]()
        plain, mixed, doubt = True, False, ""
        for part in conjuncts(text):
            names = parse_expression(part).names
            if not any(own_name(name) for name in names):
                others.append(part)
                continue
            mixed = mixed or not all(own_name(name) for name in names)
            clause = renamed(part, lambda name: _with(name, ""))
            if found := _compared(clause):
                name, how, number = found
                if name == "Capability" and how in (">=", ">") and is_cuda_alone(number):
                    name, clause = "DriverVersion", f"DriverVersion {how} {number}"
                    doubt = f"{number} is a CUDA version, not a compute capability"
                elif name == "DriverVersion" and how in (">=", ">") and float(number) >= _DRIVERS:
                    clause = f'versionGE(NvidiaDriver, "{number}")'
                    doubt = f"{number} is a driver version, but DriverVersion is a CUDA version"
                said = _commands(name, how, number)
                plain = plain and bool(said)
                commands += said
            else:
                plain = False
            clauses.append(clause)
        keys = [line.partition(" ")[0] for line in commands]
        plain = plain and len(set(keys)) == len(keys)
        return _Asked(
            commands=tuple(commands) if plain and not mixed else (),
            clauses=tuple(clauses),
            others=tuple(others),
            mixed=mixed,
            doubt=doubt,
        )

    @property
    def joined(self) -> str:
        return _join(self.clauses)


def _join(parts: tuple[str, ...]) -> str:
    if len(parts) == 1:
        return parts[0]
    return " && ".join(
        f"({part})" if "||" in part or "?" in part.replace("=?=", "") else part for part in parts
    )


def _compared(clause: str) -> tuple[str, str, str] | None:
    """Attribute, comparison and number of a plain one."""
    if found := _PLAIN.fullmatch(clause):
        return found[1], found[2], found[3]
    if found := _TURNED.fullmatch(clause):
        return found[3], _TURN[found[2]], found[1]
    return None


def _commands(name: str, how: str, number: str) -> list[str]:
    """The commands that ask for the very same; none where there are none."""
    if name == "Capability":
        tenths = float(number) * 10
        if tenths != int(tenths):
            return []
        least = {">=": 0, ">": 1, "==": 0, "=?=": 0}.get(how)
        most = {"<=": 0, "<": -1, "==": 0, "=?=": 0}.get(how)
        bounds = (("gpus_minimum_capability", least), ("gpus_maximum_capability", most))
        return [f"{key} = {(int(tenths) + add) / 10:.1f}" for key, add in bounds if add is not None]
    whole = number.isdigit()
    if name == "GlobalMemoryMb" and whole and how in (">=", ">"):
        return [f"gpus_minimum_memory = {format_size((int(number) + (how == '>')) * MB)}"]
    if name == "DriverVersion" and how == ">=" and float(number) < _DRIVERS:
        return [f"gpus_minimum_runtime = {number}"]
    if name == "MaxSupportedVersion" and how == ">=" and whole and int(number) >= 1000:
        return [f"gpus_minimum_runtime = {int(number) // 1000}.{int(number) % 1000 // 10}"]
    return []


def _hint(jobs: Jobs, asked: _Asked) -> str:
    if asked.mixed:
        return "put conditions on GPUs into require_gpus, and those on machines into requirements"
    if "require_gpus" in jobs.settings:
        return f"add it to require_gpus: ... && ({asked.joined})"
    return f"write {' and '.join(asked.commands) or f'require_gpus = {asked.joined}'}"


def _edits(jobs: Jobs, setting: SubmitSetting, asked: _Asked) -> tuple[Edit, ...]:
    """The mended lines, where nothing else in the file says how GPUs are chosen."""
    if asked.mixed or asked.doubt or setting.value != jobs.value(setting.key) or not jobs.asks_gpus:
        return ()
    if any(key in jobs.settings for key in ("require_gpus", *BOUNDS)):
        return ()
    rest = (f"{setting.written} = {_join(asked.others)}",) if asked.others else ()
    return _replaced(setting, (*rest, *(asked.commands or (f"require_gpus = {asked.joined}",))))


def _replaced(setting: SubmitSetting, text: tuple[str, ...]) -> tuple[Edit, ...]:
    return (Edit(first=setting.line, last=setting.end, text=text),)


def _finding(
    setting: SubmitSetting, severity: Severity, message: str, hint: str, edits: tuple[Edit, ...] = ()
) -> SubmitFinding:
    return SubmitFinding(
        line=setting.line, rule="deprecated", severity=severity, message=message, hint=hint, edits=edits
    )


def _with(name: str, prefix: str) -> str:
    own = own_name(name)
    return f"{prefix}{own}" if own else name


def _names(jobs: Jobs, key: str) -> tuple[str, ...]:
    """What an expression names; none where it cannot be read, which has a finding of its own."""
    try:
        text = jobs.value(key)
        return parse_expression(text).names if text else ()
    except UsageError:
        return ()
