"""One file for each framework, with the same names in each.

All inputs and outputs are numpy arrays in float64.

`fetch` returns results. It rejects a result that is not on the GPU (in a rehearsal: the CPU) or not of the
requested number type, so a check that ran on the CPU fails.
- `prepare(context)`: sets the environment before the first import, if needed.
- `on_cpu(values, kind)`: an array on the CPU, which `fetch` must reject outside of a rehearsal.
- `fetch(context, array, kind)`.
- `KINDS`: number types of `matmul`; `CPU_LACKS`: those that its CPU does not support, for a rehearsal.
- `matmul(context, matrix, right, kind)`: batched if they have three dimensions.
- `elementwise(context, values)`: tanh, in float32.
- `reduce(context, values, axis, kind)`: the sum; `largest(context, values)`: the maximum.
- `convolution(context, case, kind)`: `forward`, and the gradients for `image` and `filters`.
- `factorise(context, square, side, kind)`: reference.Factors.
- `train(context, case)`: losses and weights, like `reference.training`.
- `transfer(context, values)`: to the GPU and back, as a Transfer.
- `all_reduce(context, values)`: the sum over one rank with NCCL, and a line about it.
- `loaded(context)`: library (`cudnn`, `nccl`) -> version, if the framework reports one.
- `in_use(context)`: bytes in use on the GPU; `release(context)`: frees unused memory.
- `compile(context, inputs, weights)`: T3's function as it is and compiled, and a line about the compiler.
PyTorch has a second file for several GPUs (`torch_ranks.py`).
"""
