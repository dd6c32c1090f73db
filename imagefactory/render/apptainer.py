"""A Definition as an Apptainer definition file (apptainer 1.2 or newer, for its build arguments)."""

from __future__ import annotations

from imagefactory.model import Definition, LockedConda
from imagefactory.render.define import framework_package
from imagefactory.render.steps import SITE, copies, steps
from imagefactory.render.templating import COMMAND, facts, fill
from imagefactory.suite.table import FRAMEWORKS, module_of


def render_apptainer(definition: Definition) -> str:
    """The text of apptainer.def. Raises UsageError for a value that it cannot hold."""
    framework = definition.target.framework
    package = framework_package(definition.target, definition.lock)
    record = ""
    if isinstance(package, LockedConda):
        record = f"{definition.prefix}/conda-meta/{package.name}-{package.version}-{package.build}.json"
    return fill(
        "apptainer.def.jinja",
        target=definition.target,
        base=definition.base,
        environment=definition.environment,
        labels=definition.labels,
        facts=facts(definition),
        framework=package,
        record=record,
        complaint=f"{package.name} should be {package.version}, as the lock says, but is",
        # Of others it is not known what they are imported as: the suite finds that out.
        module=module_of(framework) if framework in FRAMEWORKS else "",
        command=COMMAND,
        conda=bool(record),
        copied=copies(definition),
        site=SITE,
        steps=steps(definition),
    )
