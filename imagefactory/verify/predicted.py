"""What a scan of an image lets one expect of the coverage checks: machine code, PTX, or neither. Pure.

`native` and `ptx` are about the libraries that the framework must load, since the checks run it with the
driver's compiler switched off, and then with all machine code passed over. What has none of its own makes
machine code where it runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from imagefactory.gpu.capability import Capability
from imagefactory.gpu.knowledge.gpus import capabilities
from imagefactory.gpu.values import Answer, Contents, Library, Reach
from imagefactory.gpu.predict import predict
from imagefactory.gpu.rules import generic_modules, runs
from imagefactory.suite.gpu.context import Predicted

RUNS = (Answer.YES, Answer.PTX, Answer.PARTLY)


def predict_coverage(contents: Contents, more: Iterable[Capability] = ()) -> dict[str, Predicted]:
    """By capability (`8.0`): all that are known, and `more`."""
    return {str(one): _predict_one(contents, one) for one in sorted({*capabilities(), *more})}


def _predict_one(contents: Contents, capability: Capability) -> Predicted:
    prediction = predict(contents, capability)
    gates = {reach.path: reach for reach in prediction.libraries if reach.gates}
    runs_there = prediction.answer in RUNS
    return Predicted(
        native=runs_there and not any(reach.ptx for reach in gates.values()),
        ptx=runs_there
        and bool(gates)
        and all(_compiles(library, capability) for library in contents.libraries if library.path in gates),
        runs=runs_there,
        reason=prediction.reason,
    )


def _compiles(library: Library, capability: Capability) -> bool:
    """Whether the driver could compile all of a library there: each module that counts holds PTX for it."""
    modules = generic_modules(library)
    return bool(modules) and all(
        any(runs(code, capability) is Reach.PTX for code in one.codes) for one in modules
    )
