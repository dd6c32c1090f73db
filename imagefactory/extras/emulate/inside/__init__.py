"""A GPU that is not there: what stands before a program inside an image, so that torch sees one.

    sitecustomize.py  found by every Python of the run; waits for `import torch`, then installs what is below
    start.py          installs the rest, in order
    roofline.py       seconds of an operation from its arithmetic and its bytes: pure
    machine.py        the devices of this process: time of both sides, memory, page-locked memory
    dispatch.py       every operation of torch: shapes, arithmetic, values, attention; charged to the clock
    ranks.py          several processes, each with a GPU
    tensors.py        what a tensor says of itself: its device, its copies, its bytes on disk, checkpoints
    cuda.py           the module torch.cuda, and mixed precision
    loader.py         who waits for the DataLoader, and how long a batch takes to be made
    summary.py        what a run was, as JSON

It runs inside images under another name, `imagefactory_emulate`: standard library and the image's torch
alone, and nothing of this package's other rooms. A tensor of such a device is one of torch's own `meta`
tensors, which have a shape and no bytes; it says that its device is `cuda`, and the bytes that it would have
are counted.

What it says of time is by a profile that was *recorded* on such a GPU, or *estimated*: a roofline by a data
sheet is the fastest that a GPU could be, never what one was seen to be.
"""
