"""What a family's description promises beside its framework, and a row leaves out."""

from __future__ import annotations

import re

from imagefactory.gpu import knowledge
from imagefactory.model import Target
from imagefactory.recipes.values import canonical


def left_out(target: Target) -> str:
    """What a person is told of companions that the target lacks and could have; empty for none.

    Only those count that the description of its recipe names.
    """
    named = {canonical(re.split(r"[ \[<>=!~]", text, maxsplit=1)[0]) for text in target.requirements}
    promised = {canonical(word) for word in re.findall(r"[A-Za-z0-9_-]+", target.description)}
    missing = [
        one
        for one in knowledge.companions(target.framework, target.version, target.python)
        if one.package in promised - named
    ]
    if target.source != "pypi" or not missing:
        return ""
    names, write = (
        " and ".join(one.package for one in missing),
        ", ".join(f"{one.package}=={one.series}.*" for one in missing),
    )
    return (
        f"{target.where}: {target.framework} {target.version} without {names}, which the description of "
        f"'{target.family}' promises (write packages: [{write}])"
    )
