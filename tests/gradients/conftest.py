"""Fixtures of the tests of harvests."""

import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def memory_path():
    """A folder in memory where there is one: on a disk these tests would wait for fsync."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)
