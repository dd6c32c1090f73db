"""The kernels of T0 as text: PTX for the driver and HIP for HIPRTC, and their expected results.

PTX 6.0 for sm_50 is older than every driver and GPU that a recipe can request (CUDA 9), and still works: PTX
for an older GPU compiles for every newer one (CUDA C++ Programming Guide, "PTX Compatibility"). CUDA 13
generates no machine code for GPUs before sm_75, but its ptxas compiles this PTX for all others
(tests/engines).
"""

from __future__ import annotations

import array
import operator
import random
from dataclasses import dataclass

ENTRY = "combine"
GUARD = 256  # elements after the last one, which the kernel must not touch
POISON = b"\xa5\x5a\xc3\x3c"

_COMBINE = """\
.version 6.0
.target sm_50
.address_size 64

.visible .entry combine(
    .param .u64 left,
    .param .u64 right,
    .param .u64 result,
    .param .u32 count
)
{
    .reg .pred %p<2>;
    .reg .f32 %f<4>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<11>;

    ld.param.u64 %rd1, [left];
    ld.param.u64 %rd2, [right];
    ld.param.u64 %rd3, [result];
    ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra done;
    cvta.to.global.u64 %rd4, %rd1;
    cvta.to.global.u64 %rd5, %rd2;
    cvta.to.global.u64 %rd6, %rd3;
    mul.wide.u32 %rd7, %r5, 4;
    add.s64 %rd8, %rd4, %rd7;
    add.s64 %rd9, %rd5, %rd7;
    add.s64 %rd10, %rd6, %rd7;
    ld.global.f32 %f1, [%rd8];
    ld.global.f32 %f2, [%rd9];
    OPERATION %f3, %f1, %f2;
    st.global.f32 [%rd10], %f3;
done:
    ret;
}
"""

_COMBINE_HIP = """\
extern "C" __global__ void combine(const float* left, const float* right, float* result, unsigned count)
{
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count)
        result[at] = left[at] OPERATION right[at];
}
"""


@dataclass(frozen=True)
class Sources:
    """A kernel that adds, a kernel that subtracts, and a text that is not a kernel."""

    add: str
    subtract: str
    broken: str


PTX = Sources(*(_COMBINE.replace("OPERATION", word) for word in ("add.rn.f32", "sub.rn.f32", "imagine.f32")))
HIP = Sources(*(_COMBINE_HIP.replace("OPERATION", word) for word in ("+", "-", "imagine")))


@dataclass(frozen=True)
class Vectors:
    """Two vectors of integers below 2**22 in float32, so that sum and difference are exact."""

    left: array.array[float]
    right: array.array[float]

    @property
    def count(self) -> int:
        return len(self.left)

    def total(self) -> bytes:
        return array.array("f", map(operator.add, self.left, self.right)).tobytes()

    def difference(self) -> bytes:
        return array.array("f", map(operator.sub, self.left, self.right)).tobytes()


def make_vectors(nonce: str, count: int) -> Vectors:
    """Return vectors that depend on the nonce. Equal nonces give equal vectors."""
    source = random.Random(nonce)
    draw = source.choices(range(1, 1 << 22), k=2 * count)
    return Vectors(left=array.array("f", draw[:count]), right=array.array("f", draw[count:]))


def poison(count: int) -> bytes:
    """Return the content of the result before the kernel runs: `count` elements and a guard after them."""
    return POISON * (count + GUARD)


def compare(result: bytes, expected: bytes) -> str:
    """Return how the result and its guard differ from the expected ones, empty if they do not."""
    whole = expected + POISON * GUARD
    if result == whole:
        return ""
    wrong = [at for at in range(0, len(whole), 4) if result[at : at + 4] != whole[at : at + 4]]
    inside = [at for at in wrong if at < len(expected)]
    if not inside:
        return f"{len(wrong)} elements after the end were written"
    at = inside[0]
    value, right = (array.array("f", data[at : at + 4])[0] for data in (result, expected))
    count = len(expected) // 4
    return f"{len(inside)} of {count} elements are wrong: [{at // 4}] is {value:.9g}, not {right:.9g}"
