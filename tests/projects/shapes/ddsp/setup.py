import os
import sys

import setuptools

sys.path.append(os.path.join(os.path.dirname(__file__), "ddsp"))
from version import __version__

setuptools.setup(
    name="ddsp",
    version=__version__,
    packages=setuptools.find_packages(),
    install_requires=[
        "absl-py",
        "apache-beam",
        "cloudml-hypertune<=0.1.0.dev6",
        "crepe<=0.0.12",
        "dill<=0.3.4",
        "future",
        "gin-config>=0.3.0",
        "google-cloud-storage",
        "hmmlearn<=0.2.7",
        "librosa<=0.10",
        "pydub<=0.25.1",
        "protobuf<=3.20",
        "mir_eval<=0.7",
        "note_seq<0.0.4",
        "numpy<1.24",
        "scipy<=1.10.1",
        "six",
        "tensorflow<=2.11",
        "tensorflowjs<3.19",
        "tensorflow-probability<=0.19",
        "tensorflow-datasets<=4.9",
        "tflite_support<=0.1",
    ],
    extras_require={"test": ["pytest", "pylint!=2.5.0"]},
)
