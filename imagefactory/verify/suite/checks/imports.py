"""`import`: the framework and its companions load, in their locked versions."""

from __future__ import annotations

import importlib
import time

from ..context import Context, Failure, Finding, same_version


def check(context: Context) -> Finding:
    framework, packages = context.framework, context.expected.packages
    framework.prepare()
    numbers, loaded = {}, []
    for distribution, module_name in framework.MODULES:
        if distribution not in packages:
            if distribution == context.expected.distribution:
                raise Failure(f"the lock holds no {distribution}")
            continue
        began = time.monotonic()
        module = importlib.import_module(module_name)
        numbers[f"{module_name}-seconds"] = round(time.monotonic() - began, 3)
        found, locked = module.__version__, packages[distribution]
        if not same_version(found if "+" in locked else found.partition("+")[0], locked):
            raise Failure(f"{module_name} says it is {found}, locked is {locked}")
        loaded.append(f"{module_name} {found}")
    return Finding(", ".join(loaded), numbers)
