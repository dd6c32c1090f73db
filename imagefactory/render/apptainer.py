"""A Definition as an Apptainer definition file (apptainer 1.2 or newer, for its build arguments)."""

from __future__ import annotations

from imagefactory.model import Definition
from imagefactory.render.define import framework_wheel
from imagefactory.render.steps import REQUIREMENTS, SITE, steps
from imagefactory.render.templating import COMMAND, facts, fill


def module_of(framework: str) -> str:
    """The module that a framework's distribution is imported as: its name without PyPI's `-gpu`."""
    return framework.lower().removesuffix("-gpu").replace("-", "_")


def render_apptainer(definition: Definition) -> str:
    """The text of apptainer.def. Raises UsageError for a value that it cannot hold."""
    wheel = framework_wheel(definition.target, definition.lock)
    return fill(
        "apptainer.def.jinja",
        target=definition.target,
        base=definition.base,
        environment=definition.environment,
        labels=definition.labels,
        facts=facts(definition),
        framework=wheel,
        complaint=f"{wheel.name} should be {wheel.version}, as the lock says, but is",
        module=module_of(definition.target.framework),
        command=COMMAND,
        requirements=REQUIREMENTS,
        site=SITE,
        steps=steps(definition),
    )
