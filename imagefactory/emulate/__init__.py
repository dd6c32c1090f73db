"""A GPU that is not there: what stands before a program inside an image, so that torch sees one.

    sitecustomize.py  found by every Python of the run; waits for `import torch`, then installs what is below
    start.py          the order in which that is done
    roofline.py       seconds of an operation from its arithmetic and its bytes: pure
    operations.py     the arithmetic of torch's operations, from shapes: pure
    clock.py          the device's time and the program's, and who waited for whom: pure but for sleeping
    memory.py         bytes of a device, and when they are out: pure
    machine.py        all of it together: what devices this process sees, what lies in them
    dispatch.py       every operation of torch: on shapes alone, charged to the clock
    ranks.py          several processes, each with a GPU
    whole.py          whole numbers and conditions, which are computed
    values.py         operations whose result depends on values, which nobody computes
    tensors.py        what a tensor says of itself: its device, its copies, its bytes on disk
    saved.py          checkpoints
    cuda.py           the module torch.cuda
    attention.py      which kernel of attention a GPU would take
    autocast.py       mixed precision
    loader.py         who waits for the DataLoader, and how long a batch takes to be made
    pipeline.py       when batches would have come: pure
    pinned.py         page-locked memory, real
    summary.py        what a run was, as JSON

It runs inside images under another name, `imagefactory_emulate`: standard library and the image's torch
alone, and nothing of this package's other rooms. A tensor of such a device is one of torch's own `meta`
tensors, which have a shape and no bytes; it says that its device is `cuda`, and the bytes that it would have
are counted.

What it says of time is by a profile that was *recorded* on such a GPU, or *estimated*: a roofline by a data
sheet is the fastest that a GPU could be, never what one was seen to be.
"""
