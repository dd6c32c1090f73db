"""Export models of a framework to ONNX, run them in another runtime, and compare the results.

A framework has a file (`torch.py`, `tensorflow.py`, `jax.py`) with the same names in each:
- `NAME`; `version()`; `prepare(threads)`: real float32, without TF32.
- `owns(network)`; `settle(network)`: ready for inference; `override(network, method)`: the network with
`method`.
- `canonical(inputs)`: arrays of the types that the exported model accepts.
- `compute(network, inputs, device)`: outputs as float64, None if one was computed on another device.
- `caller(network, inputs, device)`: a pass with the inputs on the device, which ends when the call returns.
- `export(network, inputs, path, *, outputs, batched)`: ONNX for any batch size if `batched`, else fixed
sizes. `torch_models.py` builds the models of the suite, which `case.py` lists.

A runtime in `runtimes.py` has a file (`onnxruntime.py`, `openvino.py`, `tvm.py`) with `NAME`, `version()`,
`open_session(path, inputs, runtime, threads, profile)`, `compute(session)`, `caller(session)`, and
`count_kernels(session)`, which raises CheckFailure unless all kernels ran on the device. `rows.py` measures
times. `exporting.py` exports the user's models, `trying.py` runs them, perhaps in another image.
"""
