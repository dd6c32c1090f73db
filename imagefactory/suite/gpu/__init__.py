"""The GPU suite: runs inside the image, on a GPU, each part in a process of its own.

`table.py` says what there is to check, in which part and at which level; `suite.py` starts the parts one
after the other and writes the report, `part.py` is one of them; `driver.py` and `kernels.py` speak to the
driver without a framework; `checks/` holds one file a tier, `frameworks/` one file a framework with the same
names in each. Nothing here falls back to the CPU: a check that does not compute on the GPU has failed.
"""
