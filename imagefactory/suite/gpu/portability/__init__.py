"""Models that go from a framework to ONNX Runtime: `models.py` says which, one file a framework makes them.

A framework's file has `NAME`, `version`, `prepare`, `build`, `as_double`, `damaged`, `compute`, `caller` and
`export`, the same names in each. `runtime.py` is ONNX Runtime, `measure.py` the clock.
"""
