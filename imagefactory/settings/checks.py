"""Which values of settings can be used; each fault names the setting and where it was written."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path

from imagefactory.errors import UsageError
from imagefactory.oci.mirrors import split_place, split_tagged
from imagefactory.recipes.match_spec import channel_address
from imagefactory.recipes.values import RULES
from imagefactory.settings.choices import ENGINES, RUNNERS, SITES, SOLVERS, Setting, listed
from imagefactory.settings.files import without_secrets
from imagefactory.settings.own_commands import parse_commands, parse_limit, parse_machines, parse_options

_CHANNEL = re.compile(r"(?:(?:https?|file)://)?[A-Za-z0-9_./:%+~-]+")
_INDEX = re.compile(r"(?:https?|file)://[A-Za-z0-9_./:%+~-]+")
_PLACE = re.compile(r"(?:https?|file)://[A-Za-z0-9_./:%+~-]+|/[^,=\x00-\x1f\x7f]*")
CENTER = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
"""The name of a center. No `.` or `:`, so that `CENTER/TARGET` is never an address of a registry."""
SIF_FOLDER = re.compile(r"(?:osdf://)?(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9_.+-]+)+/?")
"""Where .sif files may lie; a path of it reaches submit files. No part of it is `.` or `..`."""


def check_values(values: Mapping[str, Setting]) -> None:
    """Raises UsageError for the first value, by the setting's name as an attribute, that cannot be used."""
    codec, workers = values["codec"], values["workers"]
    if codec.value not in ("zstd", "gzip"):
        raise UsageError(
            "setting-invalid",
            f"codec: '{codec.value}' ({codec.origin}) is not a codec",
            hint="write zstd or gzip",
        )
    if not workers.value.isascii() or not workers.value.isdigit():
        raise UsageError(
            "setting-invalid",
            f"workers: '{workers.value}' ({workers.origin}) is not a number",
            hint="write 0 or more",
        )
    for name, known in (("engine", tuple(ENGINES)), ("runner", ("", *RUNNERS)), ("site", SITES)):
        setting = values[name]
        if setting.value not in known:
            raise UsageError(
                "setting-invalid",
                f"{name}: '{setting.value}' ({setting.origin}) is not supported",
                hint=f"write {' or '.join(word for word in known if word)}",
            )
    if values["registry"].value:
        _check_place("registry", values["registry"], values["registry"].value)
    for host in listed(values["plain_http"].value):
        if _check_place("plain-http", values["plain_http"], host)[1]:
            raise UsageError(
                "setting-invalid",
                f"plain-http: '{host}' ({values['plain_http'].origin}) is not a host",
                hint='write hosts separated by commas: plain-http = "registry.site:5000,other.site"',
            )
    if values["catalogue"].value and not values["catalogue"].value.startswith("/"):
        _check_place("catalogue", values["catalogue"], values["catalogue"].value, tagged=True)
    for place in listed(values["catalogue_mirrors"].value):
        if not place.startswith("/"):
            _check_place("catalogue-mirrors", values["catalogue_mirrors"], place, tagged=True)
    center = values["center"]
    if center.value and not CENTER.fullmatch(center.value):
        raise UsageError(
            "center-name-invalid",
            f"center: '{without_secrets(center.value)}' ({center.origin}) is not a center name",
            hint="write 1 to 32 lowercase letters, digits, '_' and '-', such as chtc",
        )
    folder = values["sif_folder"]
    if folder.value and not SIF_FOLDER.fullmatch(folder.value):
        raise UsageError(
            "setting-invalid",
            f"sif-folder: '{without_secrets(folder.value)}' ({folder.origin}) is not a place for .sif files",
            hint="write an absolute path or osdf:///PATH, with letters, digits and . _ + - /, without '..'",
        )
    parsers: tuple[tuple[str, Callable[[str], object]], ...] = (
        ("submit_commands", parse_commands),
        ("sbatch_options", parse_options),
        ("sweep_machines", parse_machines),
        ("sweep_gpu_hours", parse_limit),
        ("sweep_jobs", parse_limit),
    )
    for name, parse in parsers:
        try:
            parse(values[name].value)
        except UsageError as error:
            where = f"{name.replace('_', '-')} ({values[name].origin})"
            raise UsageError(error.code, f"{where}: {error.message}", hint=error.hint) from error
    _check_mirrors(values["mirrors"])
    _check_indexes(values["indexes"])
    _check_channels(values["channels"])
    _check_solver(values["solver"])
    if values["certificates"].value:
        _check_certificates(values["certificates"])


def _check_mirrors(setting: Setting) -> None:
    seen = set()
    for item in listed(setting.value):
        prefix, equals, place = item.partition("=")
        if not equals:
            raise UsageError(
                "setting-invalid",
                f"mirrors: '{item.rpartition('@')[2]}' ({setting.origin}) is not HOST=MIRROR",
                hint="write pairs separated by commas: docker.io=registry.example.org/hub,quay.io=...",
            )
        for text in (prefix, place):
            _check_place("mirrors", setting, text)
        if prefix in seen:
            raise UsageError(
                "setting-duplicate",
                f"mirrors: '{prefix}' ({setting.origin}) is a duplicate",
                hint="write one mirror for each host",
            )
        seen.add(prefix)


def _check_indexes(setting: Setting) -> None:
    seen = set()
    for item in listed(setting.value):
        name, _, place = item.partition("=")
        if "@" in item:
            raise UsageError(
                "setting-has-credentials",
                f"indexes ({setting.origin}): a user or password is not allowed here",
                hint="put credentials into ~/.netrc, or use uv's keyring provider",
            )
        if not RULES["index name"].allows(name) or not _INDEX.fullmatch(place):
            raise UsageError(
                "setting-invalid",
                f"indexes: '{without_secrets(item)}' ({setting.origin}) is not NAME=ADDRESS",
                hint="separate several by commas: pytorch-cu128=https://packages.example.org/cu128/simple",
            )
        if name in seen:
            raise UsageError(
                "setting-duplicate",
                f"indexes: '{name}' ({setting.origin}) is a duplicate",
                hint="write one address for each index",
            )
        seen.add(name)


def _check_channels(setting: Setting) -> None:
    seen = set()
    for item in listed(setting.value):
        channel, equals, place = item.partition("=")
        if "@" in item or "/t/" in item:
            raise UsageError(
                "setting-has-credentials",
                f"channels ({setting.origin}): a user, password or token is not allowed here",
                hint="put credentials into ~/.netrc or ~/.rattler/credentials.json ($RATTLER_AUTH_FILE)",
            )
        if not equals or not _CHANNEL.fullmatch(channel) or not _PLACE.fullmatch(place):
            raise UsageError(
                "setting-invalid",
                f"channels: '{without_secrets(item)}' ({setting.origin}) is not CHANNEL=ADDRESS or "
                "CHANNEL=DIRECTORY",
                hint="separate several by commas: conda-forge=https://mirror.example.org/conda-forge",
            )
        if channel_address(channel) in seen:
            raise UsageError(
                "setting-duplicate",
                f"channels: '{channel}' ({setting.origin}) is a duplicate",
                hint="write one place for each channel",
            )
        seen.add(channel_address(channel))
        if place.startswith("/") and not Path(place).is_dir():
            raise UsageError(
                "setting-invalid",
                f"channels: {place} ({setting.origin}) is not a directory",
                hint="write the directory that contains noarch/repodata.json",
            )


def _check_solver(setting: Setting) -> None:
    path = Path(setting.value)  # a relative one would be another program in each folder
    if setting.value in SOLVERS or (path.is_absolute() and path.is_file()):
        return
    raise UsageError(
        "setting-invalid",
        f"solver: '{setting.value}' ({setting.origin}) is not a solver",
        hint=f"write {', '.join(SOLVERS)}, or the absolute path of a conda, mamba or micromamba",
    )


def _check_place(name: str, setting: Setting, text: str, *, tagged: bool = False) -> tuple[str, str]:
    try:
        return split_place(split_tagged(text)[0] if tagged else text)
    except UsageError as error:
        raise UsageError(
            "setting-invalid", f"{name} ({setting.origin}): {error.message}", hint=error.hint
        ) from error


def _check_certificates(setting: Setting) -> None:
    hint = "name a file of PEM certificates (-----BEGIN CERTIFICATE-----), such as your site's CA bundle"
    path = Path(setting.value)
    if (
        not path.is_file() or not setting.value.isprintable() or '"' in setting.value
    ):  # it goes into an apt.conf
        raise UsageError(
            "setting-invalid", f"certificates: {path} ({setting.origin}) is not a file", hint=hint
        )
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            "certificates-unusable",
            f"certificates: cannot use {path} ({setting.origin}): {error.strerror or error}",
            hint=hint,
        ) from error
