"""Version of the plugin, from its own metadata; the literal is for a source tree that was never installed."""

from importlib import metadata

try:
    __version__ = metadata.version("relax-tq-rdma")
except metadata.PackageNotFoundError:
    __version__ = "0.1.0"
