"""The GPU suite: it runs inside the image on a GPU, each part in a separate process.

`table.py` lists the checks by part and level. `suite.py` starts the parts one after the other and writes the
report; `part.py` runs one part. `driver.py` and `kernels.py` use the driver without a framework. `checks/`
has a file for each tier (T0 to T3 and others). `frameworks/` has a file for each framework, with the same
names in each. There is no fallback to the CPU: a check that does not compute on the GPU fails.
"""
