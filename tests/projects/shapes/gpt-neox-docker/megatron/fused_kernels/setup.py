from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension

setup(
    name="fused_kernels",
    version="1.0.0",
    ext_modules=[CUDAExtension("scaled_softmax_cuda", ["scaled_softmax.cpp", "scaled_softmax_cuda.cu"])],
    cmdclass={"build_ext": BuildExtension},
)
