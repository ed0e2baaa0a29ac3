"""kill -9 at 20 random moments: the resumed harvest ends with the bytes of an uninterrupted one."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

WORKER = Path(__file__).with_name("crash_worker.py")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_harvests_resume_to_the_same_bytes():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # In memory where possible: what a killed process has written is there, flushed or not.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as root:
        command = [sys.executable, WORKER, root, "0"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"(\w+): (\d+) kills, \d+ runs finished, (\d+) equal files", done.stdout)
    modes = [("rows", "20", "61"), ("sample", "10", "61"), ("moments", "10", "7"), ("reduced", "10", "7")]
    assert found == modes, done.stdout
