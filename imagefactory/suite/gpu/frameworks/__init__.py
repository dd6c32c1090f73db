"""One file a framework, the same names in each. All arrays that go in and come out are numpy's, float64.

Results are taken by `fetch`, which refuses one that is not on the GPU or not of the kind that was asked for:
a check that ran on the CPU has failed. Only in a rehearsal the CPU is the place.
- `prepare(context)`: the environment, before the first import.
- `classify(error)`: the word of the tables for an exception.
- `probe(context)`: a few small operations with known answers, as a Finding; a CheckFailure says which was
wrong.
- `on_cpu(values, kind)`: an array on the CPU, which `fetch` must refuse outside of a rehearsal.
- `fetch(context, array, kind)`.
- `KINDS`: of `matmul`; `CPU_LACKS`: those that its CPU does not have, for a rehearsal.
- `matmul(context, left, right, kind)`: batched where they have three dimensions.
- `elementwise(context, values)`: tanh, in float32.
- `reduce(context, values, axis, kind)`: the sum; `largest(context, values)`: the maximum.
- `convolution(context, case, kind)`: `forward`, and the gradients for `image` and `filters`.
- `factorise(context, square, side, kind)`: reference.Factors.
- `train(context, case)`: losses and weights, as `reference.training`.
- `transfer(context, values)`: there and back, as a Transfer.
- `all_reduce(context, values)`: the sum over one rank by NCCL, and a line about it.
- `loaded(context)`: library (`cudnn`, `nccl`) -> version, as far as the framework itself tells.
- `in_use(context)`: bytes of the GPU; `release(context)`: gives back what is not needed.
- `compile(context, inputs, weights)`: T3's function as it is and compiled, and a line about the compiler.
PyTorch has a second file for several GPUs (`torch_ranks.py`).
"""
