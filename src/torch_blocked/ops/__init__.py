"""Handlers of torch ops on blocked tensors, a file per family. Importing this package imports all
of them, which fills the tables of torch_blocked.dispatch."""

from importlib import import_module
from pkgutil import iter_modules

for _family in iter_modules(__path__):  # in the order of their names
    import_module(f"{__name__}.{_family.name}")
