"""TwoNN against DADApy, which needs numpy below 2 and so runs in an interpreter of its own, by turns with ours.

Set ``ISOGEOM_DADAPY_PYTHON`` to the Python of an environment with ``pip install dadapy "numpy<2"``.
"""

import os
import statistics
import subprocess
import time

import numpy as np
import pytest

from isogeom.dimension import TwoNN

# Answers every line with CPU seconds and the estimate.
PEER = """
import contextlib, sys, time
import numpy as np
from dadapy.data import Data

X = np.load(sys.argv[1])
for _ in sys.stdin:
    start = time.process_time()
    with contextlib.redirect_stdout(sys.stderr):
        data = Data(X, maxk=3, n_jobs=1, verbose=False)
        data.compute_distances(maxk=3)
        value = data.compute_id_2NN()[0]
    print(time.process_time() - start, float(value), flush=True)
"""


@pytest.mark.parametrize(("d", "floor"), [(50, 1.5), (768, 3)])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_two_nn(report, tmp_path, d, floor, noise):
    python = os.environ.get("ISOGEOM_DADAPY_PYTHON")
    if not python:
        pytest.skip("ISOGEOM_DADAPY_PYTHON names no interpreter with DADApy")
    rng = np.random.default_rng(0)
    X = np.tanh(rng.standard_normal((10_000, 12)) @ rng.standard_normal((12, d)) / 3)
    X = (X + noise * rng.standard_normal(X.shape)).astype("float32")
    np.save(tmp_path / "rows.npy", X)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    peer = subprocess.Popen(
        [python, "-c", PEER, str(tmp_path / "rows.npy")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | threads,
    )
    pairs = []
    try:
        for _ in range(4):
            start = time.process_time()
            mine = TwoNN().fit(X).dimension_
            ours = time.process_time() - start
            print(file=peer.stdin, flush=True)
            answer = peer.stdout.readline().split()
            assert len(answer) == 2, "the peer's process ended"
            assert mine == pytest.approx(float(answer[1]), rel=1e-3)
            pairs.append((ours, float(answer[0])))
    finally:
        peer.stdin.close()
        peer.wait()
    # The first pair compiles and loads.
    ours, theirs = (statistics.median(times) for times in zip(*pairs[1:]))
    report(
        f"TwoNN, 10000 x {d} float32, noise {noise}: {ours * 1e3:.0f} ms, DADApy (maxk=3) {theirs * 1e3:.0f} ms CPU: "
        f"{theirs / ours:.1f}x; {mine:.4f}, peer {answer[1]}"
    )
    assert theirs / ours > floor
