"""Rules for the commands of a submit file: one function for each rule, and a table of rules. Pure functions.

Each finding says how condor_submit interprets a line, and what to write instead. Observed with `-dry-run` of
23.9.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache

from imagefactory.errors import UsageError
from imagefactory.extras.lint.classads import MAX_EXPRESSION, conjuncts, literal, parse_expression, renamed
from imagefactory.extras.lint.findings import LineEdit, Severity, SubmitFinding, advice, wrong
from imagefactory.extras.lint.reach import BOUNDS, GPU_ATTRIBUTES, JobRequest, cancelled
from imagefactory.extras.lint.reader import ALIASES, QueueStatement, SubmitSetting
from imagefactory.gpu.knowledge.tables import read_table
from imagefactory.gpu.knowledge.toolkits import cuda_targets
from imagefactory.schedulers.sites import RETIRED, Site, SiteCommand
from imagefactory.schedulers.sizes import MB, format_size
from imagefactory.versions import nearest

# --- Submit commands, without those for grids, clouds and virtual machines. Pure
# Source: HTCondor's manual, condor_submit, and the table of names in its source (25.x, 2026-08). The two CHTC
# commands: its guide 'Scale Beyond Local HTC Capacity' (2026-08).


COMMANDS = frozenset((
    "accounting_group", "accounting_group_user", "allow_startup_script", "allowed_execute_duration",
    "allowed_job_duration", "append_files", "arguments", "arguments2", "batch_name", "buffer_files",
    "buffer_size", "checkpoint_destination", "checkpoint_exit_code", "compress_files", "concurrency_limits",
    "concurrency_limits_expr", "container_image", "container_is_common", "container_mount_automatically",
    "container_service_names", "container_target_dir", "copy_to_spool", "core_size",
    "cron_day_of_month", "cron_day_of_week",
    "cron_hour", "cron_minute", "cron_month", "cron_prep_time", "cron_window", "cuda_version",
    "deferral_prep_time", "deferral_time", "deferral_window", "delegate_job_gsi_credentials_lifetime",
    "description", "disk_usage", "docker_image", "docker_network_type", "docker_override_entrypoint",
    "docker_pull_policy", "docker_send_credentials", "dont_encrypt_input_files",
    "dont_encrypt_output_files", "email_attributes", "encrypt_execute_directory", "encrypt_input_files",
    "encrypt_output_files", "env", "environment", "environment2", "erase_output_and_error_on_restart",
    "error", "executable", "exit_requirements", "fetch_files", "file_remaps", "get_env", "getenv",
    "gpus_maximum_capability", "gpus_minimum_capability", "gpus_minimum_memory", "gpus_minimum_runtime",
    "grid_resource", "hold", "hold_kill_sig", "image_size", "image_size_kb", "initial_dir", "initialdir",
    "input", "interactive_args", "interactive_executable", "job_ad_information_attrs", "job_iwd",
    "job_lease_duration", "job_machine_attrs", "job_machine_attrs_history_length", "job_max_vacate_time",
    "jobset", "keep_claim_idle", "kill_sig", "kill_sig_timeout", "leave_in_queue", "load_profile",
    "local_files", "log", "log_xml", "machine_count", "manifest", "manifest_dir", "match_list_length",
    "materialize_max_idle", "max_idle", "max_job_retirement_time", "max_materialize", "max_retries",
    "max_transfer_input_mb", "max_transfer_output_mb", "memory_usage", "mount_under_scratch",
    "next_job_start_delay", "nice_user", "node_count", "noop_job", "noop_job_exit_code",
    "noop_job_exit_signal", "notification", "notify_user", "on_evict_checks", "on_exit_hold",
    "on_exit_hold_reason", "on_exit_hold_subcode", "on_exit_remove", "output", "output_destination",
    "output_directory", "parallel_script_shadow", "parallel_script_starter", "periodic_hold",
    "periodic_hold_reason", "periodic_hold_subcode", "periodic_release", "periodic_remove",
    "periodic_vacate", "preferences", "preserve_relative_paths", "primary_unix_group", "prio", "priority",
    "project_name", "public_input_files", "rank", "remote_initialdir", "remove_kill_sig", "rendezvousdir",
    "request_cpus", "request_disk", "request_gpu_memory", "request_gpus", "request_memory", "request_swap",
    "require_gpus", "requirement_suffix", "requirements", "retry_request_disk", "retry_request_memory",
    "retry_request_memory_increase", "retry_request_memory_max", "retry_until", "run_as_owner",
    "scitokens_file", "shell", "should_transfer_files", "skip_if_dataflow", "stack_size", "starter_debug",
    "starter_log", "stderr", "stdin", "stdout", "stream_error", "stream_input", "stream_output",
    "submit_event_notes", "submit_event_notes_attrs", "submit_event_user_notes", "success_exit_code",
    "suspend_job_at_exec", "transfer_checkpoint_files", "transfer_common_input", "transfer_container",
    "transfer_error", "transfer_executable", "transfer_input", "transfer_input_files", "transfer_output",
    "transfer_output_files", "transfer_output_remaps", "transfer_plugins", "ulog_execute_attrs", "universe",
    "use_oauth_services", "use_scitoken", "use_scitokens", "use_x509userproxy", "want_ads",
    "want_campus_pools", "want_graceful_removal", "want_io_proxy", "want_job_networking", "want_ospool",
    "when_to_transfer_output", "x509userproxy",
))  # fmt: skip


# --- Translate GPU conditions for old machines into current commands with the same meaning. Pure
# Old machines had attributes for their first GPU (`CUDACapability`, `CUDA0DeviceName`). Now each GPU has an
# ad, to which `require_gpus` and the `gpus_*` commands apply. Those commands are all lower or upper bounds,
# and condor_submit drops them if `require_gpus` names the same attribute. So a file uses either one or the
# other.


_OLD = re.compile(r"CUDA[0-9]*([A-Za-z]+)", re.IGNORECASE)
_OWN = {name.lower(): name for name in GPU_ATTRIBUTES} | {"runtimeversion": "DriverVersion"}
_PLAIN = re.compile(r"([A-Za-z]+) *(>=|<=|==|=\?=|>|<) *([0-9]+(?:\.[0-9]+)?)")
_TURNED = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(>=|<=|==|=\?=|>|<) *([A-Za-z]+)")
_TURN = {">=": "<=", "<=": ">=", ">": "<", "<": ">", "==": "==", "=?=": "=?="}
_DRIVERS = 100
"""CUDA versions are lower than this number, driver versions are higher."""
_CHECKED_COMMANDS = ("requirements", "require_gpus", "rank")


def own_name(name: str) -> str:
    """Return the GPU attribute for an old machine attribute, or ""."""
    match = _OLD.fullmatch(name)
    return _OWN.get(match[1].lower(), "") if match else ""


def old_gpu_findings(
    jobs: QueueStatement, severity: Severity, machine_names: frozenset[str]
) -> Iterator[SubmitFinding]:
    """Report each command with old names. `machine_names` are machine attributes in lower case."""
    for key in _CHECKED_COMMANDS:
        names = [
            name for name in _gpu_names(jobs, key) if own_name(name) and name.lower() not in machine_names
        ]
        if not names:
            continue
        setting, names_text = jobs.settings[key], " and ".join(dict.fromkeys(names))
        attribute_names = " and ".join(dict.fromkeys(own_name(name) for name in names))
        verb = "is" if len(set(names)) == 1 else "are"
        text = f"{names_text} {verb} only on old machines; GPUs have {attribute_names}"
        if key == "rank":
            hint = f"write rank = {renamed(jobs.value(key), lambda name: _with(name, 'GPUs_'))}"
            text += ", and machines with equal GPUs have GPUs_..."
            yield _finding(setting, Severity.ADVICE, text, hint)
        elif key == "require_gpus":
            fixed = renamed(jobs.value(key), lambda name: _with(name, ""))
            edits = _replaced(setting, (f"{setting.written} = {fixed}",))
            yield _finding(setting, Severity.WRONG, text, f"write {fixed}", edits)
        else:
            old = _OldGpuRequirements.of(jobs.value(key))
            text += ", for require_gpus"
            text += f"; and {old.doubt}" if old.doubt else ""
            yield _finding(setting, severity, text, _hint(jobs, old), _edits(jobs, setting, old))
    version = jobs.settings.get("cuda_version")
    if version and "cudamaxsupportedversion" not in machine_names:
        text = "cuda_version is compared with an attribute that only old machines have"
        line = f"gpus_minimum_runtime = {jobs.value('cuda_version')[:8]}"
        clear = re.fullmatch(r"[0-9]{1,2}(\.[0-9]{1,2})?", jobs.value("cuda_version"))
        free = clear and "gpus_minimum_runtime" not in jobs.settings
        edits = _replaced(version, (line,)) if free and jobs.requests_gpus else ()
        yield _finding(version, severity, text, f"write {line}", edits)


@cache
def is_only_cuda(number: str) -> bool:
    """Return whether the number is a CUDA version but not a compute capability."""
    capabilities = {group["capability"] for group in read_table("gpus")["group"]}
    return number in cuda_targets() and number not in capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class _OldGpuRequirements:
    """The parsed conditions in `requirements` on the GPUs of old machines.

    `commands` are the equivalent commands, empty if there are none. `clauses` are the equivalent for
    `require_gpus`. `others` are the remaining conditions. `mixed` is true if one condition combines GPUs with
    other attributes. `doubt` means that a number has the wrong type, so that its meaning is a guess.
    """

    commands: tuple[str, ...]
    clauses: tuple[str, ...]
    others: tuple[str, ...]
    mixed: bool
    doubt: str

    @staticmethod
    def of(text: str) -> _OldGpuRequirements:
        commands, clauses, others = list[str](), list[str](), list[str]()
        plain, mixed, doubt = True, False, ""
        for part in conjuncts(text):
            names = parse_expression(part).names
            if not any(own_name(name) for name in names):
                others.append(part)
                continue
            mixed = mixed or not all(own_name(name) for name in names)
            clause = renamed(part, lambda name: _with(name, ""))
            if comparison := _compared(clause):
                name, how, number = comparison
                if name == "Capability" and how in (">=", ">") and is_only_cuda(number):
                    name, clause = "DriverVersion", f"DriverVersion {how} {number}"
                    doubt = f"{number} is a CUDA version, not a compute capability"
                elif name == "DriverVersion" and how in (">=", ">") and float(number) >= _DRIVERS:
                    clause = f'versionGE(NvidiaDriver, "{number}")'
                    doubt = f"{number} is a driver version, but DriverVersion is a CUDA version"
                lines = _commands(name, how, number)
                plain = plain and bool(lines)
                commands += lines
            else:
                plain = False
            clauses.append(clause)
        keys = [line.partition(" ")[0] for line in commands]
        plain = plain and len(set(keys)) == len(keys)
        return _OldGpuRequirements(
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
    """Return attribute, operator and number of a simple comparison, else None."""
    if match := _PLAIN.fullmatch(clause):
        return match[1], match[2], match[3]
    if match := _TURNED.fullmatch(clause):
        return match[3], _TURN[match[2]], match[1]
    return None


def _commands(name: str, how: str, number: str) -> list[str]:
    """Return the equivalent submit commands, empty if there are none."""
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


def _hint(jobs: QueueStatement, old: _OldGpuRequirements) -> str:
    if old.mixed:
        return "put conditions on GPUs into require_gpus, and those on machines into requirements"
    if "require_gpus" in jobs.settings:
        return f"add it to require_gpus: ... && ({old.joined})"
    return f"write {' and '.join(old.commands) or f'require_gpus = {old.joined}'}"


def _edits(jobs: QueueStatement, setting: SubmitSetting, old: _OldGpuRequirements) -> tuple[LineEdit, ...]:
    """Return the corrected lines if no other command in the file selects GPUs."""
    if old.mixed or old.doubt or setting.value != jobs.value(setting.key) or not jobs.requests_gpus:
        return ()
    if any(key in jobs.settings for key in ("require_gpus", *BOUNDS)):
        return ()
    rest = (f"{setting.written} = {_join(old.others)}",) if old.others else ()
    return _replaced(setting, (*rest, *(old.commands or (f"require_gpus = {old.joined}",))))


def _replaced(setting: SubmitSetting, text: tuple[str, ...]) -> tuple[LineEdit, ...]:
    return (LineEdit(first=setting.line, last=setting.end, text=text),)


def _finding(
    setting: SubmitSetting, severity: Severity, message: str, hint: str, edits: tuple[LineEdit, ...] = ()
) -> SubmitFinding:
    return SubmitFinding(
        line=setting.line, rule="deprecated", severity=severity, message=message, hint=hint, edits=edits
    )


def _with(name: str, prefix: str) -> str:
    attribute = own_name(name)
    return f"{prefix}{attribute}" if attribute else name


def _gpu_names(jobs: QueueStatement, key: str) -> tuple[str, ...]:
    """Return the names in an expression. Invalid expressions have a separate finding."""
    try:
        text = jobs.value(key)
        return parse_expression(text).names if text else ()
    except UsageError:
        return ()


_CHECKED_SETTINGS = (
    "universe", "container_image", "docker_image", "requirements", "require_gpus", *BOUNDS, "request_gpus",
    "request_cpus", "request_memory", "request_disk",
)  # fmt: skip
_ALIKE = re.compile(r"g(pu|pus|pu_s)_|_gpus?$|^require_?gpu|^gpus|^container_|^docker_image|^cuda_")
_RESOURCES = {
    "gpu": "request_gpus", "cpu": "request_cpus", "core": "request_cpus", "cores": "request_cpus",
    "mem": "request_memory", "ram": "request_memory", "storage": "request_disk",
}  # fmt: skip
"""Common wrong names of resources. Any other name may be a custom resource of a machine."""
_CLOSE = 0.9
"""The similarity (of 1) above which a name is a misspelled command."""
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
_WORD = re.compile(r"[A-Za-z_]+")
_LITERALS = ("true", "false", "undefined", "error")
_COMMENT = re.compile(r"(?:^|\s)(#.*)")
_MACHINE = re.compile(
    r'(?:TARGET\s*\.\s*)?(?:Machine|UtsnameNodename)\s*(?:==|=\?=)\s*"([^"]+)"', re.IGNORECASE
)


def command_findings(jobs: QueueStatement, request: JobRequest) -> Iterator[SubmitFinding]:
    """Yield the findings of all rules for one `queue`."""
    for key, message in request.faults:
        if not _comment_in(jobs, key):  # a comment has a separate finding
            hint = f"write {key} = 1 or more" if "number" in message else f"write {key} = 8GB, say"
            hint = hint if key.startswith("request_") else ""
            yield wrong(jobs.settings[key].line, "unreadable", f"{key}: {message}", hint)
    for rule in RULES:
        yield from rule(jobs)


# --- the rules -----------------------------------------------------------------------------------


def _cancelled(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    """Report ignored bounds. Source: condor_submit manual on `gpus_*` and `require_gpus`."""
    for key in cancelled(jobs):
        name, line = BOUNDS[key][0], jobs.settings["require_gpus"].line
        yield wrong(
            jobs.settings[key].line,
            "cancelled",
            f"condor_submit silently ignores {key}, because require_gpus (line {line}) names {name}",
            f"add it to require_gpus, or remove {name} from there",
        )


def _overwritten(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    for key in _CHECKED_SETTINGS:
        setting = jobs.settings.get(key)
        if setting and setting.before and setting.before.value != setting.value:
            text = f"{setting.written} is set again, which overrides line {setting.before.line}"
            joined = "join both with && in one line" if key.startswith("require") else "remove one of them"
            yield wrong(setting.line, "overwritten", text, joined)


def _without_request(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    if jobs.requests_gpus:
        return
    keys = [key for key in ("require_gpus", *BOUNDS) if key in jobs.settings]
    if jobs.settings.get("my.wantgpulab") and not keys:
        keys = ["my.wantgpulab"]
    for key in keys:
        setting = jobs.settings[key]
        text = f"{setting.written} has no effect, because the job requests no GPU"
        yield wrong(setting.line, "no-request", text, "write request_gpus = 1")


def _flat(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    for name in sorted(_names(jobs, "requirements")):
        own = next((attribute for attribute in GPU_ATTRIBUTES if name == f"gpus_{attribute.lower()}"), "")
        if own:
            text = f"GPUs_{own} exists only on machines whose GPUs are all equal"
            yield advice(jobs.settings["requirements"].line, "flat", text, f"use {own} in require_gpus")


def _misplaced(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    """Report attributes that are undefined in this command, so that no machine matches."""
    known = {name.lower(): name for name in GPU_ATTRIBUTES}
    for name in sorted(_names(jobs, "require_gpus")):
        if name.startswith("gpus_") and name.removeprefix("gpus_") in known:
            attribute = known[name.removeprefix("gpus_")]
            text = f"require_gpus is evaluated for each GPU, where the attribute is {attribute}"
            yield wrong(jobs.settings["require_gpus"].line, "misplaced", text, f"write {attribute}")
        elif own_name(name):
            continue  # has a separate finding
        elif (near := nearest(name, known)) and name not in known and name not in _my_names(jobs):
            text = f"GPUs have no attribute '{name}'; did you mean {known[near]}?"
            yield wrong(jobs.settings["require_gpus"].line, "misplaced", text, f"write {known[near]}")
    for name in sorted(_names(jobs, "requirements") & {*known} - {"id"}):
        text = f"{known[name]} is an attribute of GPUs, so it is undefined for machines and nothing matches"
        yield wrong(jobs.settings["requirements"].line, "misplaced", text, "use it in require_gpus")
    text = jobs.value("require_gpus")
    if re.search(r"\btarget\s*\.", text, re.IGNORECASE):
        reason = "TARGET. is undefined in require_gpus, which sees only the ad of a GPU, so nothing matches"
        yield wrong(jobs.settings["require_gpus"].line, "misplaced", reason, "write only the name")


def _misspelt(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    """Report misspelled commands, which condor_submit accepts as macros."""
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


def _unquoted(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    """Report strings without quotes: `+GPUJobLength = short` names an undefined attribute."""
    for key, setting in jobs.settings.items():
        if not key.startswith("my.") or jobs.unknown(key) or "$$" in setting.value:
            continue
        value = jobs.value(key)
        if _WORD.fullmatch(value):
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


def _comments(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    """Report comments after a value. `#` starts a comment only at the start of a line."""
    for key in _COMMENTED:
        if comment := _comment_in(jobs, key):
            setting = jobs.settings[key]
            part = "the file name" if key in _NAMES_OF_FILES else "the value"
            text = f"'{comment[:30]}' is not a comment here, but part of {part}"
            value = setting.value.removesuffix(comment).rstrip()
            edits = (
                LineEdit(
                    first=setting.line, last=setting.end, text=(comment, f"{setting.written} = {value}")
                ),
            )
            hint = "write the comment on its own line"
            yield wrong(setting.line, "comment", text, hint, edits=edits if value else ())


def _pinned(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    if machine := _single_machine(jobs):
        text = f"jobs run only on {machine[:60]}, and wait while it is busy or down"
        hint = "request what that machine has: gpus_minimum_capability, gpus_minimum_memory"
        yield advice(jobs.settings["requirements"].line, "pinned", text, hint)


def _single_machine(jobs: QueueStatement) -> str:
    """Return the machine if `requirements` allow only one, else ""."""
    for part in conjuncts(jobs.value("requirements")):
        if match := _MACHINE.fullmatch(part.strip()):
            return match[1]
    return ""


def _cuda_as_capability(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    for key in ("gpus_minimum_capability", "gpus_maximum_capability"):
        value = jobs.value(key)
        if is_only_cuda(value):
            text = f"{value} is a CUDA version, not a compute capability"
            yield advice(jobs.settings[key].line, "capability", text, f"write gpus_minimum_runtime = {value}")


def _undefined(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    for key in _CHECKED_SETTINGS:
        for name in jobs.undefined(key):
            text = f"$({name}) is not set in this file, so it is empty unless a DAG or the site sets it"
            yield advice(
                jobs.settings[key].line, "undefined", text, f"set {name}, or write $({name}:default)"
            )
        if unknown := jobs.unknown(key):
            text = f"{key} is not checked: the value of {unknown} is known only when jobs are submitted"
            yield advice(jobs.settings[key].line, "unknown", text)


def _units(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    """Report small numbers without a unit, which probably mean GB."""
    for key, most, unit in (
        ("gpus_minimum_memory", 256, "MB"),
        ("request_memory", 64, "MB"),
        ("request_disk", 1024, "KB"),
    ):
        text = jobs.value(key)
        if text.isascii() and text.isdigit() and 0 < int(text) < most:
            reason = f"{key} = {text} is {text} {unit}"
            yield wrong(jobs.settings[key].line, "unit", reason, f"write the unit: {key} = {text}GB")


def _retries(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    """Check the sizes and expressions for retries. Source: HTCondor version history, 25.6.1."""
    for key, unit in (("retry_request_memory", "MB"), ("retry_request_disk", "KB")):
        text = jobs.value(key) if key in jobs.settings and not jobs.unknown(key) else ""
        for size in map(str.strip, re.split(r",(?![^({\[]*[)}\]])", text)) if text else ():
            line = jobs.settings[key].line
            if size.isascii() and size.isdigit():
                yield advice(
                    line, "unit", f"{size} in {key} is {size} {unit}", f"write the unit: {size}{unit}"
                )
            elif re.fullmatch(r"[0-9.]+ ?[KMGT]", size, re.IGNORECASE):
                reason = f"{size} in {key}: pools before HTCondor 25.6.1 silently ignore it"
                yield advice(line, "unit", reason, f"write {size}B")
            elif not re.fullmatch(r"[0-9.]+ ?[KMGT]B", size, re.IGNORECASE) and not _is_expression(size):
                message = f"{key}: '{size[:40]}' is not a size or expression"
                yield wrong(line, "unreadable", message, "write 16GB, or RequestMemory * 2")


def _backwards(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    low, high = (literal(jobs.value(f"gpus_{word}_capability") or "0") for word in ("minimum", "maximum"))
    numbers = isinstance(low, int | float) and isinstance(high, int | float)
    if numbers and high and low > high:  # type: ignore[operator]
        setting = jobs.settings["gpus_maximum_capability"]
        text = f"the highest capability, {high}, is below the lowest, {low}, so nothing matches"
        yield wrong(setting.line, "backwards", text, "write the lower one as gpus_minimum_capability")


RULES: tuple[Callable[[QueueStatement], Iterator[SubmitFinding]], ...] = (
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
    """Return the correct command for a misspelled name, "" for a macro of the user."""
    if key.startswith("request_"):
        if key.removeprefix("request_") in _RESOURCES:
            return _RESOURCES[key.removeprefix("request_")]
    elif _ALIKE.search(key):
        return nearest(key, _CHECKED_SETTINGS)
    near = nearest(key, COMMANDS)
    same = near.replace("_", "") == key.replace("_", "")  # the name of the attribute, which counts too
    plural = near in (key.removesuffix("s"), key.rstrip("0123456789_"))
    alike = SequenceMatcher(None, near, key).ratio() >= _CLOSE
    return near if near and alike and not same and not plural else ""


def _instead(setting: SubmitSetting, line: str) -> tuple[LineEdit, ...]:
    return (LineEdit(first=setting.line, last=setting.end, text=(line,)),)


def _comment_in(jobs: QueueStatement, key: str) -> str:
    setting = jobs.settings.get(key)
    match = _COMMENT.search(setting.value) if setting else None
    return match[1] if match and '"' not in match[1] else ""


def _is_expression(text: str) -> bool:
    try:
        parse_expression(text)
    except UsageError:
        return False
    return True


def _names(jobs: QueueStatement, key: str) -> set[str]:
    """Return the attributes in an expression in lower case, empty if it is invalid."""
    try:
        text = jobs.value(key)
        return {name.lower() for name in parse_expression(text).names} if text else set()
    except UsageError:
        return set()


def _my_names(jobs: QueueStatement) -> set[str]:
    return {key.removeprefix("my.") for key in jobs.settings if key.startswith("my.")}


def _used(jobs: QueueStatement, key: str) -> bool:
    """Return whether another command uses this macro."""
    word = re.compile(rf"\$\({re.escape(key)}[:)]", re.IGNORECASE)
    others: tuple[SubmitSetting, ...] = tuple(jobs.settings.values())
    return any(word.search(setting.value) for setting in others)


# --- Site rules: what a site's documentation requires of a submit file. Pure
# The severity depends on the site. Sources: `schedulers/sites.toml`.


_TRUE = ("true", "t", "yes", "1")


def site_findings(jobs: QueueStatement, site: Site) -> Iterator[SubmitFinding]:
    """Yield the findings of the site's rules for one `queue`."""
    if jobs.requests_gpus:
        for command in site.commands:
            yield from _commanded(jobs, site, command)
        yield from _length(jobs, site)
    yield from _needed(jobs, site)
    yield from _environment(jobs, site)
    yield from _retired(jobs)


def _commanded(jobs: QueueStatement, site: Site, command: SiteCommand) -> Iterator[SubmitFinding]:
    key, _, value = (part.strip() for part in command.line.partition("="))
    mine = f"my.{key.removeprefix('+').lower()}"
    if jobs.value(mine).lower() == value.lower():
        return
    setting = jobs.settings.get(mine)
    message = f"is {jobs.value(mine)[:40]}" if setting else "is missing"
    location = setting.line if setting else jobs.line
    if command.agreed:
        text = f"{key} {message}: without it, the shared GPUs of {site.title} never match"
        yield wrong(location, "site", text, f"write {command.line}")
    else:
        text = f"{key} {message}, and it may be required: {command.why}"
        yield advice(location, "site", text, f"write {command.line}, which does no harm")


def _length(jobs: QueueStatement, site: Site) -> Iterator[SubmitFinding]:
    lengths = [row.line for row in site.lengths]
    if not lengths:
        return
    key = lengths[0].partition("=")[0].strip()
    mine = f"my.{key.removeprefix('+').lower()}"
    values = [line.partition("=")[2].strip() for line in lengths]
    if mine not in jobs.settings:
        text = f"{key} is missing: {site.title} assumes its usual length for this job"
        yield advice(jobs.line, "site", text, f"write one of {', '.join(lengths)}")
    elif not jobs.unknown(mine) and jobs.value(mine).lower() not in (value.lower() for value in values):
        text = f"{key} is {jobs.value(mine)[:40]}, which is not a job length of {site.title}"
        yield wrong(jobs.settings[mine].line, "site", text, f"write one of {', '.join(lengths)}")


def _needed(jobs: QueueStatement, site: Site) -> Iterator[SubmitFinding]:
    for need in site.needs:
        if need.key in jobs.settings or f"my.{need.key.replace('_', '')}" in jobs.settings:
            continue
        report = wrong if need.refused else advice
        yield report(jobs.line, "missing", f"{need.key} is missing: {need.why}", f"write {need.write}")


def _environment(jobs: QueueStatement, site: Site) -> Iterator[SubmitFinding]:
    if jobs.value("getenv").lower() not in _TRUE:
        return
    setting = jobs.settings["getenv"]
    hint = "list only the variables that the job needs: getenv = ONE, OTHER"
    if site.getenv:
        yield wrong(setting.line, "getenv", f"getenv = true: {site.getenv}", hint)
    else:
        text = "getenv = true copies all variables of your shell, with paths of this machine; some pools"
        yield advice(setting.line, "getenv", f"{text} reject it", hint)


def _retired(jobs: QueueStatement) -> Iterator[SubmitFinding]:
    for setting in jobs.settings.values():
        for old in RETIRED:
            if old.start not in setting.value:
                continue
            edits = _renamed(setting, old.start, old.instead) if old.same else ()
            report = wrong if old.gone else advice
            text = f"'{old.start}': {old.why}"
            yield report(setting.line, "retired", text, f"write {old.instead}", edits=edits)


def _renamed(setting: SubmitSetting, old: str, new: str) -> tuple[LineEdit, ...]:
    if setting.end != setting.line:
        return ()
    line = f"{setting.written} = {setting.value.replace(old, new)}"
    return (LineEdit(first=setting.line, last=setting.end, text=(line,)),)
