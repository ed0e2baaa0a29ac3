"""Side-by-side timing: one thread, CPU seconds, alternating order, and a table of ratios at the end."""

import statistics
import time

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

_ROWS = pytest.StashKey()


@pytest.fixture(autouse=True)
def one_thread():
    """Run every benchmark with one thread in every BLAS and OpenMP pool, torch's included."""
    with threadpool_limits(1):
        try:
            import torch
        except ImportError:
            yield
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


def cpu_seconds(function):
    start = time.process_time()
    function()
    return time.process_time() - start


@pytest.fixture
def compare(request, benchmark):
    """Time two callables A B A B ... and add a row to the table.

    Both are called once before, so imports and caches do not count. Returns the ratio of the median CPU seconds, peer
    over ours: above 1, isogeom is faster. The ratio also goes into pytest-benchmark's record (``--benchmark-json``),
    whose own timings of isogeom serve to compare two versions of it.
    """

    def run(label, ours, peer, *, peer_name, repeats=5):
        ours()
        peer()
        pairs = [(cpu_seconds(ours), cpu_seconds(peer)) for _ in range(repeats)]
        mine, theirs = (statistics.median(times) for times in zip(*pairs))
        ratios = sorted(b / a for a, b in pairs)
        rows = request.config.stash.setdefault(_ROWS, [])
        rows.append((label, peer_name, mine, theirs, theirs / mine, ratios[0], ratios[-1]))
        benchmark.extra_info.update(what=label, peer=peer_name, ratio=theirs / mine)
        benchmark.pedantic(ours, rounds=repeats)
        return theirs / mine

    return run


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(_ROWS, [])
    if not rows:
        return
    write = terminalreporter.write_line
    write("")
    write("| what | peer | isogeom, CPU ms | peer, CPU ms | ratio | lowest-highest pair |")
    write("|---|---|---|---|---|---|")
    for label, peer, mine, theirs, ratio, low, high in rows:
        write(f"| {label} | {peer} | {mine * 1e3:.4g} | {theirs * 1e3:.4g} | {ratio:.3g}x | {low:.3g}-{high:.3g} |")
    kernels = {f"{p['internal_api']} {p['version']} ({p.get('architecture', '-')})" for p in threadpool_info()}
    write("")
    write("one thread; " + "; ".join(sorted(kernels)))
