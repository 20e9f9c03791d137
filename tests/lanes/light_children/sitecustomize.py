"""On PYTHONPATH of whatever a light test starts: its processes may not import what the test may not import."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader

_FILE = f"{__file__.rpartition('/')[0]}/../without.py"
_spec = spec_from_loader("_without", SourceFileLoader("_without", _FILE))
assert _spec is not None and _spec.loader is not None
_without = module_from_spec(_spec)
_spec.loader.exec_module(_without)
_without.refuse()
