"""The method of moments, row by row."""


def mom_values(distances, k, *, last_included):
    """Dimension of every row from the mean of its first k distances (or k - 1 of them) over the k-th."""
    values = []
    for row in distances:
        w = row[k - 1]
        near = row[:k] if last_included else row[: k - 1]
        mean = sum(near) / len(near)
        values.append(mean / (w - mean))
    return values
