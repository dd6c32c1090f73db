"""One file for each framework, with the same names in each.

- `MODULES`: pairs of a name in the lock (PyPI or conda) and a module. Modules of locked packages must
import.
- `prepare()`: sets the environment before the first import, if needed.
- `cuda_version(context) -> (version, detail)`: the CUDA of the build; CheckFailure for a CPU-only build.
- `matmul(matrix, right, kind)`, `total(values, kind)`, `convolution(image, filters, kind)`,
  `solve(square, side, kind)`, `gradient(inputs, right, kind)`: computed on the CPU, lists in, lists out.
- `compilers(context, scratch) -> (detail, numbers)`: tests the run-time compilers. Raises CheckFailure.

`other` has only the first one, for packages without a file here.
"""
