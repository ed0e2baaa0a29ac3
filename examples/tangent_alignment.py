r"""Does the gradient of a language model live where its activations live?

Trains a small causal transformer on text that every Python ships (no download), or takes any Hugging Face language
model, and asks at several depths, early and late in training, how much of the back-propagated gradient a *tangent
proxy* captures: a low-rank space fitted on early activations alone, and then frozen.

    python examples/tangent_alignment.py
    python examples/tangent_alignment.py --model EleutherAI/pythia-160m --revision-early step1000 \
        --revision-late step143000 --text corpus.txt

Prints one table, and writes it with a figure to the folder --out. In the table:

- gradient "rows" is dL/dh at the probe, one gradient per token; "weight" is the gradient of the first Linear that
  reads the probe, on its input side;
- e_T and e_N are the energy shares of the proxy and of a normal control of the same rank, energy_ratio is e_T / e_N,
  chance is r / d;
- pvalue (Monte Carlo) and zscore (closed form) compare e_T with random subspaces of the normal space;
- shuffled_share is what a weight gradient would show if inputs and output gradients were paired at random: what the
  covariance of the inputs alone gives;
- delta_isotropy is the change of the gradient's IsoScore* in percent when the proxy (or the control) is projected
  out, and sign_test_pvalue tests over evaluation batches that the proxy's is the larger one.

The first 30 % of the evaluation batches fit the proxies; gradients are tested on the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from isogeom.decomposition import PCA, SemiNMF
from isogeom.gradients import harvest, probes, weight_sites
from isogeom.plotting import TangentAlignmentDisplay
from isogeom.tangent import TangentAlignmentResult, TangentProxy, tangent_alignment_test, weight_alignment_test

FIT_SHARE = 0.3
COLUMNS = [
    *("model", "gradient", "probe", "regime", "n", "r", "e_T", "e_N", "chance", "energy_ratio", "ratio_to_mean_normal"),
    *("pvalue", "zscore", "shuffled_share", "delta_isotropy_tangent", "delta_isotropy_normal", "sign_test_pvalue"),
    "n_groups",
]


@dataclass
class Study:
    """Models by regime (built one at a time), the evaluation batches they all see, and the loss."""

    models: dict[str, dict[str, Callable[[], torch.nn.Module]]]  # name -> regime -> model
    batches: list[dict[str, torch.Tensor]]
    loss: str


def tiny_study(args: argparse.Namespace) -> Study:
    """Train the small transformer."""
    from _tiny_lm import DEFAULT, QUICK, train

    config = QUICK if args.quick else DEFAULT
    check_rank(args.n_directions, config.d_model)
    checkpoints = train(config, args.seed)
    for name, loss in checkpoints.validation_losses.items():
        print(f"step {checkpoints.config.steps[name]:>4} ({name}): validation loss {loss:.3f} nats per token")
    return Study(
        models={
            "tiny": {name: lambda name=name: checkpoints.model(name) for name in ("early", "late")},
            "tiny-random": {"init": lambda: checkpoints.model("init")},
        },
        batches=checkpoints.batches(),
        loss="causal-lm",
    )


def hub_study(args: argparse.Namespace) -> Study:
    """Load two checkpoints of a Hugging Face model, and one at random."""
    from _hf_lm import check_distinct, load_model, random_like, read_text, text_batches

    early, tokenizer, kind = load_model(args.model, args.revision_early)
    late, _, late_kind = load_model(args.model, args.revision_late)
    if kind != late_kind:
        raise ValueError(f"--revision-early is {kind}, --revision-late {late_kind}: give checkpoints of one model.")
    check_distinct(early, late)
    check_rank(args.n_directions, early.get_input_embeddings().embedding_dim)
    n_batches = 20 if args.quick else 40
    batches = text_batches(
        read_text(args.text), tokenizer, early, kind, context=args.context, n_batches=n_batches, seed=args.seed
    )
    name = Path(args.model).name
    return Study(
        models={
            name: {"early": lambda: early, "late": lambda: late},
            f"{name}-random": {"init": lambda: random_like(early, args.seed)},
        },
        batches=batches,
        loss=kind,
    )


def measure(study: Study, proxy: TangentProxy, seed: int) -> Iterator[tuple[dict[str, Any], TangentAlignmentResult]]:
    """Harvest each model, fit the proxies in its first regime, test every regime against them."""
    n_fit = round(FIT_SHARE * len(study.batches))
    for name, regimes in study.models.items():
        proxies: dict[tuple[str, str], TangentProxy] = {}
        for regime, build in regimes.items():
            model = build()
            sites = {
                **{("rows", probe): site for probe, site in probes(model).items()},
                **{("weight", probe): site for probe, site in weight_sites(model).items()},
            }
            h = harvest(model, study.batches, sites=sorted(set(sites.values())), loss=study.loss, seed=seed)
            early = h.meta.batch_id < n_fit
            if not proxies:
                proxies = {key: _fit(proxy, h[site].activations[early], seed) for key, site in sites.items()}
            for (gradient, probe), site in sites.items():
                result = _test(gradient, h[site], ~early, h.meta.batch_id[~early], proxies[gradient, probe], seed)
                yield {"model": name, "gradient": gradient, "probe": probe, "regime": regime}, result


def _fit(proxy: TangentProxy, X: np.ndarray, seed: int) -> TangentProxy:
    from sklearn.base import clone

    fresh = clone(proxy)
    seeds = {name: seed for name in fresh.get_params() if name.endswith("random_state")}
    return fresh.set_params(**seeds).fit(X)


def _test(
    gradient: str, rows: Any, late: np.ndarray, groups: np.ndarray, proxy: TangentProxy, seed: int
) -> TangentAlignmentResult:
    G = rows.gradients[late]
    if gradient == "rows":
        return tangent_alignment_test(G, proxy, groups=groups, rng=seed)
    # The closed form of the shuffled pairing is exact: no permutations are needed for its share.
    return weight_alignment_test(rows.activations[late], G, proxy, groups=groups, n_permutations=0, rng=seed)


def as_row(key: dict[str, Any], result: TangentAlignmentResult) -> dict[str, Any]:
    """One line of the table."""
    named = {
        "n": getattr(result, "n_pairs", result.n_samples),
        "r": result.n_directions,
        "e_T": result.share_tangent,
        "e_N": result.share_normal,
        "shuffled_share": getattr(result, "shuffled_share", None),
    }
    values = {**result.to_dict(), **key, **named}
    return {name: values[name] for name in COLUMNS}


def write(table: pd.DataFrame, results: list[tuple[dict[str, Any], TangentAlignmentResult]], out: Path) -> list[Path]:
    """Write the table and the figure, and return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    csv, png = out / "tangent_alignment.csv", out / "tangent_alignment.png"
    table.to_csv(csv, index=False, lineterminator="\n")
    rows = {(key["probe"], key["regime"]): result for key, result in results if key["gradient"] == "rows"}
    # In the order of training: the random model first.
    rows = {pair: rows[pair] for pair in sorted(rows, key=lambda pair: ("init", "early", "late").index(pair[1]))}
    TangentAlignmentDisplay.from_results(rows).plot().figure_.savefig(png, dpi=120)
    return [csv, png]


def _natural(text: str) -> int:
    """Read a nonnegative integer."""
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _positive(text: str) -> int:
    """Read a positive integer."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def check_rank(n_directions: int | None, width: int) -> None:
    """Refuse a rank without a matched control before anything long runs."""
    if n_directions is not None and 2 * n_directions > width:
        raise SystemExit(f"--n-directions {n_directions} is more than half of the model's width {width}: lower it.")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the results (default: out)")
    parser.add_argument("--seed", type=_natural, default=0, help="seed of everything random (default: 0)")
    parser.add_argument("--quick", action="store_true", help="a smaller model or fewer batches, in seconds")
    parser.add_argument("--n-directions", type=_positive, help="rank of the proxies (default: min(16, d // 2))")
    # No ICA here: its proxy has the axes of PCA (see TangentProxy, Notes), so it would print the same table.
    parser.add_argument("--decomposition", choices=["pca", "semi-nmf"], default="pca")
    hub = parser.add_argument_group("a Hugging Face causal or masked language model instead (needs the hf extra)")
    hub.add_argument("--model", help="name, or folder of save_pretrained()")
    hub.add_argument("--revision-early", help="branch, tag or commit; a sub-folder if --model is a folder")
    hub.add_argument("--revision-late", help="likewise")
    hub.add_argument("--text", type=Path, help="text file (.txt or .txt.gz) to evaluate on")
    hub.add_argument("--context", type=int, default=64, help="tokens per window (default: 64)")
    args = parser.parse_args(argv)
    given = [args.model, args.revision_early, args.revision_late, args.text]
    if any(value is not None for value in given) and None in given:
        parser.error("--model, --revision-early, --revision-late and --text go together: give all four, or none.")
    return args


def main(argv: list[str] | None = None) -> pd.DataFrame:
    args = parse(argv)
    # Two threads on a busy machine with two cores are slower than one, and one thread gives the same bytes every time.
    torch.set_num_threads(1)
    study = tiny_study(args) if args.model is None else hub_study(args)
    n_components = 16 if args.n_directions is None else args.n_directions
    decomposition = PCA() if args.decomposition == "pca" else SemiNMF(n_components)
    proxy = TangentProxy(decomposition, n_directions=args.n_directions)
    results = list(measure(study, proxy, args.seed))
    table = pd.DataFrame([as_row(key, result) for key, result in results], columns=list(COLUMNS))
    with pd.option_context("display.width", 250, "display.max_columns", None, "display.max_rows", None):
        print(table.to_string(index=False, na_rep="-", float_format=lambda value: f"{value:.4g}"))
    for path in write(table, results, args.out):
        print(f"wrote {path}")
    return table


if __name__ == "__main__":
    main()
