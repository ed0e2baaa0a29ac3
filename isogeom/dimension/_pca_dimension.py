"""Dimension from the eigenvalues of the covariance."""

from __future__ import annotations

from typing import Any

import numpy as np

from isogeom import _random, _xp
from isogeom._moments import Moments
from isogeom._neighbors import NeighborTable
from isogeom._validation import check_choice, check_integer, check_real
from isogeom._xp import Array
from isogeom.dimension._base import Estimate
from isogeom.dimension._dependence import Inflation, normal_interval
from isogeom.dimension._doubts import report_heavy_row, report_no_signal
from isogeom.dimension._participation import CORRECTIONS, corrected_ratio
from isogeom.dimension._pca_products import Products, patch_ratio, patch_spectra
from isogeom.dimension._pca_rules import RULES, Spectra, apply_rule, leading, null_quantile
from isogeom.dimension._rows_estimator import RowsEstimator, reference_positions, used_rows


class PCADimension(RowsEstimator):
    r"""Dimension from the eigenvalues of the covariance, by one of ten rules.

    Parameters
    ----------
    rule : str, default='share'
        'share', 'participation', 'kaiser', 'broken_stick', 'fukunaga_olsen', 'max_gap', 'fan', 'gavish_donoho',
        'marchenko_pastur' or 'parallel'; see Notes.
    threshold : float, default=None
        Of the rules that have one, 0 to 1: cumulative share of the variance ('share', None for 0.95), share of the
        largest eigenvalue ('fukunaga_olsen', 0.05), quantile of the null eigenvalues ('parallel', 0.95).
    center : bool, default=True
        Whether `fit` subtracts the mean of the rows. Neighbourhoods in `transform` are always centred.
    bias_correction : {None, 'samples', 'features', 'both'}, default=None
        For 'participation': average over distinct rows, distinct features or both, which removes the bias of few of
        them. 'features' estimates the ratio of the population that the features were drawn from.
    noise_variance : float, default=None
        Known variance of isotropic noise, for 'gavish_donoho' and 'marchenko_pastur'; None estimates it from the median
        eigenvalue, as `transform` always does.
    n_resamples : int, default=100
        Number of null spectra for 'parallel'.
    n_neighbors_local : int, default=100
        Number of rows of the neighbourhoods that `transform` applies the rule to.
    metric : str, default='euclidean'
        Metric of those neighbourhoods.
    duplicates : {'drop', 'raise', 'keep'}, default='keep'
        What to do with rows that repeat an earlier row. They harm no eigenvalue, so they count by default.
    confidence_level : float, default=0.95
        Of `dimension_interval_`.
    n_jobs : int, default=None
        Ignored: products use the threads of the array library.
    random_state : int, RandomState instance, Generator or None, default=0
        Draws the null spectra.

    Attributes
    ----------
    dimension_ : float
        The estimate: an integer for all rules but 'participation'.
    dimension_std_ : float or None
        Standard error of the participation ratio, by the infinitesimal jackknife over rows. None for the counting
        rules, which are step functions of the rows, and for moments, which do not hold the rows.
    dimension_interval_ : tuple of float or None
        Confidence interval, where there is a standard error.
    eigenvalues_ : array of shape (min(n_features, n_samples - 1),)
        Eigenvalues of the covariance, descending, in the squared unit of the rows; infinite or 0 where that is beyond
        the range of floats, which the estimate does not depend on.
    n_samples_used_ : int
        Number of rows that entered.
    n_samples_dropped_ : int
        0.
    n_duplicates_ : int
        Number of rows that repeat an earlier row.
    table_ : NeighborTable or None
        The rows; None after `fit` on moments.
    n_features_in_ : int
        Number of features seen during `fit`.
    feature_names_in_ : ndarray of shape (n_features_in_,)
        Names of the features, if `X` had string column names.

    See Also
    --------
    LocalPCADimension : The same rules on neighbourhoods: the dimension of a curved manifold.
    isogeom.isotropy.participation_ratio : The ratio as a function.

    Notes
    -----
    With eigenvalues :math:`l_1 \ge ... \ge l_p` of the covariance of n rows:

    - 'share': smallest m with :math:`\sum_{j \le m} l_j \ge a \sum l_j`.
    - 'participation': :math:`(\sum l)^2 / \sum l^2`.
    - 'kaiser': number of :math:`l_j` above their mean.
    - 'broken_stick': number of leading j with :math:`l_j / \sum l > \frac1p \sum_{i \ge j} 1/i`.
    - 'fukunaga_olsen': number of :math:`l_j > a\, l_1`.
    - 'max_gap': the j of largest :math:`l_j / l_{j+1}`.
    - 'fan': with the mean of the tail subtracted, which starts where 95 % of the variance are reached, the first j with
      a ratio above 10 to the next or a cumulative share above 0.8.
    - 'marchenko_pastur': number of eigenvalues beyond the edge of pure noise. 'gavish_donoho': beyond the threshold
      from where keeping an eigenvalue lowers the error of the signal.
    - 'parallel': number of leading eigenvalues above the quantile of those of independent normal features of the same
      variances (in `transform`: of equal variances).

    All see the linear span, so they bound the dimension of a curved manifold from above. 'share', 'participation' and
    'fukunaga_olsen' do not change if constant features are added; the other rules count these among their p.

    The naive ratio obeys :math:`1/PR_{naive} \approx 1/n + 1/p + 1/PR`. Corrected, numerator and denominator are
    averages over distinct rows i, j, l, r (and distinct features),
    :math:`\langle v_{iijj}\rangle - 2\langle v_{iijl}\rangle + \langle v_{ijlr}\rangle` and
    :math:`\langle v_{ijij}\rangle - 2\langle v_{ijjl}\rangle + \langle v_{ijlr}\rangle`,
    :math:`v_{ijlr} = \langle x_{ia} x_{ja} x_{lb} x_{rb} \rangle_{ab}`: computed from second and fourth moments here.

    'broken_stick', 'gavish_donoho', 'marchenko_pastur' and 'parallel' look for directions of larger variance than
    noise has: isotropic rows (a cube, a Gaussian) have none, and uncorrelated features none by 'parallel', which gives
    0, with a warning, or by chance a few. One row far from all others
    can outweigh every direction but its own: `fit` warns if a row carries more than half of the total variance.

    `transform` applies the rule to neighbourhoods. With k rows no count exceeds k - 1, and curvature adds dimensions.
    For k = 100 in cubes of dimension 2, 5, 10 and 20 (where `fit` on 4000 rows gives 2.00, 4.99, 9.97 and 19.91),
    'participation' has a relative noise of 0.06, 0.05, 0.03 and 0.02, and a mean of 1.92, 4.43, 8.53 and 16.26: few
    rows and edges lower it. 'share' has 0, 0, 0.02 and 0.02 (means 2, 5, 9.05 and 17.9), 'fukunaga_olsen' none; those
    that look for larger variances are nearly all noise there ('parallel', d = 5: 0.46, with a spread of 0.70).

    References
    ----------
    K. Fukunaga and D. R. Olsen, "An algorithm for finding intrinsic dimensionality of data", IEEE Transactions on
    Computers C-20(2), 1971. :doi:`10.1109/T-C.1971.223208`

    M. Fan, N. Gu, H. Qiao and B. Zhang, "Intrinsic dimension estimation of data by principal component analysis", 2010.
    :arxiv:`1002.2050`

    M. Gavish and D. L. Donoho, "The optimal hard threshold for singular values is 4/sqrt(3)", IEEE Transactions on
    Information Theory 60(8), 2014. :doi:`10.1109/TIT.2014.2323359`

    J. L. Horn, "A rationale and test for the number of factors in factor analysis", Psychometrika 30, 1965.
    :doi:`10.1007/BF02289447`

    C. Chun et al., "Estimating dimensionality of neural representations from finite samples", 2025.
    :arxiv:`2509.26560`

    Examples
    --------
    >>> import numpy as np
    >>> from isogeom.dimension import PCADimension
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((500, 4)) @ rng.standard_normal((4, 30)) + 0.01 * rng.standard_normal((500, 30))
    >>> PCADimension(rule="marchenko_pastur").fit(X).dimension_
    4.0
    """

    def __init__(
        self,
        rule: str = "share",
        threshold: float | None = None,
        *,
        center: bool = True,
        bias_correction: str | None = None,
        noise_variance: float | None = None,
        n_resamples: int = 100,
        n_neighbors_local: int = 100,
        metric: str = "euclidean",
        duplicates: str = "keep",
        confidence_level: float = 0.95,
        n_jobs: int | None = None,
        random_state: Any = 0,
    ) -> None:
        self.rule = rule
        self.threshold = threshold
        self.center = center
        self.bias_correction = bias_correction
        self.noise_variance = noise_variance
        self.n_resamples = n_resamples
        self.n_neighbors_local = n_neighbors_local
        self.metric = metric
        self.duplicates = duplicates
        self.confidence_level = confidence_level
        self.n_jobs = n_jobs
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Any:
        """Estimate the dimension.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features), NeighborTable or Moments
            Rows; a table that holds them; or their streamed moments, after which `transform` is not available.
        y : None
            Ignored.

        Returns
        -------
        PCADimension
            The fitted estimator.

        Raises
        ------
        ValueError
            If there are fewer than 3 distinct rows, a parameter is out of range, the variance is zero, or the rule
            needs the rows and only moments were passed.
        """
        if not isinstance(X, Moments):
            return super().fit(X, y)
        self._check_parameters()
        if X.count < 3:
            raise ValueError(f"X has moments of {X.count} row(s): at least 3 are needed.")
        if self.rule == "participation" and self.bias_correction in ("samples", "both"):
            raise ValueError(
                f"bias_correction={self.bias_correction!r} needs the rows: moments hold no fourth powers. Pass rows, "
                "or bias_correction='features' or None."
            )
        estimate = self._from_products(Products.from_moments(X, bool(self.center)))
        # Moments hold no rows.
        self.table_ = None  # type: ignore[assignment]
        self.n_features_in_ = int(X.mean.shape[0])
        self.dimension_, self.dimension_std_, self.dimension_interval_ = estimate.dimension, None, None
        self.n_samples_used_, self.n_samples_dropped_, self.n_duplicates_ = int(X.count), 0, 0
        self.eigenvalues_ = estimate.attributes["eigenvalues_"]
        return self

    def transform(self, X: Any) -> Array:
        """Return the local dimension at each row: the rule on its nearest reference rows.

        Parameters
        ----------
        X : array-like of shape (n_queries, n_features) or NeighborTable
            Rows; a row that coincides with one of `fit` is treated as that row.

        Returns
        -------
        array of shape (n_queries, 1)
            Finite; where the neighbourhood gives no value, `dimension_`.

        Raises
        ------
        ValueError
            If the estimator was fitted on moments, or the number of features differs from that of `fit`.
        """
        if getattr(self, "table_", self) is None:
            raise ValueError("PCADimension was fitted on moments, which hold no rows to compare with: fit on rows.")
        return super().transform(X)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        check_choice(self.rule, "rule", tuple(RULES))
        check_choice(self.center, "center", (True, False))
        check_choice(self.bias_correction, "bias_correction", CORRECTIONS)
        check_integer(self.n_resamples, "n_resamples", low=1)
        if self.threshold is not None:
            check_real(self.threshold, "threshold", low=0, high=1)
        if self.noise_variance is not None and check_real(self.noise_variance, "noise_variance", low=0) == 0:
            raise ValueError("noise_variance=0 must be positive: leave it None to estimate it.")

    def _threshold(self) -> float | None:
        return RULES[self.rule] if self.threshold is None else float(self.threshold)

    def _estimate(self, table: NeighborTable) -> Estimate:
        products = Products.of(used_rows(table), bool(self.center))
        estimate = self._from_products(products)
        report_heavy_row(type(self).__name__, products, reference_positions(table))
        return estimate

    def _from_products(self, products: Products) -> Estimate:
        spectra = products.spectra()
        if float(spectra.values[0]) <= 0:
            raise ValueError("X has no variance: its rows must differ.")
        std = interval = None
        if self.rule == "participation":
            dimension, std = self._participation(products)
            if std is not None:
                free = Inflation(1.0, float(products.freedom))
                interval = normal_interval(dimension, std, free, self.confidence_level)
        elif self.rule == "parallel":
            variances = _xp.to_numpy(products.variances).astype(np.float64) / products.freedom
            dimension = float(leading(*self._beyond_null(spectra, variances)))
        else:
            noise = None if self.noise_variance is None else self.noise_variance * products.scale**2
            dimension = float(apply_rule(self.rule, spectra, self._threshold(), noise))
        if dimension == 0:
            report_no_signal(type(self).__name__, self.rule)
        # Rows beyond 1e154 have variances that no float holds.
        with np.errstate(over="ignore", under="ignore"):
            attributes = {"eigenvalues_": spectra.values / products.scale / products.scale}
        return Estimate(dimension, std, interval, products.n, 0, attributes)

    def _beyond_null(self, spectra: Spectra, variances: np.ndarray) -> tuple[Any, Array]:
        rng = _random.check_rng(self.random_state, "random_state")
        null = null_quantile(variances, int(spectra.freedom), float(self._threshold() or 0), self.n_resamples, rng)
        values = spectra.values[..., : len(null)]
        return _xp.array_namespace(values), values > _xp.asarray_like(null, values)

    def _participation(self, products: Products) -> tuple[float, float | None]:
        xp = _xp.array_namespace(products.matrix)
        total, frobenius = float(xp.sum(products.variances)), float(xp.sum(products.matrix * products.matrix))
        naive = total * total / frobenius
        if products.rows is None:
            squares = forms = fourths = None
        else:
            squares, forms, fourths = products.row_statistics()
        dimension = naive
        if self.bias_correction is not None:
            if products.n < 4:
                raise ValueError(f"bias_correction={self.bias_correction!r} needs at least 4 rows, got {products.n}.")
            by_feature = None
            if self.bias_correction != "samples":
                by_feature = (products.variances, products.variances if fourths is None else fourths)
            fourth = total if squares is None else float(xp.sum(squares * squares))
            dimension = float(
                corrected_ratio(
                    products.n, total, fourth, frobenius, by_feature, kind=self.bias_correction, center=products.center
                )
            )
            if not np.isfinite(dimension):
                raise ValueError(
                    f"bias_correction={self.bias_correction!r}: the unbiased estimate of the squared covariances is "
                    "not positive, too few rows or features for it: pass more, or bias_correction=None."
                )
        if squares is None or forms is None:
            return dimension, None
        influence = 2 * (forms / frobenius - squares / total)
        relative = float(xp.sqrt(xp.sum(influence * influence)))
        # Corrections shift 1 / PR by about a constant.
        return dimension, relative * naive * (dimension / naive) ** 2

    def _patch_values(self, patch: Array) -> Array:
        k, d = int(patch.shape[1]), int(patch.shape[2])
        xp = _xp.array_namespace(patch)
        if self.rule == "participation":
            return patch_ratio(patch, self.bias_correction)
        spectra = patch_spectra(patch)
        if self.rule == "parallel":
            unit = Spectra(spectra.values * d / spectra.total, d, k - 1)
            passed = leading(*self._beyond_null(unit, np.ones(d)))
            return xp.where(spectra.total[..., 0] > 0, xp.astype(passed, patch.dtype), xp.nan)
        return apply_rule(self.rule, spectra, self._threshold())
