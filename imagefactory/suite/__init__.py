"""The suite that runs inside an image, mounted read-only from outside and versioned by its own digest.

Standard library first, then the image's framework; nothing of imagefactory, which the image does not
have. `smoke.py` starts it, `table.py` says what there is to check, `checks/` holds one file a check,
`frameworks/` one file a framework with the same functions in each. `gpu/` is the same for a GPU, which
`verify.py` starts.
"""
