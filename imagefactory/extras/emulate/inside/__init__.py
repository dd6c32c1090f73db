"""Emulate a GPU inside an image, so that torch detects one.

    sitecustomize.py  every Python of the run imports it; waits for `import torch`, then installs the rest
    start.py          installs the other modules, in order
    roofline.py       seconds of an operation from its arithmetic and its bytes: pure
    machine.py        the devices of this process: host and device time, memory, page-locked memory
    dispatch.py       every operation of torch: shapes, arithmetic, values, attention; charged to the clock
    ranks.py          several processes, each with a GPU
    tensors.py        tensors: their device, copies, pickling, checkpoints
    cuda.py           the module torch.cuda, and mixed precision
    loader.py         waiting for the DataLoader, and the time that a batch takes
    summary.py        the summary of a run, as JSON

Inside the image this package is named `imagefactory_emulate`. It uses only the standard library and the
image's torch, and no other package of imagefactory. A tensor of an emulated device is a `meta` tensor of
torch, which has a shape but no data. Its device is reported as `cuda`, and the bytes that real data would use
are counted.

Times come from a profile *recorded* on a GPU, or are *estimated* by a roofline from a data sheet. An estimate
is a lower bound that no GPU was measured to reach.
"""
