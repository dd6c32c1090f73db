"""A Definition as an Apptainer definition file.

spython turns it into a Dockerfile that builds: it makes each command line of %post a RUN of its own and
knows no build arguments, so every step is one command, and the base stands where it is used.
"""

from __future__ import annotations

from imagefactory.model import Definition
from imagefactory.build.definition import new_places
from imagefactory.build.steps import OWN, SITE, copies, steps
from imagefactory.build.render import facts, fill, named_indexes, wheels_to_bring


def render_apptainer(definition: Definition, *, bootstrap: str = "docker", place: str = "") -> str:
    """The text of apptainer.def, on the definition's public base, or on what `bootstrap` finds at `place`.

    Raises UsageError for a value that it cannot hold.
    """
    return fill(
        "apptainer.def.jinja",
        target=definition.target,
        base=definition.base,
        bootstrap=bootstrap,
        place=place or definition.base.public,
        # apptainer gives everybody their own home, or none.
        environment=tuple(pair for pair in definition.environment if pair[0] != "HOME"),
        labels=definition.labels,
        facts=facts(definition),
        indexes=named_indexes(definition),
        bring=wheels_to_bring(definition),
        start=definition.start,
        own=new_places(definition),
        folder=OWN,
        conda=bool(definition.lock.conda),
        copied=copies(definition),
        site=SITE,
        steps=steps(definition),
    )
