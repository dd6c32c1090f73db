"""What an image, wheel or library can run on, as JSON. Pure."""

from __future__ import annotations

from imagefactory.gpu.amd import amd_targets
from imagefactory.gpu.frameworks import cuda_of, find_framework, find_package
from imagefactory.gpu.model import Prediction
from imagefactory.report.compat import claim_json
from imagefactory.report.inspect import Inspection, library_versions, ordered_libraries


def inspection_json(found: Inspection) -> dict[str, object]:
    contents = found.contents
    framework = find_framework(contents)
    package = find_package(contents, framework) if framework else None
    return {
        "name": found.name,
        "from": found.how,
        "digest": found.digest,
        "framework": framework.name if framework else "",
        "framework_version": package.version if package else "",
        "cuda": cuda_of(contents),
        "versions": dict(library_versions(contents)),
        "cpu_only": found.cpu_only,
        "contradictions": found.contradictions,
        "libraries": [
            {
                "path": library.path,
                "size": library.size,
                "role": role.value,
                "compressions": library.compressions,
                "damage": library.damage,
                "unread": library.unread,
                "modules": [
                    {"count": modules.count, "codes": [str(code) for code in modules.codes]}
                    for modules in library.modules
                ],
            }
            for library, role in ordered_libraries(contents)
        ],
        "amd_targets": amd_targets(contents),
        "predictions": [prediction_json(one) for one in found.predictions],
        "verified": [{"capability": str(one), **claim_json(claim)} for one, claim in found.verified.items()],
        "packages": [
            {"name": one.name, "version": one.version, **({"build": one.build} if one.build else {})}
            for one in contents.packages
        ],
        "facts": [{"framework": name, "key": key, "value": value} for name, key, value in contents.facts],
        "toolkit": contents.toolkit,
    }


def prediction_json(one: Prediction) -> dict[str, object]:
    return {
        "capability": str(one.capability),
        "basis": "predicted",
        "answer": one.answer.value,
        "reason": one.reason,
        "driver": one.driver,
        "driver_reason": one.driver_reason,
        "warnings": one.warnings,
        "libraries": [
            {
                "path": reach.path,
                "reach": reach.reach.value,
                "native": reach.native,
                "ptx": reach.ptx,
                "without": reach.without,
                "isa": reach.isa,
                "gates": reach.gates,
            }
            for reach in one.libraries
        ],
    }
