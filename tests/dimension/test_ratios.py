"""TwoNN, Gride and MLE: published values, exact laws, identities."""

import numpy as np
import pytest
from oracles import dimension as oracle
from scipy import stats

from isogeom.dimension import MLE, Gride, NeighborTable, TwoNN
from isogeom.dimension._gride import solve_ratios

A, B = oracle.fixture_a(), oracle.fixture_b()
BALL = oracle.hyper_ball(1000, 5, 0)


def poisson_table(n, k, d, seed):
    return table_of(oracle.poisson_distances(n, k, d, np.random.default_rng(seed)))


def table_of(distances):
    n, k = distances.shape
    # Positions are not used by the estimates, only by their standard errors.
    return NeighborTable.from_arrays(distances, (np.arange(n)[:, np.newaxis] + 1 + np.arange(k)) % n)


@pytest.mark.parametrize(
    ("model", "X", "expected"),
    [
        (TwoNN(), A, 4.36217653266),
        (TwoNN("mle"), A, 4.11313891730),
        (TwoNN(), B, 3.22120513044),
        (TwoNN("mle"), B, 3.32807161101),
        (TwoNN(), oracle.hyper_ball(500, 5, 0), 4.159093274087),
        (TwoNN(), oracle.hyper_sphere(500, 30, 1), 21.534662028475),
        (TwoNN(), BALL, 4.641794191),
        (TwoNN("mle"), BALL, 4.678901202),
        (TwoNN("censored"), BALL, 4.649848845),
        (MLE(unbiased=False), A, 4.43582345694),
        (MLE(5, unbiased=False), A, 4.39211347128),
        (MLE(unbiased=False, average="mean"), A, 4.67110085488),
        (MLE(unbiased=False), B, 3.77125056455),
        (MLE(5, unbiased=False), B, 3.75045176965),
        (MLE(unbiased=False, average="mean"), B, 4.01317929537),
        (MLE(unbiased=False), BALL, 4.496519782),
        (MLE(unbiased=False, average="mean"), BALL, 4.764824700),
    ],
)
def test_published_values(model, X, expected):
    assert model.fit(X).dimension_ == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(("discard", "first_at_zero"), [(0.1, 4.05496), (0.05, 4.11323)])
def test_the_distribution_function_starts_at_one_over_n(discard, first_at_zero):
    """Other packages started it at 0, which is too small by up to a tenth on few rows: their values, and ours."""
    X = np.pad(oracle.hyper_ball(30, 5, 0), ((0, 0), (0, 25)))
    distances = NeighborTable.from_rows(X, 2).distances
    x = np.sort(np.log(distances[:, 1] / distances[:, 0]))[: int(30 * (1 - discard))]
    lines = [-np.log1p(-np.arange(start, start + len(x)) / 30) @ x / (x @ x) for start in (0, 1)]
    assert lines[0] == pytest.approx(first_at_zero, abs=1e-5)
    assert TwoNN(discard_fraction=discard).fit(X).dimension_ == pytest.approx(lines[1], rel=1e-12)


def test_a_zero_padded_small_ball():
    X = np.pad(oracle.hyper_ball(30, 5, 0), ((0, 0), (0, 25)))
    assert MLE(20, unbiased=False).fit(X).dimension_ == pytest.approx(3.341161830518, abs=1e-8)
    assert MLE(5, unbiased=False).fit(X).dimension_ == pytest.approx(4.350132038094, abs=1e-8)


@pytest.mark.parametrize(
    ("X", "published"),
    [
        (A, 4.20235906447),
        (B, 3.57276369273),
        (np.pad(oracle.hyper_ball(30, 5, 0), ((0, 0), (0, 25))), 3.165311207860),
        (BALL, 4.259860846),
    ],
)
def test_published_values_called_unbiased(X, published):
    """They are the pooled estimate times (k - 2) / (k - 1), the factor that unbiases the estimate from one row."""
    assert MLE(20, unbiased=False).fit(X).dimension_ * 18 / 19 == pytest.approx(published, abs=1e-8)


def test_the_factor_of_one_row_is_too_small_for_the_pooled_estimate():
    d, n, k, repeats = 5.0, 400, 20, 100
    pooled = [MLE(k, unbiased=False).fit(poisson_table(n, k, d, seed)).dimension_ for seed in range(repeats)]
    ours = [MLE(k).fit(poisson_table(n, k, d, seed)).dimension_ for seed in range(repeats)]
    error = d / np.sqrt(n * (k - 1) * repeats)
    assert abs(np.mean(ours) - d) < 4 * error
    # 18 / 19 of it: 5 % too small, many errors away.
    assert np.mean(pooled) * (k - 2) / (k - 1) == pytest.approx(d * (k - 2) / (k - 1), abs=4 * error)
    assert d / (k - 1) > 20 * error


@pytest.mark.parametrize(
    ("X", "values", "errors"),
    [
        (A, [4.11314, 4.66693, 4.31244], [0.23747, 0.19417, 0.12729]),
        (B, [3.32807, 3.97115, 3.88788], [0.19215, 0.16538, 0.11467]),
    ],
)
def test_gride_scales_are_the_published_ones(X, values, errors):
    scales = Gride(max_neighbors=8).fit(X).scales_
    np.testing.assert_allclose(scales["dimension"], values, atol=6e-6)
    # The published errors are those of independent rows; at ranks 1 and 2 with n, not n - 2, under the root.
    nominal = [Gride(n1).fit(X).dimension_std_nominal_ for n1 in (1, 2, 4)]
    np.testing.assert_allclose(nominal[1:], errors[1:], atol=6e-6)
    assert nominal[0] * np.sqrt(298 / 300) == pytest.approx(errors[0], abs=6e-6)


def test_gride_scales_of_a_larger_ball():
    expected = [4.67890, 4.66395, 4.49721, 4.47911, 4.37638, 4.17558]
    np.testing.assert_allclose(Gride().fit(BALL).scales_["dimension"], expected, atol=6e-6)


def test_identities_between_the_estimators():
    two = TwoNN("mle").fit(BALL).dimension_
    assert Gride().fit(BALL).dimension_ == pytest.approx(two, rel=1e-12)
    assert MLE(2).fit(BALL).dimension_ == pytest.approx(two, rel=1e-12)
    assert TwoNN("censored", 0.0).fit(BALL).dimension_ == pytest.approx(two, rel=1e-12)


@pytest.mark.parametrize(("n1", "n2"), [(1, 2), (1, 3), (2, 3), (4, 8), (3, 17)])
def test_gride_solves_its_equation(n1, n2):
    distances = oracle.poisson_distances(300, 20, 7.0, np.random.default_rng(1))
    logs = np.log(distances[:, n2 - 1] / distances[:, n1 - 1])
    expected = oracle.gride(distances, n1, n2)
    assert solve_ratios(logs[np.newaxis, :], n1, n2)[0] == pytest.approx(expected, rel=1e-10)
    with_gap = np.append(logs, np.nan)[np.newaxis, :]
    assert solve_ratios(with_gap, n1, n2)[0] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("d", [0.5, 3.0, 40.0])
def test_exact_laws_on_independent_rows(d):
    n, repeats = 400, 300
    found = {"mle": [], "censored": [], "linear": [], "gride": [], "lb": []}
    for seed in range(repeats):
        table = poisson_table(n, 8, d, seed)
        found["mle"].append(TwoNN("mle").fit(table).dimension_)
        found["censored"].append(TwoNN("censored").fit(table).dimension_)
        found["linear"].append(TwoNN().fit(table).dimension_)
        found["gride"].append(Gride(2, max_neighbors=2).fit(table).dimension_)
        found["lb"].append(MLE(8).fit(table).dimension_)
    spread = {
        "mle": d / np.sqrt(n - 2),
        "censored": d / np.sqrt(0.9 * n - 2),
        "linear": float(np.mean([TwoNN().fit(poisson_table(n, 8, d, s)).dimension_std_nominal_ for s in range(20)])),
        "gride": float(np.mean([Gride(2, max_neighbors=2).fit(poisson_table(n, 8, d, 0)).dimension_std_nominal_])),
        "lb": d / np.sqrt(7 * n - 2),
    }
    for name, values in found.items():
        # The published line through the origin lies 0.3 % above; the others are unbiased.
        mean = d * 1.003 if name == "linear" else d
        assert abs(np.mean(values) - mean) < 4 * spread[name] / np.sqrt(repeats), name
        # The relative error of a standard deviation from m draws is 1 / sqrt(2 m).
        assert np.std(values) == pytest.approx(spread[name], rel=4 / np.sqrt(2 * repeats)), name


def thinned(distances, k, keep):
    """Return the first k distances of every row that a search with misses finds: each is found if `keep` says so."""
    order = np.argsort(~keep, axis=1, kind="stable")[:, :k]
    assert np.take_along_axis(keep, order, axis=1).all()
    return np.take_along_axis(distances, order, axis=1)


@pytest.mark.parametrize("recall", [0.9, 0.7, 0.5])
def test_random_misses_thin_the_rows_and_change_no_law(recall):
    """What a search finds at random of a Poisson process is one of lower density: estimates keep mean and error."""
    d, n, repeats = 5.0, 400, 200
    found = {"two": [], "lb": [], "gride": []}
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        distances = oracle.poisson_distances(n, 60, d, rng)
        table = table_of(thinned(distances, 8, rng.random(distances.shape) < recall))
        found["two"].append(TwoNN("mle").fit(table).dimension_)
        found["lb"].append(MLE(8).fit(table).dimension_)
        found["gride"].append(Gride(2, max_neighbors=2).fit(table).dimension_)
    spread = {
        "two": d / np.sqrt(n - 2),
        "lb": d / np.sqrt(7 * n - 2),
        "gride": Gride(2, max_neighbors=2).fit(table).dimension_std_nominal_,
    }
    for name, values in found.items():
        assert abs(np.mean(values) - d) < 4 * spread[name] / np.sqrt(repeats), name
        assert np.std(values) == pytest.approx(spread[name], rel=4 / np.sqrt(2 * repeats)), name


@pytest.mark.parametrize("recall", [0.9, 0.7, 0.5])
def test_random_misses_on_the_torus(recall):
    d, n, repeats = 5, 2000, 30
    values = []
    for seed in range(repeats):
        distances, _ = oracle.torus_neighbors(n, d, seed, 40)
        keep = np.random.default_rng(1000 + seed).random(distances.shape) < recall
        values.append(TwoNN("mle").fit(table_of(thinned(distances, 2, keep))).dimension_)
    # Rows depend on each other: the spread of estimates is up to 1.3 times that of independent ones.
    assert abs(np.mean(values) - d) < 4 * 1.3 * d / np.sqrt(n * repeats)


def test_misses_of_the_nearest_bias():
    """If it is always the nearest that is missed, the ratio of ranks 2 and 3 has half the mean: twice the dimension."""
    distances = oracle.poisson_distances(20000, 3, 5.0, np.random.default_rng(0))
    keep = np.tile([False, True, True], (20000, 1))
    assert TwoNN("mle").fit(table_of(thinned(distances, 2, keep))).dimension_ == pytest.approx(10.0, rel=0.04)


def test_sums_of_log_ratios_are_gamma_variables():
    distances = oracle.poisson_distances(3000, 10, 5.0, np.random.default_rng(0))
    local = oracle.levina_bickel(distances, 10)
    assert stats.kstest(9 / local, stats.gamma(9, scale=1 / 5).cdf).pvalue > 1e-3
    table = NeighborTable.from_arrays(distances, (np.arange(3000)[:, np.newaxis] + 1 + np.arange(10)) % 3000)
    got = MLE(10, n_neighbors_local=10).fit(table).transform(table)[:, 0]
    np.testing.assert_allclose(got, local * 8 / 9, rtol=1e-12)


def test_a_discard_of_nothing_is_finite():
    # A distribution function that reaches 1 has no logarithm there.
    assert np.isfinite(TwoNN(discard_fraction=0).fit(A).dimension_)


@pytest.mark.parametrize("model", [TwoNN(), TwoNN("mle"), MLE(5), Gride(2)])
@pytest.mark.parametrize("policy", ["drop", "keep"])
def test_one_duplicated_row_changes_little(model, policy):
    expected = model.fit(A).dimension_
    model.set_params(duplicates=policy)
    try:
        model.fit(np.concatenate((A, A[:1])))
    finally:
        model.set_params(duplicates="drop")
    assert model.dimension_ == pytest.approx(expected, rel=0.02)
    assert model.n_duplicates_ == 1
    if policy == "keep" and not isinstance(model, Gride):
        # The two equal rows have no logarithm; ranks 2 and 4 do not see their distance 0.
        assert model.n_samples_dropped_ >= 2


def test_scores_peak_at_the_true_dimension():
    distances = oracle.poisson_distances(4000, 8, 6.0, np.random.default_rng(3))
    table = NeighborTable.from_arrays(distances, (np.arange(4000)[:, np.newaxis] + 1 + np.arange(8)) % 4000)
    X = oracle.hyper_ball(400, 4, 0)
    for model in (TwoNN("mle"), Gride(2), MLE(6)):
        model.fit(X)
        best, scores = model.dimension_, []
        for factor in (0.7, 1.0, 1.4):
            model.dimension_ = best * factor
            scores.append(model.score(X))
        assert scores[1] > scores[0]
        assert scores[1] > scores[2]
    assert MLE(6).fit(table).dimension_ == pytest.approx(6.0, rel=0.05)


def test_gride_density_integrates_to_one():
    from scipy.integrate import quad

    X = oracle.hyper_ball(50, 3, 0)
    model = Gride(3).fit(X)
    model._query_values = lambda X, k, value: np.asarray(X)
    total = quad(lambda mu: np.exp(model.score(np.array([np.log(mu)]))), 1.0, np.inf)[0]
    assert total == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (TwoNN(method="lms"), "method='lms' must be one of"),
        (TwoNN(discard_fraction=1.0), "discard_fraction=1.0 must be below 1"),
        (TwoNN(confidence_level=1.0), "confidence_level=1.0 must lie between"),
        (TwoNN(duplicates="ignore"), "duplicates='ignore' must be one of"),
        (MLE(1), "n_neighbors=1 must be at least 2"),
        (MLE(2, average="mean"), "n_neighbors=2 must be at least 3"),
        (Gride(2, 2), "n2=2 must be at least 3"),
        (Gride(0), "n1=0 must be at least 1"),
        (Gride(200), "n2=400 is above the"),
    ],
)
def test_wrong_parameters_are_named(model, message):
    with pytest.raises(ValueError, match=message):
        model.fit(A)
