"""Models that go from a framework to another runtime: they are exported to ONNX, run there, and compared.

A framework has a file (`torch.py`, `tensorflow.py`, `jax.py`) with `NAME`, `version`, `prepare`, `owns`,
`settle`, `override`, `canonical`, `compute`, `caller` and `export`, the same names in each; `torch_models.py`
makes the suite's own models, which `case.py` lists. `runtimes.py` names the runtimes; a file of one
(`onnxruntime.py`, `openvino.py`, `tvm.py`) has `NAME`, `version`, `open_session`, `compute`, `caller` and
`prove`. `rows.py` is the clock. A person's own models are read and exported by `exporting.py` and tried by
`trying.py`, which may run in another image.
"""
