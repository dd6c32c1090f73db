"""The suite that runs inside an image, mounted read-only and identified by its digest.

It uses only the standard library and the packages of the image, because the image does not have imagefactory.
`smoke.py` starts it, and `table.py` lists the checks. `checks/` has a file for each check. `frameworks/` has
a file for each framework, with the same functions in each. `gpu/` is the part for GPUs; `verify.py` starts
it.
"""
