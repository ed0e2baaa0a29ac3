"""Compiled loops of the neighbour search: scan of a tile of products into buffers of candidates, and what follows.

The array code is `_neighbors/_exact.py`. Every helper lives in this file: numba's cache does not notice a change in a
helper of another module. Set ``ISOGEOM_NUMBA_CACHE=0`` to compile afresh in each process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

# Columns that are compared, and skipped, together.
_SKIP = 32
# Position of the lowest bit of a word, by the top five bits of its product with a de Bruijn sequence.
_SEQUENCE = 0x077CB531
_POSITIONS = np.zeros(32, dtype=np.int64)
for _bit in range(32):
    _POSITIONS[((_SEQUENCE << _bit) & 0xFFFFFFFF) >> 27] = _bit
# Up to this many entries are sorted by counting the smaller ones of each, which has no branches.
_COUNTED = 384


def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without the GIL. Sums may be reordered, which makes them vectors; NaN and infinity keep their meaning."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "reassoc"}}
    if os.environ.get("ISOGEOM_NUMBA_CACHE", "1") != "0":
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError:
            # No writable place for the cache (a read-only installation without a home folder).
            pass
    return numba.njit(**options)(function)


def _touch(_, line, j):
    """Ask for the part of memory that holds entry `j` of a line, without waiting; numba has no function for it."""

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        address = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [address.type], ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
        )
        # To be read, kept in all caches, data.
        builder.call(function, [address, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return numba.types.void(line, j), generate


_prefetch: Any = intrinsic(_touch)


@_jit
def _select(keys, places, count, c):
    """Move the `c` smallest of the first `count` keys to the front, in any order; return the largest of them."""
    low, high = 0, count - 1
    while low < high:
        a, b, pivot = keys[low], keys[high], keys[(low + high) // 2]
        if a > b:
            a, b = b, a
        if pivot < a:
            pivot = a
        elif pivot > b:
            pivot = b
        i, j = low, high
        while i <= j:
            while keys[i] < pivot:
                i += 1
            while keys[j] > pivot:
                j -= 1
            if i <= j:
                keys[i], keys[j] = keys[j], keys[i]
                places[i], places[j] = places[j], places[i]
                i += 1
                j -= 1
        if c - 1 <= j:
            high = j
        elif c - 1 >= i:
            low = i
        else:
            break
    largest = keys[0]
    for t in range(1, c):
        if keys[t] > largest:
            largest = keys[t]
    return largest


@_jit
def _reduce(keys, places, row, c):
    """Keep the `c` best candidates of a full buffer; return the last of them."""
    return _select(keys[row], places[row], keys.shape[1], c)


@_jit
def _rank_of(keys, best):
    """Return the key whose rank is the length of `best`, which is overwritten: few smallest of few keys."""
    best[:] = np.inf
    last = best.shape[0] - 1
    for t in range(keys.shape[0]):
        key = keys[t]
        if key < best[last]:
            j = last
            while j > 0 and best[j - 1] > key:
                best[j] = best[j - 1]
                j -= 1
            best[j] = key
    return best[last]


@_jit
def _below(norm, limit, products, norms, limits):
    """Return a bit for each pair below the limit of its row or of its column. Slices and int32: it becomes vectors."""
    bits = np.uint32(0)
    for j in range(_SKIP):
        key = norm + (norms[j] - np.float32(2.0) * products[j])
        bits |= np.uint32(key < max(limit, limits[j])) << np.uint32(j)
    return bits


@_jit
def knn_start(products, rows, row_norms, column_norms, rank, n_groups, limits):
    """Set the limits of rows from their products with a sample of all others, before any candidate is kept.

    The limit is the `rank`-th smallest of the minima of groups of columns, so at least `rank` - 1 pairs are below it
    if their keys differ, and few more. One pass over the tile and one selection among few numbers for each row.

    Parameters
    ----------
    products : ndarray of shape (n_rows, n_columns), float32
        Inner products with the sample.
    rows : ndarray of shape (n_rows,), int64
        Where the limit of each row of the tile is.
    row_norms, column_norms : ndarray of float32
        As for `knn_scan`.
    rank, n_groups : int
        ``rank <= n_groups <= n_columns``.
    limits : ndarray of float32
        Changed in place; none is raised.
    """
    minima, best = np.empty(n_groups, dtype=np.float32), np.empty(rank, dtype=np.float32)
    last = products.shape[1] - n_groups
    for i in range(products.shape[0]):
        norm, line = row_norms[i], products[i]
        for j in range(n_groups):
            minima[j] = np.inf
        for start in range(0, last + 1, n_groups):
            part, norms = line[start : start + n_groups], column_norms[start : start + n_groups]
            for j in range(n_groups):
                minima[j] = min(minima[j], norm + (norms[j] - np.float32(2.0) * part[j]))
        limits[rows[i]] = min(limits[rows[i]], _rank_of(minima, best))


@_jit
def knn_scan(products, rows, columns, own, row_norms, column_norms, both, c, keys, places, counts, limits):
    """Offer the pairs of a tile to the buffers of its rows and, if `both`, of its columns.

    Parameters
    ----------
    products : ndarray of shape (n_rows, n_columns), float32
        Inner products.
    rows, columns : ndarray of int64
        Buffer of each row of the tile, and position of each column; with `both`, the position is its buffer too.
    own : ndarray of shape (n_rows,), int64
        Position of each row itself, which is no candidate; -1 for none.
    row_norms, column_norms : ndarray of float32
        Squared norms as they enter the lower bound ``row_norm + column_norm - 2 product``.
    both : bool
        Whether the pairs count for the columns too.
    c : int
        Number of candidates that a full buffer keeps.
    keys, places : ndarray of shape (n_buffers, width), float32 and int32
        Buffers, changed in place.
    counts, limits : ndarray of shape (n_buffers,), int32 and float32
        Entries in use, and the key that a candidate must be below.
    """
    (m, n), width = products.shape, keys.shape[1]
    other = np.full(n, -np.inf, dtype=np.float32)
    if both:
        for j in range(n):
            other[j] = limits[columns[j]]
    for i in range(m):
        row, norm, mine = rows[i], row_norms[i], own[i]
        limit, count = limits[row], counts[row]
        line = products[i]
        for start in range(0, n, _SKIP):
            stop = start + _SKIP
            if stop <= n:
                bits = _below(norm, limit, line[start:stop], column_norms[start:stop], other[start:stop])
            else:
                bits = (np.uint32(1) << np.uint32(n - start)) - np.uint32(1)
            while bits != 0:
                after = bits & (bits - np.uint32(1))
                j = start + _POSITIONS[((bits ^ after) * np.uint32(_SEQUENCE) & np.uint32(0xFFFFFFFF)) >> np.uint32(27)]
                bits = after
                key = norm + (column_norms[j] - np.float32(2.0) * line[j])
                column = columns[j]
                # Written out twice: a call per candidate costs more than all the rest.
                if key < limit and column != mine:
                    keys[row, count] = key
                    places[row, count] = column
                    count += 1
                    if count == width:
                        limit = _reduce(keys, places, row, c)
                        count = c
                if key < other[j]:
                    used = counts[column]
                    keys[column, used] = key
                    places[column, used] = row
                    used += 1
                    if used == width:
                        other[j] = _reduce(keys, places, column, c)
                        used = c
                    counts[column] = used
        counts[row], limits[row] = count, limit
    if both:
        for j in range(n):
            limits[columns[j]] = other[j]


@_jit
def _ask_for(row, line):
    """Ask for a row to come that is read soon."""
    for j in range(0, row.shape[0], line):
        _prefetch(row, j)


@_jit
def _plain_squares(X, queries, rows, columns, out):
    last, line = rows.shape[0] - 1, 64 // X.itemsize
    for t in range(last + 1):
        ahead = min(t + 4, last)
        _ask_for(X[columns[ahead]], line)
        _ask_for(queries[rows[ahead]], line)
        row, query, total = X[columns[t]], queries[rows[t]], 0.0
        for j in range(row.shape[0]):
            u = np.float64(row[j]) - np.float64(query[j])
            total += u * u
        out[t] = total


@_jit
def pair_squares(X, queries, rows, columns, scale, out):
    """Write the squared distances, times the squared scale, of pairs of a query and a row, by direct differences.

    Parameters
    ----------
    X : ndarray of shape (n, d), float32 or float64
    queries : ndarray of shape (m, d), float32 or float64
    rows, columns : ndarray of shape (n_pairs,), int64
        Query and row of each pair.
    scale : float
        Factor of the entries.
    out : ndarray of shape (n_pairs,), float64
        Changed in place.
    """
    # Far from the ends of float64 the sum can be scaled instead of the entries, with the same result.
    if 1e-100 < scale < 1e100:
        _plain_squares(X, queries, rows, columns, out)
        for t in range(rows.shape[0]):
            out[t] *= scale * scale
        return
    for t in range(rows.shape[0]):
        row, query, total = X[columns[t]], queries[rows[t]], 0.0
        for j in range(row.shape[0]):
            u = np.float64(row[j]) * scale - np.float64(query[j]) * scale
            total += u * u
        out[t] = total


@_jit
def _by_column(X, queries, within, scale, rows, columns):
    """Return the squares of pairs of a query and a row searched, which are measured in the order of these rows."""
    n, n_pairs = within.shape[0] if within.shape[0] else X.shape[0], rows.shape[0]
    ends = np.zeros(n + 1, dtype=np.int32)
    for t in range(n_pairs):
        ends[columns[t] + 1] += 1
    for j in range(n):
        ends[j + 1] += ends[j]
    places, squares = np.empty(n_pairs, dtype=np.int32), np.empty(n_pairs)
    ordered_rows, ordered_columns = np.empty(n_pairs, dtype=np.int64), np.empty(n_pairs, dtype=np.int64)
    for t in range(n_pairs):
        column = columns[t]
        place = ends[column]
        ends[column] += 1
        places[t], ordered_rows[place] = place, rows[t]
        ordered_columns[place] = within[column] if within.shape[0] else column
    pair_squares(X, queries, ordered_rows, ordered_columns, scale, squares)
    in_order = np.empty(n_pairs)
    for t in range(n_pairs):
        in_order[t] = squares[places[t]]
    return in_order


@_jit
def _sort(values, places, count, sorted_values, sorted_places):
    """Write values in increasing order, equal ones in order of place, with their places."""
    if count > _COUNTED:
        # By insertion at shrinking distances.
        for t in range(count):
            sorted_values[t], sorted_places[t] = values[t], places[t]
        gap = count
        while gap > 1:
            gap = max(1, (5 * gap) // 11)
            for t in range(gap, count):
                value, place, u = sorted_values[t], sorted_places[t], t
                while u >= gap and (
                    value < sorted_values[u - gap]
                    or (value == sorted_values[u - gap] and place < sorted_places[u - gap])
                ):
                    sorted_values[u] = sorted_values[u - gap]
                    sorted_places[u] = sorted_places[u - gap]
                    u -= gap
                sorted_values[u] = value
                sorted_places[u] = place
        return
    for t in range(count):
        value, rank, ties = values[t], 0, 0
        for u in range(count):
            rank += values[u] < value
            ties += values[u] == value
        if ties > 1:
            for u in range(count):
                rank += values[u] == value and places[u] < places[t]
        sorted_values[rank] = value
        sorted_places[rank] = places[t]


@_jit
def knn_settle(X, queries, within, scale, slack, keys, places, counts, limits, distances, indices, sure):
    """Measure the candidates of each query; write its nearest in order, and whether they are proven to be that.

    Parameters
    ----------
    X, queries, scale
        As for `pair_squares`.
    within : ndarray of int64
        Position in `X` of each row searched; empty if all rows are.
    slack : float
        Factor above 1 that covers the rounding errors of measured squares.
    keys, places, counts, limits : ndarray
        Buffers of the queries, as `knn_scan` leaves them. `keys` and `places` may share the memory of the result.
    distances, indices : ndarray of shape (m, k), float64 and int64
        Changed in place. Of a query with fewer than `k` candidates they become infinite and 0.
    sure : ndarray of shape (m,), bool
        Changed in place: whether the `k`-th distance is below the bound of every row that was left out.

    Notes
    -----
    The `k` best by key come first, then those whose bound is below what is reached so far, few if the bounds are tight.
    Both are measured for all queries in the order of the rows of `X`: these stream by once, the queries stay near.
    """
    (m, k), width = distances.shape, keys.shape[1]
    rows, columns = np.empty(m * k, dtype=np.int64), np.empty(m * k, dtype=np.int64)
    used = 0
    for row in range(m):
        if counts[row] >= k:
            _select(keys[row], places[row], counts[row], k)
            for t in range(k):
                rows[used], columns[used] = row, places[row, t]
                used += 1
    best = _by_column(X, queries, within, scale, rows[:used], columns[:used])
    numbers, used, n_more = np.zeros(m, dtype=np.int64), 0, 0
    for row in range(m):
        if counts[row] >= k:
            farthest = 0.0
            for t in range(used, used + k):
                farthest = max(farthest, best[t])
            reached = slack * farthest
            used += k
            numbers[row] = k
            for t in range(k, counts[row]):
                if keys[row, t] <= reached:
                    places[row, numbers[row]] = places[row, t]
                    numbers[row] += 1
            n_more += numbers[row] - k
    rows, columns = np.empty(n_more, dtype=np.int64), np.empty(n_more, dtype=np.int64)
    used = 0
    for row in range(m):
        for t in range(k, numbers[row]):
            rows[used], columns[used] = row, places[row, t]
            used += 1
    more = _by_column(X, queries, within, scale, rows, columns)
    at, squares, in_order = np.empty(width, dtype=np.int64), np.empty(width), np.empty(width)
    at_in_order = np.empty(width, dtype=np.int64)
    used, used_more = 0, 0
    for row in range(m):
        if counts[row] < k:
            for t in range(k):
                distances[row, t] = np.inf
                indices[row, t] = 0
            sure[row] = False
            continue
        count = numbers[row]
        for t in range(count):
            squares[t] = best[used + t] if t < k else more[used_more + t - k]
            at[t] = within[places[row, t]] if within.shape[0] else places[row, t]
        used, used_more = used + k, used_more + count - k
        _sort(squares, at, count, in_order, at_in_order)
        for t in range(k):
            distances[row, t] = np.sqrt(in_order[t]) / scale
            indices[row, t] = at_in_order[t]
        sure[row] = in_order[k - 1] * slack < limits[row]
