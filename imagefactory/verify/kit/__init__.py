"""Kits: a folder that verifies an image on a machine without imagefactory, and what comes back of it.

`run.py` and `hardware.py` travel in every kit and need nothing but Python 3.9's standard library; this
process reads its own machine with the same `hardware.py`. `make.py` writes a kit, `collect.py` reads what it
brought back.
"""
