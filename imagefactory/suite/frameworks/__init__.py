"""One file a framework, the same names in each.

- `MODULES`: (name in the lock, module) pairs, PyPI's names and conda's; those in the lock must import.
- `prepare()`: the environment it needs, before its first import.
- `cuda_version(context) -> (version, detail)`: the CUDA it was made for; CheckFailure for a CPU-only build.
- `matmul(left, right, kind)`, `total(values, kind)`, `convolution(image, filters, kind)`,
  `solve(square, side, kind)`, `gradient(left, right, kind)`: computed on the CPU, lists in, lists out.
- `compilers(context, scratch) -> (detail, numbers)`: tries what compiles at run time; CheckFailure if it
cannot.

`other` has the first two alone, for packages without a file of their own.
"""
