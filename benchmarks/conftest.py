"""Side-by-side timing: one thread, CPU seconds, alternating order, and tables of ratios and of values at the end.

With ``ISOGEOM_BENCH_THREADS`` above 1, that many threads and wall-clock seconds: for a machine with nothing else to do.
"""

import os
import statistics
import time

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

_THREADS = int(os.environ.get("ISOGEOM_BENCH_THREADS", "1"))
_ROWS = pytest.StashKey()
_FACTS = pytest.StashKey()


def pytest_report_header():
    sizes = (
        "full" if os.environ.get("ISOGEOM_BENCH_FULL") == "1" else "moderate (ISOGEOM_BENCH_FULL=1 for the full ones)"
    )
    return f"benchmark sizes: {sizes}"


@pytest.fixture(scope="session")
def full():
    """Whether to run the full sizes instead of the moderate ones."""
    return os.environ.get("ISOGEOM_BENCH_FULL") == "1"


@pytest.fixture(autouse=True)
def fixed_threads():
    """Run every benchmark with one thread, or as many as asked for, in every BLAS and OpenMP pool, torch's included."""
    with threadpool_limits(_THREADS):
        try:
            import torch
        except ImportError:
            yield
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(_THREADS)
        yield
        torch.set_num_threads(threads)


def seconds_of(function):
    """Return CPU seconds; with several threads, those on the wall."""
    clock = time.process_time if _THREADS == 1 else time.perf_counter
    start = clock()
    function()
    return clock() - start


@pytest.fixture
def compare(request, benchmark):
    """Time two callables A B A B ... and add a row to the table.

    Both are called once before, so imports and caches do not count (pass warm=False where they were called already).
    Returns the ratio of the median CPU seconds, peer over ours: above 1, isogeom is faster. The ratio also goes into
    pytest-benchmark's record (``--benchmark-json``), whose own timings of isogeom serve to compare two versions of it.
    """

    def run(label, ours, peer, *, peer_name, repeats=5, warm=True, values=""):
        if warm:
            ours()
            peer()
        pairs = [(seconds_of(ours), seconds_of(peer)) for _ in range(repeats)]
        mine, theirs = (statistics.median(times) for times in zip(*pairs))
        ratios = sorted(b / a for a, b in pairs)
        rows = request.config.stash.setdefault(_ROWS, [])
        rows.append((label, peer_name, mine, theirs, theirs / mine, ratios[0], ratios[-1], values))
        # A test with several rows keeps all of their ratios, but only its first row's timings.
        benchmark.extra_info[f"{label} / {peer_name}"] = theirs / mine
        if benchmark.stats is None:
            benchmark.pedantic(ours, rounds=repeats if mine < 0.5 else 1)
        return theirs / mine

    def annotate(values):
        rows = request.config.stash[_ROWS]
        rows[-1] = (*rows[-1][:-1], values)

    run.annotate = annotate
    return run


@pytest.fixture
def report(request):
    """Add a line of values that are not a ratio of times: errors, recovery, memory."""

    def add(line):
        request.config.stash.setdefault(_FACTS, []).append(line)

    return add


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(_ROWS, [])
    write = terminalreporter.write_line
    if rows:
        write("")
        unit = "CPU ms" if _THREADS == 1 else "wall ms"
        write(f"| what | peer | isogeom, {unit} | peer, {unit} | ratio | lowest-highest pair | values |")
        write("|---|---|---|---|---|---|---|")
    for label, peer, mine, theirs, ratio, low, high, values in rows:
        times = f"{mine * 1e3:.4g} | {theirs * 1e3:.4g} | {ratio:.3g}x | {low:.3g}-{high:.3g}"
        write(f"| {label} | {peer} | {times} | {values} |")
    facts = config.stash.get(_FACTS, [])
    if facts:
        write("")
    for line in facts:
        write(f"- {line}")
    if rows or facts:
        kernels = {f"{p['internal_api']} {p['version']} ({p.get('architecture', '-')})" for p in threadpool_info()}
        write("")
        write(("one thread; " if _THREADS == 1 else f"{_THREADS} threads; ") + "; ".join(sorted(kernels)))
