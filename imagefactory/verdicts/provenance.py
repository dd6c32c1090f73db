"""Where an image comes from: SLSA provenance, as an in-toto statement in a signed envelope. Pure.

It carries no time, so that the same image by the same key gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagefactory import __version__
from imagefactory.extras.sbom.bill import Component
from imagefactory.trust.envelope import format_json, seal
from imagefactory.trust.keys import SigningKey
from imagefactory.verdicts.statement import STATEMENT

PROVENANCE = "https://slsa.dev/provenance/v1"
BUILD, BUILDER = "https://imagefactory.dev/build/v1", "https://imagefactory.dev/builder/v1"
"""Names, as predicate types are: nothing is ever fetched from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Of what the image `index` (and its platform manifest) was made: digests are `sha256:<64 hex>`.

    `lock` and `base` are the digests of the target's lock and its base's, `made_from` that of all that
    decides the image: these, what its recipe says, `engine` and `codec`.
    """

    target: str
    index: str
    manifest: str
    lock: str
    base: tuple[str, str]
    engine: str
    codec: str
    made_from: str
    packages: tuple[Component, ...]


def seal_provenance(provenance: Provenance, key: SigningKey) -> bytes:
    return seal(format_provenance(provenance), key)


def format_provenance(one: Provenance) -> bytes:
    """The statement's bytes. Source: SLSA specification v1.1, "Provenance"."""
    digests = {f"{one.target}/index": one.index, f"{one.target}/manifest": one.manifest}
    name, base = one.base
    definition = {
        "buildType": BUILD,
        "externalParameters": {
            "target": one.target,
            "lock": one.lock,
            "base": {"name": name, "digest": base},
        },
        "internalParameters": {"engine": one.engine, "codec": one.codec, "madeFrom": one.made_from},
        "resolvedDependencies": [
            {"uri": part.purl.to_string(), "digest": {"sha256": part.sha256}} for part in one.packages
        ],
    }
    builder = {"id": BUILDER, "version": {"imagefactory": __version__}}
    return format_json(
        {
            "_type": STATEMENT,
            "subject": [
                {"name": called, "digest": {"sha256": digest.removeprefix("sha256:")}}
                for called, digest in digests.items()
            ],
            "predicateType": PROVENANCE,
            "predicate": {"buildDefinition": definition, "runDetails": {"builder": builder}},
        }
    )
