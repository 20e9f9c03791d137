"""Interpreters with packages that the tests' own need not have."""

import os
import sys
from importlib.util import find_spec

import pytest

from tests.conftest import ROOT

VERIFIERS_PYTHON = os.environ.get("HOLDFAST_VERIFIERS_PYTHON") or (sys.executable if find_spec("verifiers") else "")
NO_VERIFIERS = "needs an interpreter with verifiers 0.4, here or in HOLDFAST_VERIFIERS_PYTHON"
needs_verifiers = pytest.mark.skipif(not VERIFIERS_PYTHON, reason=NO_VERIFIERS)
VERIFIERS_TASKS = ROOT / "tests" / "runs" / "verifiers_tasks"
