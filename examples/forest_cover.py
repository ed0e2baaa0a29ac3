"""Forest Cover Type: grid search over decompositions, and the gradients of a small network by class frequency.

    python examples/forest_cover.py                      # downloads the data once (11 MB) through scikit-learn
    python examples/forest_cover.py --quick              # fewer rows, in seconds
    python examples/forest_cover.py --data-home FOLDER   # where fetch_covtype has left the data before

54 features of a patch of forest predict one of 7 kinds of trees; the commonest is a hundred times as frequent as the
rarest. Three tables are printed, and written with a figure to the folder --out:

- grid: a scikit-learn Pipeline (scaler, decomposition, classifier) searched over PCA, ICA and Semi-NMF and their sizes.
  The classifier splits one component at a time, so the axes count and not only the space that they span;
- alignment: a network is trained, its hidden layers and their gradients are harvested early and late. A tangent proxy
  is fitted on 30 % of the early activations and then frozen; e_T and e_N are the shares of the gradients of the other
  rows in it and in a normal control of the same rank, energy_ratio is e_T / e_N, chance is r / d;
- classes: the same for each class alone, with equally many rows of each: IsoScore* of its activations, the share of its
  first component, and the enrichment of its gradients in the proxy (share over the mean share of random normal spaces).
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.datasets import fetch_covtype
from sklearn.ensemble import ExtraTreesClassifier
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.nn.functional import cross_entropy

from isogeom.decomposition import ICA, PCA, SemiNMF
from isogeom.gradients import harvest
from isogeom.isotropy import isoscore_star
from isogeom.tangent import TangentProxy, tangent_alignment_test

CLASSES = ["spruce/fir", "lodgepole pine", "ponderosa pine", "cottonwood/willow", "aspen", "douglas fir", "krummholz"]
LAYERS = ["hidden1", "hidden2", "hidden3"]
CLASS_LAYER = "hidden2"
N_DIRECTIONS = 16
FIT_SHARE = 0.3
TESTED = ["n_samples", "share_tangent", "share_normal", "chance", "energy_ratio", "ratio_to_mean_normal", "pvalue"]
TESTED += ["zscore", "delta_isotropy_tangent", "delta_isotropy_normal", "sign_test_pvalue", "n_groups"]


@dataclass(frozen=True)
class Size:
    """Rows and steps of a run."""

    grid_rows: int
    sizes: tuple[int, ...]
    training_rows: int
    n_steps: int
    harvest_rows: int
    rows_per_class: int  # fewer if the rarest class has fewer


FULL = Size(12_000, (8, 16, 24), 200_000, 4_000, 12_800, 1_000)
QUICK = Size(2_000, (4, 12), 8_000, 400, 2_560, 300)


def load(data_home: Path | None, offline: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the features, (n, 54) float64, and the classes 0 to 6; leave with a sentence if there is no data."""
    try:
        X, y = fetch_covtype(data_home=data_home, download_if_missing=not offline, return_X_y=True)
    except OSError as error:  # no file and no network
        where = "scikit-learn's data home" if data_home is None else f"the data home {data_home}"
        raise SystemExit(
            f"Forest Cover Type is not in {where} and was not downloaded ({error}): run "
            "sklearn.datasets.fetch_covtype() once with a network, or give --data-home a folder where it has run."
        ) from None
    return X, y.astype(np.int64) - 1


def scaler() -> object:
    """Return the scaler of the 10 measurements; the 44 indicators of area and soil stay 0 and 1.

    Scaled to unit variance, a soil that one row in ten thousand has would weigh as much as the elevation.
    """
    return make_column_transformer((StandardScaler(), list(range(10))), remainder="passthrough")


def stratified(y: np.ndarray, n_rows: int, rows: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split `rows` in two with equal class shares: `n_rows` of them, or all but 7 if there are fewer, and the rest."""
    n_rows = min(n_rows, len(rows) - len(CLASSES))
    chosen, rest = train_test_split(rows, train_size=n_rows, stratify=y[rows], random_state=seed)
    return chosen, rest


# ---------------------------------------------------------------------- scikit-learn: pipeline and grid search


def search(X: np.ndarray, y: np.ndarray, size: Size, seed: int) -> tuple[GridSearchCV, pd.DataFrame]:
    """Search the decomposition and its size by cross-validated balanced accuracy."""
    trees = ExtraTreesClassifier(50, min_samples_leaf=2, class_weight="balanced", random_state=seed)
    pipeline = Pipeline([("scale", scaler()), ("decompose", PCA()), ("classify", trees)])
    decompositions = [PCA(), ICA(random_state=seed), SemiNMF(max_iter=1000, random_state=seed)]
    grid = {"decompose": decompositions, "decompose__n_components": list(size.sizes)}
    found = GridSearchCV(pipeline, grid, scoring="balanced_accuracy", cv=3).fit(X, y)
    results = found.cv_results_
    table = pd.DataFrame(
        {
            "decomposition": [type(model).__name__ for model in results["param_decompose"]],
            "n_components": results["param_decompose__n_components"].astype(int),
            "balanced_accuracy": results["mean_test_score"],
            "std": results["std_test_score"],
        }
    )
    return found, table


# ---------------------------------------------------------------------- torch: training and harvest


def network(n_features: int, width: int = 64) -> nn.Sequential:
    """Three hidden layers of equal width."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for name in LAYERS:
        layers[name] = nn.Sequential(nn.Linear(n_features, width), nn.GELU())
        n_features = width
    layers["head"] = nn.Linear(width, len(CLASSES))
    return nn.Sequential(layers)


def losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of each row: unreduced, so that a gradient row does not depend on the size of its batch."""
    return cross_entropy(model(batch["features"]), batch["label"], reduction="none")


def train(X: np.ndarray, y: np.ndarray, n_steps: int, seed: int) -> dict[str, nn.Module]:
    """Train, and return the network after 5 % of the steps and after all of them."""
    torch.manual_seed(seed)
    model, features, labels = network(X.shape[1]), torch.as_tensor(X, dtype=torch.float32), torch.as_tensor(y)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=n_steps)
    snapshots = {}
    for step in range(1, n_steps + 1):
        rows = torch.randint(len(labels), (512,))
        loss = losses(model, {"features": features[rows], "label": labels[rows]}).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step in (n_steps // 20, n_steps):
            state = {name: value.clone() for name, value in model.state_dict().items()}
            snapshots["early" if step < n_steps else "late"] = state
    models = {}
    for regime, state in snapshots.items():
        models[regime] = network(X.shape[1])
        models[regime].load_state_dict(state)
    return models


def batches(X: np.ndarray, y: np.ndarray, size: int = 128) -> list[dict[str, torch.Tensor]]:
    features, labels = torch.as_tensor(X, dtype=torch.float32), torch.as_tensor(y)
    parts = zip(features.split(size), labels.split(size), strict=True)
    return [{"features": rows, "label": kinds} for rows, kinds in parts if len(rows) == size]


def align(
    models: dict[str, nn.Module], data: list[dict[str, torch.Tensor]], seed: int
) -> tuple[pd.DataFrame, dict[str, TangentProxy]]:
    """Fit proxies on early activations, test early and late gradients; return the table and the PCA proxies."""
    kinds = {"PCA": PCA(), "SemiNMF": SemiNMF(N_DIRECTIONS, max_iter=1000, random_state=seed)}
    proxies: dict[tuple[str, str], TangentProxy] = {}
    lines = []
    for regime, model in models.items():
        h = harvest(model, data, sites=LAYERS, loss=losses, seed=seed)
        fitted = h.meta.batch_id < FIT_SHARE * len(data)
        for layer in LAYERS:
            for kind, decomposition in kinds.items():
                if regime == "early":
                    proxy = TangentProxy(clone(decomposition), n_directions=N_DIRECTIONS)
                    proxies[layer, kind] = proxy.fit(h[layer].activations[fitted])
                G, groups = h[layer].gradients[~fitted], h.meta.batch_id[~fitted]
                result = tangent_alignment_test(G, proxies[layer, kind], groups=groups, rng=seed).to_dict()
                lines.append({"layer": layer, "proxy": kind, "regime": regime, **{key: result[key] for key in TESTED}})
    return pd.DataFrame(lines), {layer: proxies[layer, "PCA"] for layer in LAYERS}


def by_class(
    models: dict[str, nn.Module], X: np.ndarray, y: np.ndarray, frequency: np.ndarray, proxy: TangentProxy, seed: int
) -> pd.DataFrame:
    """Test each class alone, at one layer: how isotropic it is, and how far its gradients are in the proxy of all."""
    lines = []
    for regime, model in models.items():
        data = [{"features": torch.as_tensor(X, dtype=torch.float32), "label": torch.as_tensor(y)}]
        rows = harvest(model, data, sites=[CLASS_LAYER], loss=losses, seed=seed)[CLASS_LAYER]
        with torch.no_grad():
            right = (model(data[0]["features"]).argmax(1) == data[0]["label"]).numpy()
        for kind, name in enumerate(CLASSES):
            A, G = rows.activations[y == kind], rows.gradients[y == kind]
            variances = PCA().fit(A).explained_variance_ratio_
            result = tangent_alignment_test(G, proxy, n_resamples=199, rng=seed)
            lines.append(
                {
                    "class": name,
                    "frequency": frequency[kind],
                    "regime": regime,
                    "n": len(A),
                    "recall": right[y == kind].mean(),
                    "isoscore_star": isoscore_star(A),
                    "first_component": variances[0],
                    "e_T": result.share_tangent,
                    "enrichment": result.ratio_to_mean_normal,
                    "gradient_norm": np.sqrt((G.astype(float) ** 2).sum(1).mean()),
                }
            )
    return pd.DataFrame(lines)


# ---------------------------------------------------------------------- output


def figure(grid: pd.DataFrame, alignment: pd.DataFrame, classes: pd.DataFrame, path: Path) -> None:
    """Draw the three tables side by side."""
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    for name, part in grid.groupby("decomposition", sort=False):
        left.errorbar(part.n_components, part.balanced_accuracy, part["std"], marker="o", capsize=3, label=name)
    left.set(xlabel="number of components", ylabel="balanced accuracy (3 folds)", title="Grid search")
    left.set_xticks(sorted(set(grid.n_components)))
    colours = {"PCA": "C0", "SemiNMF": "C2"}
    for (kind, regime), part in alignment.groupby(["proxy", "regime"], sort=False):
        style = {"color": colours[kind], "linestyle": "-" if regime == "late" else "--", "marker": "o"}
        middle.plot(part.layer, part.ratio_to_mean_normal, label=f"{kind}, {regime}", **style)
    middle.axhline(1, color="0.6", linewidth=1)
    middle.set(yscale="log", ylabel="gradient share in the proxy / in normal spaces", title="Tangent alignment")
    for regime, part in classes.groupby("regime", sort=False):
        filled = "C0" if regime == "late" else "none"
        right.scatter(part.frequency, part.enrichment, facecolors=filled, edgecolors="C0", label=f"PCA, {regime}")
    late = classes[classes.regime == "late"].sort_values("frequency")
    for i, (name, x, y) in enumerate(zip(late["class"], late.frequency, late.enrichment, strict=True)):
        offset = (4, (5, -10)[i % 2])
        right.annotate(name, (x, y), xytext=offset, textcoords="offset points", fontsize=7)
    right.axhline(1, color="0.6", linewidth=1)
    right.set(xscale="log", yscale="log", xlabel="class frequency", ylabel="enrichment of gradients in the proxy")
    right.set_title(f"Classes at {CLASS_LAYER}")
    right.set_xlim(right=2)
    for axes in (left, middle, right):
        axes.legend(fontsize=8)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def show(title: str, table: pd.DataFrame) -> None:
    with pd.option_context("display.width", 220, "display.max_columns", None):
        print(f"\n{title}\n{table.to_string(index=False, na_rep='-', float_format=lambda value: f'{value:.4g}')}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows, sizes and steps")
    parser.add_argument("--out", type=Path, default=Path("forest_cover"), help="folder for the tables and the figure")
    parser.add_argument("--data-home", type=Path, help="folder of scikit-learn's data (default: its own)")
    parser.add_argument("--offline", action="store_true", help="never download")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[str, pd.DataFrame]:
    args = parse(argv)
    X, y = load(args.data_home, args.offline)
    args.out.mkdir(parents=True, exist_ok=True)
    size = QUICK if args.quick else FULL
    torch.set_num_threads(1)  # small products: one thread is no slower, and gives the same bytes every time
    frequency = np.bincount(y, minlength=len(CLASSES)) / len(y)

    # One split for everything: what the network is trained on is never harvested, what is searched is never the test.
    harvested, rest = stratified(y, min(size.harvest_rows, len(y) // 5), np.arange(len(y)), args.seed)
    held, rest = stratified(y, len(y) // 4, rest, args.seed)
    trained, _ = stratified(y, size.training_rows, rest, args.seed)
    searched, _ = stratified(y, size.grid_rows, rest, args.seed)

    found, grid = search(X[searched], y[searched], size, args.seed)
    show(f"Grid search, {len(searched)} rows", grid)
    best = f"{type(found.best_params_['decompose']).__name__}({found.best_params_['decompose__n_components']})"
    tested, _ = stratified(y, 20_000, held, args.seed)
    score = balanced_accuracy_score(y[tested], found.predict(X[tested]))
    print(f"best: {best}, balanced accuracy {score:.4f} on {len(tested)} other rows")

    scale = scaler().fit(X[trained])
    models = train(scale.transform(X[trained]), y[trained], size.n_steps, args.seed)
    alignment, proxies = align(models, batches(scale.transform(X[harvested]), y[harvested]), args.seed)
    show(f"Alignment of gradients, {N_DIRECTIONS} directions of 64", alignment)

    per_class = min(size.rows_per_class, np.bincount(y[held]).min())
    rng = np.random.default_rng(args.seed)
    equal = np.concatenate([rng.permutation(held[y[held] == kind])[:per_class] for kind in range(len(CLASSES))])
    classes = by_class(models, scale.transform(X[equal]), y[equal], frequency, proxies[CLASS_LAYER], args.seed)
    show(f"Classes at {CLASS_LAYER}, {per_class} rows of each", classes)
    for regime, part in classes.groupby("regime", sort=False):
        ranks = {name: spearmanr(part.frequency, part[name]).statistic for name in ("isoscore_star", "enrichment")}
        print(f"{regime}: rank correlation with frequency, 7 classes:", *(f"{k} {v:+.2f}" for k, v in ranks.items()))

    tables = {"grid": grid, "alignment": alignment, "classes": classes}
    for name, table in tables.items():
        table.to_csv(args.out / f"{name}.csv", index=False, lineterminator="\n")
    figure(grid, alignment, classes, args.out / "forest_cover.png")
    print(f"\nTables and figure are in {args.out}/")
    return tables


if __name__ == "__main__":
    main()
