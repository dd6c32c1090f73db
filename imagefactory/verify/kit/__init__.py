"""The program of a kit: a directory that verifies an image on a machine without imagefactory.

Every kit contains it. It needs only the standard library of Python 3.9. imagefactory reads the GPUs of its
machine with the same `hardware.py`. kits.py writes kits and reads their results.
"""
