"""One file a framework, the same names in each.

- `MODULES`: (name in the lock, module) pairs, PyPI's names and conda's; those in the lock must import.
- `prepare()`: sets the environment before the first import, where one is needed.
- `cuda_version(context) -> (version, detail)`: the CUDA it was made for; CheckFailure for a CPU-only build.
- `matmul(matrix, right, kind)`, `total(values, kind)`, `convolution(image, filters, kind)`,
  `solve(square, side, kind)`, `gradient(inputs, right, kind)`: computed on the CPU, lists in, lists out.
- `compilers(context, scratch) -> (detail, numbers)`: tries what compiles at run time. Raises CheckFailure.

`other` has the first only, for packages without a file of their own.
"""
