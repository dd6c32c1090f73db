"""One file for each framework, with the same names in each.

- `MODULES`: (name in the lock, module) pairs, PyPI's names and conda's; those in the lock must import.
- `prepare()`: sets the environment before the first import, if needed.
- `cuda_version(context) -> (version, detail)`: the CUDA of the build; CheckFailure for a CPU-only build.
- `matmul(matrix, right, kind)`, `total(values, kind)`, `convolution(image, filters, kind)`,
  `solve(square, side, kind)`, `gradient(inputs, right, kind)`: computed on the CPU, lists in, lists out.
- `compilers(context, scratch) -> (detail, numbers)`: tests the run-time compilers. Raises CheckFailure.

`other` has the first only, for packages without a file of their own.
"""
