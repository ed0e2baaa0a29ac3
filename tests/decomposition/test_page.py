"""The page on decompositions runs as typed, and says what is so."""

from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "decomposition.md"


@pytest.mark.filterwarnings("ignore:.* did not converge:sklearn.exceptions.ConvergenceWarning")
def test_the_page_on_decompositions_runs_as_typed():
    pytest.importorskip("torch", reason="torch is not installed")
    names = {}
    for part in PAGE.read_text(encoding="utf-8").split("```python\n")[1:]:
        exec(part.split("```")[0], names)
    model, X = names["model"], names["data"].X
    assert names["recovered"] > 0.99
    assert (model.converged_, model.stop_reason_, model.n_dead_atoms_, model.n_duplicate_atoms_) == (True, "tol", 0, 0)
    assert 1 <= model.code_cancellation_ < 3
    assert model.kkt_residual_ < 1e-10
    right, wrong = (names["SemiNMF"](16, alpha=0, init=init, random_state=0).fit(X) for init in ("kmeans", "svd"))
    assert max(right.reconstruction_err_, wrong.reconstruction_err_) < model.reconstruction_err_
    match = names["match_dictionaries"]
    assert match(names["data"].dictionary, right.dictionary_).min_cosine > 0.95
    assert match(names["data"].dictionary, wrong.dictionary_).mean_cosine < 0.9
    scores = names["search"].cv_results_["mean_test_score"]
    assert np.all(np.diff(scores) > 0)
    assert names["search"].best_params_ == {"n_components": 16}
    np.testing.assert_allclose(names["streamed"].to_numpy().components_, model.components_, atol=1e-6)
    assert names["importance"].sum() == pytest.approx(1)
    assert names["finer"].components_.shape == (4, 64)
    assert names["stability"] > 0.99
    assert names["ica"].converged_
    assert names["ica"].n_gaussian_ == 0
    rows = names["X"]
    residual = rows - names["pca"].inverse_transform(names["pca"].transform(rows))
    assert names["pca"].tail_energies_[4] == pytest.approx(np.linalg.norm(residual), rel=1e-6)
    assert float(names["rows"].grad.abs().max()) > 0
