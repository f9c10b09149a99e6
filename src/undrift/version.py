"""The version, for code that runs before the package is complete."""

__version__ = "0.1.0.dev0"
