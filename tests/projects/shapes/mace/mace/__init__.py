from .__version__ import __version__
