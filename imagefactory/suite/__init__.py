"""The suite that runs inside an image, mounted read-only from outside and versioned by its own digest.

It uses only the standard library and the image's framework, because the image does not have imagefactory.
`smoke.py` starts it, and `table.py` lists the checks. `checks/` has a file for each check, `frameworks/` a
file for each framework with the same functions in each. `gpu/` is the same for a GPU; `verify.py` starts it.
"""
