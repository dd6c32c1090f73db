"""What an image, wheel or library can run on, as JSON. Pure."""

from __future__ import annotations

from imagefactory.serialize import fields_of
from imagefactory.gpu.amd import amd_targets
from imagefactory.gpu.frameworks import cuda_of, find_framework, find_package
from imagefactory.gpu.values import Prediction
from imagefactory.views.inspect import Inspection, library_versions, ordered_libraries


def inspection_json(inspection: Inspection) -> dict[str, object]:
    contents = inspection.contents
    framework = find_framework(contents)
    package = find_package(contents, framework) if framework else None
    return {
        "name": inspection.name,
        "from": inspection.how,
        "digest": inspection.digest,
        "architecture": inspection.platform,
        "framework": framework.name if framework else "",
        "framework_version": package.version if package else "",
        "cuda": cuda_of(contents),
        "versions": dict(library_versions(contents)),
        "cpu_only": inspection.cpu_only,
        "contradictions": inspection.contradictions,
        "libraries": [
            {
                "path": library.path,
                "size": library.size,
                "role": role.value,
                "compressions": library.compressions,
                "damage": library.damage,
                "unread": library.unread,
                "modules": library.modules,
            }
            for library, role in ordered_libraries(contents)
        ],
        "amd_targets": amd_targets(contents),
        "predictions": [prediction_json(prediction) for prediction in inspection.predictions],
        "verified": [
            {"capability": capability, **fields_of(claim)}
            for capability, claim in inspection.verified.items()
        ],
        "packages": [
            {
                "name": package.name,
                "version": package.version,
                **({"build": package.build} if package.build else {}),
            }
            for package in contents.packages
        ],
        "facts": [{"framework": name, "key": key, "value": value} for name, key, value in contents.facts],
        "toolkit": contents.toolkit,
    }


def prediction_json(prediction: Prediction) -> dict[str, object]:
    return {"capability": prediction.capability, "basis": "predicted", **fields_of(prediction)}
