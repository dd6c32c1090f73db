"""Why a machine could not pull an image, as far as this one can tell: it asks the registry as a job would.

HTCondor keeps too little of what apptainer says on the machine (pools/htcondor/classify.py), and what stands
behind it is mostly one of three: the image is gone, the registry refuses or is down, or that machine alone is
wrong.
"""

from __future__ import annotations

from pathlib import Path

from imagefactory.access import package_index
from imagefactory.errors import FactoryError
from imagefactory.project import Factory
from imagefactory.oci.registry.client import Registry
from imagefactory.oci.registry.exchange import RegistryOptions
from imagefactory.oci.store import Reference, parse_reference
from imagefactory.schedulers.pool import SweepNode
from imagefactory.stages.attach import reference_of
from imagefactory.trust.attached import MOST_REFUSED
from imagefactory.http import Patience

SECONDS = 15.0


class PullAsker:
    """Asks for each image once, without a password, as no job has one; after MOST_REFUSED refusals in a row
    for no other.
    """

    def __init__(self, factory: Factory) -> None:
        self.factory = factory
        self._told: dict[str, str] = {}
        self._refused: list[str] = []

    def explain(self, node: SweepNode) -> str:
        """A line on the image of a node; empty for a file."""
        reference = reference_of(node)
        if not reference:
            return ""
        if reference not in self._told:
            if len(self._refused) >= MOST_REFUSED:
                return self._refused[-1]
            self._told[reference] = self._ask(parse_reference(reference), node.image.address)
        return self._told[reference]

    def _ask(self, where: Reference, address: str) -> str:
        trusted = package_index(self.factory).certificates
        options = RegistryOptions(
            certificates=Path(trusted) if trusted else None,
            plain_hosts=self.factory.settings.plain_hosts,
            patience=Patience(attempts=1, connect=SECONDS, read=SECONDS),
        )
        registry = Registry(where.registry, options)
        try:
            manifest = registry.manifest(where.repository, where.wanted)
        except FactoryError as error:
            self._refused.append(f"asked from here, without a password: {error.message}")
            return self._refused[-1]
        finally:
            registry.close()
        self._refused.clear()
        if manifest is None:
            return f"{where.registry} has no such image any more: a new sweep sends it again"
        return (
            f"asked from here, {where.registry} has it: on that machine `apptainer pull {address}` tells "
            "more (the registry's CA, the way there)"
        )
