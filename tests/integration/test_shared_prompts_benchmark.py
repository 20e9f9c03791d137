"""`benchmarks.shared_prompts` at a small size: what each contestant computes."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.launch

COMMAND = ("-m", "benchmarks.shared_prompts", "--rounds", "1", "--prompts", "2", "--prompt-tokens", "64")


def test_a_shared_prompt_is_computed_once_for_its_eight_answers() -> None:
    done = subprocess.run([sys.executable, *COMMAND], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^ *(shared|apart|trl) +([\d,]+) tokens", done.stdout, re.M)
    tokens = {name: int(number.replace(",", "")) for name, number in lines}
    assert tokens["apart"] - tokens["shared"] == 2 * 7 * 64
    assert tokens["trl"] >= tokens["apart"], "padded to the longest"
    assert re.search(r"^  trl / shared: \d", done.stdout, re.M)
