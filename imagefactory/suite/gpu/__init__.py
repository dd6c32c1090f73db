"""The GPU suite: it runs inside the image, on a GPU, each part in its own process.

`table.py` lists the checks by part and level. `suite.py` starts the parts one after the other and writes the
report; `part.py` is one of them. `driver.py` and `kernels.py` use the driver without a framework. `checks/`
has a file for each tier, `frameworks/` a file for each framework with the same names in each. Nothing falls
back to the CPU: a check that does not compute on the GPU fails.
"""
