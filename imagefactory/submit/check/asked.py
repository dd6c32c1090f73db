"""What a job of a submit file asks of machines and GPUs. Pure.

What becomes of commands was seen with 23.9's `condor_submit -dry-run`: `gpus_minimum_runtime = 12.1` is
`MaxSupportedVersion >= 12010`, and so is 12010; units count behind a plain number alone; any other bound is
an expression, and compared as it is. A bound is dropped without a word where `require_gpus` names what it
compares.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from imagefactory.errors import UsageError
from imagefactory.schedulers.sizes import MB, parse_size
from imagefactory.extras.lint.classads import Expression, Plain, literal, make_ad, parse_expression
from imagefactory.submit.check.language import Jobs

BOUNDS = {
    "gpus_minimum_capability": ("Capability", ">="),
    "gpus_maximum_capability": ("Capability", "<="),
    "gpus_minimum_memory": ("GlobalMemoryMb", ">="),
    "gpus_minimum_runtime": ("MaxSupportedVersion", ">="),
}
"""Commands of condor_submit for GPUs, and what they compare."""
_LEAST_VERSION = 1000
"""As drivers tell CUDA 1.0."""
GPU_ATTRIBUTES = (
    "Id", "Capability", "DeviceName", "DeviceUuid", "DriverVersion", "MaxSupportedVersion", "NvidiaDriver",
    "GlobalMemoryMb", "DevicePciBusId", "ECCEnabled", "ClockMhz", "ComputeUnits", "CoresPerCU",
)  # fmt: skip
"""What condor_gpu_discovery tells of a GPU, with `-extra`. Inventories have the first eight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAsk:
    """What a job asks of a machine. Memory and disk are bytes, 0 where nothing is asked.

    `gpu` holds for GPUs, `requirements` for machines; None where all do. `needs` are attributes of machines
    that must be true. `ad` is what machines are shown of the job. `faults` are (command, what is wrong).
    """

    gpus: int
    cpus: int
    memory: int
    disk: int
    gpu: Expression | None
    requirements: Expression | None
    needs: tuple[str, ...]
    ad: Mapping[str, Plain]
    faults: tuple[tuple[str, str], ...]


def read_asked(jobs: Jobs, needs: tuple[str, ...]) -> JobAsk:
    """What the jobs of one `queue` ask. What cannot be read is a fault, and as if it was not there."""
    reader = _AskReader(jobs)
    memory, disk = reader.size("request_memory", MB), reader.size("request_disk", 1024)
    gpus = (reader.number("request_gpus") or 1) if jobs.asks_gpus else 0
    cpus = reader.number("request_cpus") or 1
    gpu = reader.gpu_expression() if gpus else None
    requirements = reader.expression("requirements", reader.cuda_version())
    asked: dict[str, Plain] = {
        "JobUniverse": 5,
        "RequestGPUs": gpus,
        "RequestCpus": cpus,
        "RequestMemory": memory // MB,
        "RequestDisk": disk // 1024,
    }
    return JobAsk(
        gpus=gpus,
        cpus=cpus,
        memory=memory,
        disk=disk,
        gpu=gpu,
        requirements=requirements,
        needs=needs,
        ad={**asked, **reader.own()},
        faults=tuple(reader.faults),
    )


def cancelled(jobs: Jobs) -> tuple[str, ...]:
    """The bounds that condor_submit drops because `require_gpus` names what they compare."""
    try:
        expression = parse_expression(jobs.value("require_gpus")) if "require_gpus" in jobs.settings else None
    except UsageError:
        return ()
    if expression is None:
        return ()
    return tuple(
        key for key, (name, _) in BOUNDS.items() if key in jobs.settings and expression.names_any(name)
    )


class _AskReader:
    """Reads the commands of one `queue`; what is wrong is kept, so that all of it can be told."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.faults: list[tuple[str, str]] = []

    def value(self, key: str) -> str:
        """Its value; empty where it is not set or where only the submission tells it."""
        if self.jobs.unknown(key):
            return ""
        return self.jobs.value(key)

    def number(self, key: str) -> int:
        text = self.value(key)
        found = _at_first(text) if text else 0
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < 1e6:
            self.faults.append((key, f"'{text[:40]}' is not a number"))
            return 1
        return int(found)

    def size(self, key: str, unit: int) -> int:
        text = self.value(key)
        if not text:
            return 0
        if not (text.isascii() and text.isdigit()):
            with contextlib.suppress(UsageError):
                return parse_size(text)
        found = _at_first(text)
        if isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found < 1e15:
            return int(found * unit)
        self.faults.append((key, f"'{text[:40]}' is not a size"))
        return 0

    def expression(self, key: str, more: str = "") -> Expression | None:
        text = self.value(key)
        both = f"({text}) && {more}" if text and more else text or more
        try:
            return parse_expression(both) if both else None
        except UsageError as error:
            self.faults.append((key, f"{error.message}; {error.hint}"))
            return None

    def gpu_expression(self) -> Expression | None:
        own = self.expression("require_gpus")
        parts = [f"({own.text})"] if own else []
        dropped = cancelled(self.jobs)
        for key, (name, how) in BOUNDS.items():
            text = self.value(key)
            if not text or key in dropped or (key == "gpus_minimum_memory" and text == "0"):
                continue
            number = _bound(key, text, self.own())
            if number is None:
                self.faults.append(
                    (key, f"'{text[:40]}' is not a {'size' if 'memory' in key else 'version'}")
                )
            elif key == "gpus_minimum_runtime" and number < _LEAST_VERSION:
                what = f"'{text[:40]}' is compared as a plain number, which every GPU exceeds"
                self.faults.append((key, f"{what}: write only the version, such as 12.4"))
            else:
                parts.append(f"{name} {how} {number}")
        return parse_expression(" && ".join(parts)) if parts else None

    def own(self) -> dict[str, Plain]:
        """The job's own attributes, as far as the file alone tells them."""
        settings = self.jobs.settings.items()
        found = {
            key.removeprefix("my."): literal(self.jobs.value(one.key))
            for key, one in settings
            if key[:3] == "my."
        }
        return {key: value for key, value in found.items() if value is not None}

    def cuda_version(self) -> str:
        """condor_submit compares it with an attribute of old machines, in an encoding of its own."""
        text = self.value("cuda_version")
        found = re.fullmatch(r"([0-9]{1,2})(?:\.([0-9]{1,2}))?", text)
        return (
            f"{int(found[1]) * 1000 + int(found[2] or 0)} <= TARGET.CUDAMaxSupportedVersion" if found else ""
        )


def _at_first(text: str, own: Mapping[str, Plain] | None = None) -> Plain | None:
    """What an expression comes to before the job ran: of itself it knows no `MemoryUsage` then."""
    try:
        return parse_expression(text).value(make_ad(own or {}), make_ad({}))
    except UsageError:
        return None


def _bound(key: str, text: str, own: Mapping[str, Plain]) -> int | float | None:
    """The number that a bound compares with: capabilities as they are, MB, 12.1 as 12010."""
    if key == "gpus_minimum_memory":
        with contextlib.suppress(UsageError):
            return -(-parse_size(text) // MB)
    elif key == "gpus_minimum_runtime" and (
        version := re.fullmatch(r"([0-9]{1,3})(?:\.([0-9]{1,2}))?", text)
    ):
        return int(version[1]) * 1000 + int(version[2] or 0) * 10
    found = _at_first(text, own)
    return found if isinstance(found, int | float) and not isinstance(found, bool) else None
