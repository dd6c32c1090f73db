"""Asks what a build or push needs whether it works: engines, package index, Debian's archive, registry."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from imagefactory.doctor.facts import Probe
from imagefactory.engines.build_secrets import find_secrets
from imagefactory.engines.docker import DockerEngine
from imagefactory.errors import FactoryError, ToolError
from imagefactory.lock.conda.channels import find_channels
from imagefactory.lock.conda.own_tool import find_tool
from imagefactory.lock.debian.archive import reach
from imagefactory.lock.debian.sources import find_mirror
from imagefactory.lock.pypi.index import PackageIndex, find_index, trusting
from imagefactory.lock.pypi.uv import UvLocker
from imagefactory.oci.credentials import find_credentials
from imagefactory.oci.layout import Layout
from imagefactory.oci.mirrors import split_place
from imagefactory.recipes.read import read_bases
from imagefactory.runners.apptainer_command import ApptainerCommand
from imagefactory.runners.docker_daemon import DockerDaemon
from imagefactory.settings.choices import SOLVERS
from imagefactory.settings.load import Settings
from imagefactory.web import Patience, redact

SECONDS = 10
"""How long one thing of the network may take to answer."""


def ask_all(settings: Settings, environ: Mapping[str, str]) -> tuple[Probe, ...]:
    """Asks engines, package index, Debian's archive and the registry, all at once: each may be slow."""
    questions: dict[str, Callable[[], str]] = {
        "docker": lambda: _ask_docker(settings, environ),
        "apptainer": lambda: _ask_apptainer(environ),
        "conda": lambda: _ask_conda(settings, environ),
        "package index": lambda: _ask_index(settings, environ),
        "debian mirror": lambda: _ask_mirror(settings, environ),
    }
    if settings.registry.value:
        questions["registry"] = lambda: _ask_registry(settings, environ)
    with ThreadPoolExecutor(len(questions)) as pool:
        return tuple(pool.map(lambda name: _ask(name, questions[name]), questions))


def _ask(name: str, question: Callable[[], str]) -> Probe:
    try:
        return Probe(name=name, found=question())
    except FactoryError as error:
        return Probe(name=name, refusal=error.message, remedy=error.hint)
    except ModuleNotFoundError as error:
        extra = name if name in ("docker", "apptainer") else "build"
        return Probe(
            name=name,
            refusal=f"{error.name} is not installed",
            remedy=f"pip install 'imagefactory[{extra}]'",
        )


def _index(settings: Settings, environ: Mapping[str, str]) -> PackageIndex:
    found = find_index(settings.index, environ=environ, prefix=Path(sys.prefix))
    return trusting(found, settings.certificates_path)


def _ask_docker(settings: Settings, environ: Mapping[str, str]) -> str:
    engine = DockerEngine(
        Layout(settings.store_path),
        DockerDaemon(environ),
        codec=settings.codec.value,
        secrets=lambda _: find_secrets(_index(settings, environ), environ),
    )
    return engine.require()


def _ask_apptainer(environ: Mapping[str, str]) -> str:
    return f"apptainer {ApptainerCommand(environ).require(building=True)}"


def _ask_conda(settings: Settings, environ: Mapping[str, str]) -> str:
    """What solves and links conda's packages. Channels are not asked: recipes say which."""
    try:
        found = f"py-rattler {importlib.metadata.version('py-rattler')}"
    except importlib.metadata.PackageNotFoundError:
        raise ToolError("py-rattler is not installed", hint="pip install 'imagefactory[conda]'") from None
    solver = settings.solver.value
    if solver != SOLVERS[0]:
        found += f", {find_tool(solver, environ).name()} solves"
    channels = find_channels(settings.channels.value, environ, "")
    elsewhere = ", ".join(f"{true} at {redact(asked)}" for true, asked in channels.mirrors)
    return found + (f"; {elsewhere}" if elsewhere else "")


def _ask_index(settings: Settings, environ: Mapping[str, str]) -> str:
    index = _index(settings, environ)
    patience = (("UV_HTTP_TIMEOUT", str(SECONDS)), ("UV_HTTP_RETRIES", "0"))
    impatient = replace(index, environment=(*index.environment, *patience))
    UvLocker(impatient, python=Path(sys.executable)).reach()
    return f"{redact(index.url)} ({index.origin}) answers" if index.url else f"{index.origin} answers"


def _ask_mirror(settings: Settings, environ: Mapping[str, str]) -> str:
    """Asks for what `lock` and a base's build begin with, by apt's own means."""
    found = find_mirror(settings.debian_mirror.value, Path(), environ, etc_apt=Path("/etc/apt"))
    suites = _suites(settings)
    reach(replace(found, certificates=settings.certificates.value), suites, seconds=SECONDS)
    return f"{', '.join(suites)} found there"


def _suites(settings: Settings) -> tuple[str, ...]:
    """The suites of the factory's bases."""
    try:
        bases = read_bases(settings.root_path / "recipes")
    except FactoryError:
        return ("stable",)  # a recipe's fault is not the machine's
    return tuple(dict.fromkeys(base.suite for base in bases if base.suite)) or ("stable",)


def _ask_registry(settings: Settings, environ: Mapping[str, str]) -> str:
    # Of requests and tenacity: where they are missing, the doctor is there to say so.
    from imagefactory.oci.registry.client import Registry
    from imagefactory.oci.registry.exchange import RegistryOptions

    host, _ = split_place(settings.registry.value)
    credentials = find_credentials(environ)
    options = RegistryOptions(
        credentials=credentials,
        certificates=Path(trusted) if (trusted := _index(settings, environ).certificates) else None,
        plain_hosts=settings.plain_hosts,
        patience=Patience(attempts=1, connect=SECONDS, read=SECONDS),
    )
    registry, known = Registry(host, options), credentials(host)
    try:
        registry.check()
    finally:
        registry.close()
    kept = f"with the credentials from {known.origin or 'a helper'}" if known else "without credentials"
    return f"{settings.registry.value} answers {kept}"
