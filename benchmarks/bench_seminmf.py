"""Semi-NMF against overcomplete: time to an error, recovery, codes for new rows, memory; codes also against SciPy."""

import functools
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
from scipy.optimize import nnls

from isogeom.decomposition import SemiNMF, match_dictionaries

N_FEATURES, DENSITY, NOISE = 768, 0.2, 0.0125
# Rows, atoms, and the largest number of iterations of the peer (its default is 500; it stops by itself before or not).
SIZES = {False: [(5000, 25, 500), (2000, 100, 200)], True: [(5000, 25, 500), (5000, 100, 500), (50_000, 25, 120)]}
QUIET = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
pytestmark = QUIET


@pytest.fixture(scope="module")
def peer():
    """Module with overcomplete's Semi-NMF, and torch; skips where they are missing."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    plt = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    # The package imports vision libraries and a matplotlib function that was removed in 3.9, for its figures alone:
    # placeholders let the solver run without them.
    names = (
        "torchvision",
        "torchvision.transforms",
        "timm",
        "timm.data",
        "cv2",
        "skimage",
        "skimage.measure",
        "einops",
    )
    for name in names:
        try:
            __import__(name)
        except ImportError:
            sys.modules[name] = mock.MagicMock()
    if not hasattr(plt.cm, "get_cmap"):
        plt.cm.get_cmap = plt.get_cmap
    module = pytest.importorskip("overcomplete.optimization.semi_nmf", reason="overcomplete is not installed")
    return module, torch


def planted(n, k):
    """float32 rows from sparse exponential codes on random unit atoms with a little noise; and the atoms."""
    rng = np.random.default_rng(0)
    D = rng.standard_normal((k, N_FEATURES))
    D /= np.linalg.norm(D, axis=1, keepdims=True)
    Z = rng.exponential(size=(n, k)) * (rng.random((n, k)) < DENSITY)
    X = (Z @ D).astype(np.float32)
    for start in range(0, n, 2000):
        X[start : start + 2000] += NOISE * rng.standard_normal(X[start : start + 2000].shape, dtype=np.float32)
    return X, D


def svd_bound(X, k):
    """Frobenius error of the best approximation of rank k, in float64."""
    gram = sum(block.T @ block for block in (X[i : i + 2000].astype(float) for i in range(0, len(X), 2000)))
    return float(np.sqrt(np.linalg.eigvalsh(gram)[:-k].sum()))


def error(X, Z, D):
    blocks = ((X[i : i + 2000], Z[i : i + 2000]) for i in range(0, len(X), 2000))
    return float(np.sqrt(sum(np.sum((x - z.astype(float) @ D) ** 2) for x, z in blocks)))


def peer_fit(peer, X, k, max_iter):
    module, torch = peer
    torch.manual_seed(0)
    model = module.SemiNMF(k)
    Z, D = model.fit(torch.from_numpy(X), max_iter=max_iter)
    return model, Z.numpy(), D.numpy()


def peer_trace(peer, X, k, max_iter):
    """Error of the peer after each of its iterations: an untimed run that records what a timed one passes through."""
    module, _ = peer
    step, trace = module._one_step_snmf_multiplicative_update, []
    total = np.sum(X.astype(float) ** 2)

    def recorded(*args):
        Z, D = step(*args)
        z, d = Z.numpy().astype(float), D.numpy().astype(float)
        cross = np.sum((z.astype(np.float32).T @ X).astype(float) * d)
        trace.append(np.sqrt(max(total - 2 * cross + np.sum((z.T @ z) * (d @ d.T)), 0.0)))
        return Z, D

    with mock.patch.object(module, "_one_step_snmf_multiplicative_update", recorded):
        peer_fit(peer, X, k, max_iter=max_iter)
    return np.array(trace)


def iterations_to(error_after, target, most=300):
    """Fewest iterations after which a fit from raw rows ends at or below the error; None if `most` do not suffice."""
    low, high = 0, 1
    while error_after(high) > target:
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if error_after(middle) <= target else (middle, high)
    return high


def recovered(found, true):
    match = match_dictionaries(true, found)
    return f"{np.mean(match.cosines > 0.9):.2f} of atoms (mean cosine {match.mean_cosine:.3f})"


@pytest.mark.parametrize("index", range(3))
def test_fit_to_an_error(compare, report, full, peer, index):
    if index >= len(SIZES[full]):
        pytest.skip("only among the full sizes")
    n, k, most = SIZES[full][index]
    X, true = planted(n, k)
    bound = svd_bound(X, k)
    trace = peer_trace(peer, X, k, most) / bound - 1
    end = float(trace[-1])
    name, ratios = f"{n} x {N_FEATURES} float32, k = {k}", []
    # A start from the SVD reaches any error at once without the planted atoms: k-means stands beside it.
    first = index == 0
    for init, targets in (("auto", {end, 0.05, 0.01, 0.001} if first else {0.05}), ("kmeans", {0.05})):

        def fit(max_iter, init=init):
            return SemiNMF(k, alpha=0, init=init, max_iter=max_iter, tol=0, random_state=0).fit(X)

        error_after = functools.cache(lambda max_iter, fit=fit: fit(max_iter).reconstruction_err_)
        for target in sorted(targets, reverse=True):
            max_iter = iterations_to(error_after, (1 + target) * bound)
            if max_iter is None:
                report(f"Semi-NMF {name}, {init}: {target:.2%} over the SVD bound is not reached in 300 iterations")
                continue
            there = bool(np.any(trace <= target))
            steps = int(np.argmax(trace <= target)) + 1 if there else len(trace)
            ratio = compare(
                f"Semi-NMF alpha=0, {init} start, {name}, to {target:.2%} over the SVD bound",
                lambda fit=fit, max_iter=max_iter: fit(max_iter),
                lambda steps=steps: peer_fit(peer, X, k, max_iter=steps),
                peer_name=f"overcomplete, {steps} iterations" + ("" if there else f", only to {end:.2%}"),
                repeats=3 if there and n * k < 2e5 else 1,
                warm=False,
            )
            model = fit(max_iter)
            assert error(X, model.transform(X), model.dictionary_) <= (1 + target + 1e-5) * bound
            compare.annotate(f"{max_iter} iterations; recovered {recovered(model.dictionary_, true)}")
            ratios.append(ratio)
            if k == 25:
                assert match_dictionaries(true, model.dictionary_).mean_cosine >= 0.9
    assert min(ratios) > 1


@pytest.mark.parametrize("index", range(3))
def test_default_model(compare, full, peer, index):
    if index >= len(SIZES[full]):
        pytest.skip("only among the full sizes")
    n, k, most = SIZES[full][index]
    X, true = planted(n, k)
    models = {}

    def ours():
        models["ours"] = SemiNMF(k, random_state=0).fit(X)

    def theirs():
        models["peer"] = peer_fit(peer, X, k, max_iter=most)

    SemiNMF(k, random_state=0, max_iter=2).fit(X[:500])
    ratio = compare(
        f"Semi-NMF alpha={SemiNMF().alpha} (default) {n} x {N_FEATURES} float32, k = {k}",
        ours,
        theirs,
        peer_name="overcomplete, " + ("defaults" if most == 500 else f"{most} iterations"),
        repeats=3 if n * k < 2e5 else 1,
        warm=False,
    )
    model, (_, Z, D) = models["ours"], models["peer"]
    size = float(np.linalg.norm(X.astype(float)))
    mine, theirs, least = error(X, model.transform(X), model.dictionary_), error(X, Z, D), svd_bound(X, k)
    compare.annotate(
        f"{model.n_iter_} iterations; recovered {recovered(model.dictionary_, true)}, peer {recovered(D, true)}; "
        f"relative error {mine / size:.3f} (l1 shrinks codes), peer {theirs / size:.3f}, SVD {least / size:.3f}"
    )
    assert np.mean(match_dictionaries(true, model.dictionary_).cosines > 0.9) >= 0.9
    assert ratio > 0.5


def with_known_atoms(X, true):
    """A model whose atoms are the planted ones after one step: neither side's fit decides how hard the codes are."""
    return SemiNMF(alpha=0, init=true.astype(X.dtype), max_iter=1).fit(X)


def nnls_rows(D, rows):
    columns = np.ascontiguousarray(D.T, dtype=float)
    return np.array([nnls(columns, row, maxiter=10_000)[0] for row in rows.astype(float)])


@pytest.mark.parametrize("k", [25, 100])
def test_encode(compare, full, peer, k):
    module, torch = peer
    X, true = planted(20_000 if full and k == 100 else 5000, k)
    model = with_known_atoms(X, true)
    D = np.ascontiguousarray(model.dictionary_)
    other = module.SemiNMF(k)
    other.D = torch.from_numpy(D)
    other._set_fitted()
    tensor = torch.from_numpy(X)

    def theirs():
        torch.manual_seed(0)
        return other.encode(tensor)

    Z = model.transform(X)
    few = nnls_rows(D, X[:50])
    gap = float(np.max(np.abs(Z[:50] - few)) / np.max(np.abs(few)))
    assert gap < 1e-5
    excess = error(X, theirs().numpy(), D) / error(X, Z, D) - 1
    assert excess > 0
    ratio = compare(
        f"codes of {len(X)} x {N_FEATURES} float32, k = {k}",
        lambda: model.transform(X),
        theirs,
        peer_name="overcomplete encode",
        repeats=3,
        warm=False,
        values=f"peer's error {excess:.2%} above the optimum; ours within {gap:.0e} of SciPy's codes",
    )
    assert ratio > 2


@pytest.mark.parametrize("k", [25, 100])
def test_codes_against_scipy(compare, k):
    X, true = planted(500, k)
    X = X.astype(float)
    model = with_known_atoms(X, true)
    gap = float(np.max(np.abs(model.transform(X) - nnls_rows(model.dictionary_, X))))
    assert gap < 1e-8
    ratio = compare(
        f"codes of {len(X)} x {N_FEATURES} float64, k = {k}",
        lambda: model.transform(X),
        lambda: nnls_rows(model.dictionary_, X),
        peer_name="scipy.optimize.nnls by row",
        repeats=3,
        values=f"largest difference {gap:.0e}",
    )
    assert ratio > 2


_MEMORY = """
import sys
import numpy as np
{setup}
rng = np.random.default_rng(0)
X = np.empty(({n}, 768), dtype=np.float32)
D = rng.standard_normal(({k}, 768), dtype=np.float32)
for start in range(0, len(X), 1000):
    block = X[start : start + 1000]
    codes = rng.exponential(size=(len(block), {k})) * (rng.random((len(block), {k})) < 0.2)
    block[:] = codes.astype(np.float32) @ D + 0.0125 * rng.standard_normal(block.shape, dtype=np.float32)
def fit(X):
    {fit}
# Enough rows for the compiled kernels: loading a compiler is not what the rows cost.
fit(X[:6000].copy())
def peak():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmHWM")).split()[1])
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = peak()
fit(X)
print((peak() - before) / 1024)
"""


def peak_mib(n, k, setup, fit):
    """Rise of the resident memory's peak in a fit, MiB, in a fresh process that has fitted some rows before."""
    code = _MEMORY.format(n=n, k=k, setup=setup, fit=fit)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    if "clear_refs" in done.stderr:
        pytest.skip("this system cannot reset the peak of resident memory")
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.usefixtures("peer")
def test_memory(report, full):
    n, k = (50_000 if full else 20_000), 25
    size = n * N_FEATURES * 4 / 2**20
    load = "from isogeom.decomposition import SemiNMF"
    plain = peak_mib(n, k, load, f"SemiNMF({k}, alpha=0, max_iter=10, random_state=0).fit(X)")
    sparse = peak_mib(n, k, load, f"SemiNMF({k}, max_iter=10, random_state=0).fit(X)")
    stubs = (
        "from unittest import mock\nimport matplotlib.pyplot as plt\n"
        "for name in ('torchvision', 'timm', 'timm.data', 'cv2', 'skimage'):\n"
        "    sys.modules.setdefault(name, mock.MagicMock())\nplt.cm.get_cmap = plt.get_cmap\n"
        "import torch\nfrom overcomplete.optimization.semi_nmf import SemiNMF"
    )
    other = peak_mib(n, k, stubs, f"SemiNMF({k}).fit(torch.from_numpy(X), max_iter=10)")
    report(
        f"Semi-NMF {n} x {N_FEATURES} float32 ({size:.0f} MiB), k = {k}, peak memory on top: alpha=0 {plain:.0f} MiB "
        f"({plain / size:.0%} of X), default {sparse:.0f} MiB ({sparse / size:.0%}), overcomplete {other:.0f} MiB "
        f"({other / size:.0%})"
    )
    assert plain < other
