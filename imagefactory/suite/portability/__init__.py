"""Models that go from a framework to another runtime: exported to ONNX, run there, and compared.

A framework has a file (`torch.py`, `tensorflow.py`, `jax.py`) with the same names in each:
- `NAME`; `version()`; `prepare(threads)`: float32 as such, without TF32.
- `owns(network)`; `settle(network)`: ready for inference; `override(network, method)`: what `method`
computes.
- `canonical(inputs)`: arrays of the types in which the exported model takes them.
- `compute(network, inputs, device)`: outputs as float64, None where one came from elsewhere than `device`.
- `caller(network, inputs, device)`: a pass with the inputs on the device, which ends when the call returns.
- `export(network, inputs, path, *, outputs, batched)`: ONNX of any batch size where `batched`, else fixed
sizes. `torch_models.py` builds the suite's own models, which `case.py` lists.

A runtime of `runtimes.py` has a file (`onnxruntime.py`, `openvino.py`, `tvm.py`) with `NAME`, `version()`,
`open_session(path, inputs, runtime, threads, profile)`, `compute(session)`, `caller(session)` as above, and
`count_kernels(session)`, which raises CheckFailure if nothing ran or not all on the device. `rows.py` is the
clock. `exporting.py` exports a person's own models, `trying.py` runs them, perhaps in another image.
"""
