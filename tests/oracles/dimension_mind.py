"""Maximum likelihood of the ratio of the first to the (k + 1)-th distance."""

import numpy as np
from scipy import optimize


def log_likelihood(d, x, k):
    """Log-likelihood of dimension d, x = ln(r_{k+1} / r_1)."""
    rho = np.exp(-x)
    return len(x) * np.log(k * d) + (d - 1) * np.log(rho).sum() + (k - 1) * np.log(1 - rho**d).sum()


def mind_real(distances, k):
    """Largest log-likelihood over all dimensions, by golden section."""
    x = np.log(distances[:, k] / distances[:, 0])
    found = optimize.minimize_scalar(
        lambda d: -log_likelihood(d, x, k), bounds=(0.01, 300), method="bounded", options={"xatol": 1e-10}
    )
    return found.x


def mind_integer(distances, k, largest=200):
    """Largest log-likelihood over integers, by trying them all."""
    x = np.log(distances[:, k] / distances[:, 0])
    return 1 + int(np.argmax([log_likelihood(d, x, k) for d in range(1, largest + 1)]))
