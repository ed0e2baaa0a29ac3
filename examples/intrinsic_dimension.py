"""Intrinsic dimension of handwritten digits, by scale and by layer of a classifier.

    python examples/intrinsic_dimension.py            # half a minute
    python examples/intrinsic_dimension.py --quick    # seconds

Prints the dimension at every scale, then the dimension of the pixels and of every hidden layer of a small network
before and after training, with confidence intervals; writes both tables and a figure to ``--out``.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from isogeom.dimension import MLE, Gride, TwoNN, id_profile, layer_dimensions
from isogeom.plotting import IDProfileDisplay


def hidden_layers(model: MLPClassifier, X: np.ndarray) -> list[np.ndarray]:
    """Return the activations of the hidden layers."""
    layers = []
    for weights, bias in zip(model.coefs_[:-1], model.intercepts_[:-1], strict=True):
        X = np.tanh(X @ weights + bias)
        layers.append(X)
    return layers


def train(X: np.ndarray, y: np.ndarray, n_iter: int) -> MLPClassifier:
    model = MLPClassifier((64, 64, 64), activation="tanh", max_iter=n_iter, random_state=0)
    with warnings.catch_warnings():
        # A training cut short is what the first of the two models is for.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(X, y)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows and training steps")
    parser.add_argument("--out", type=Path, default=Path("intrinsic_dimension"), help="folder for tables and figure")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)

    X, y = load_digits(return_X_y=True)
    X = X / 16.0
    if arguments.quick:
        X, y = X[:600], y[:600]

    profile = id_profile(X)
    print(profile, "\n")
    profile.to_frame().to_csv(arguments.out / "profile.csv", index=False)
    IDProfileDisplay.from_profile(profile).plot().figure_.savefig(arguments.out / "profile.png", dpi=150)

    layers = {"pixels": X}
    for name, n_iter in (("early", 1), ("late", 10 if arguments.quick else 200)):
        model = train(X, y, n_iter)
        layers |= {f"layer {i}, {name}": rows for i, rows in enumerate(hidden_layers(model, X), start=1)}
    table = layer_dimensions(layers, estimators=[TwoNN("mle"), MLE(), Gride(8)])
    print(table)
    table.to_frame().to_csv(arguments.out / "layers.csv", index=False)
    print(f"\nTables and figure are in {arguments.out}/")


if __name__ == "__main__":
    main()
