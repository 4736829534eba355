"""The compiled decoders, with every index checked by numba, on damaged payloads: none reads or writes outside."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_no_kernel_leaves_its_arrays(tmp_path):
    """In a process of its own: kernels are compiled anew, with checks, which takes minutes."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/contract/test_codecs.py", "-k",
         "damaged or random or any_bytes or another_length or round_trip"],
        cwd=ROOT, env={**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}, capture_output=True,
        text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert " passed" in ran.stdout
