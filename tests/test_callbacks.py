"""Progress and early stop through scikit-learn's callbacks, shown on a small iterative estimator."""

import importlib.util
import subprocess
import sys
import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.pipeline import make_pipeline

from isogeom import Moments
from isogeom._callbacks import IterativeMixin, Steps
from isogeom._validation import Transformer
from isogeom.decomposition import ICA, PCA, SemiNMF


class Power(IterativeMixin, Transformer):
    """Leading direction of the Gram matrix by power iteration; stops where the value no longer rises."""

    def __init__(self, max_iter=20, tol=0.0):
        self.max_iter = max_iter
        self.tol = tol

    def fit(self, X, y=None):
        X = self._check_X(X, reset=True)
        vector, value, self.reason_ = np.ones(X.shape[1]), 0.0, "max_iter"
        with self._iterations(self.max_iter, X) as step:
            for n_iter in range(1, self.max_iter + 1):
                self.n_iter_ = n_iter
                image = X.T @ (X @ vector)
                last, value = value, np.linalg.norm(image)
                vector = image / value
                if step({"value": value}, lambda v=vector: {"vector_": v}):
                    self.reason_ = "callback"
                    break
                if abs(value - last) <= self.tol * value:
                    self.reason_ = "tol"
                    break
        self.vector_ = vector
        return self

    def transform(self, X):
        return X @ self.vector_[:, None]


class Recorder:
    """A callback that writes down every hook, and asks to stop after some iterations."""

    def __init__(self, stop_after=None, fail_at=None):
        self.stop_after, self.fail_at = stop_after, fail_at
        self.events, self.values, self.codes = [], [], []

    def setup(self, estimator, context):
        self.events.append("setup")

    def on_fit_task_begin(self, estimator, context):
        self.events.append(f"begin {context.task_name}")

    def on_fit_task_end(self, estimator, context, *, X=None, metadata=None, fitted_estimator=None):
        self.events.append(f"end {context.task_name}")
        if context.task_name != "iteration" or metadata is None:
            return False
        self.values.append(metadata["value"])
        self.codes.append(fitted_estimator.transform(X))
        if len(self.values) == self.fail_at:
            raise RuntimeError("a callback failed")
        return len(self.values) == self.stop_after

    def teardown(self, estimator, context):
        self.events.append("teardown")


@pytest.fixture
def X():
    return np.random.default_rng(0).standard_normal((40, 5)) * [4, 3, 2, 1, 1]


needs_callbacks = pytest.mark.skipif(
    importlib.util.find_spec("sklearn.callback") is None, reason="scikit-learn older than 1.9 has no callbacks"
)


@needs_callbacks
def test_every_iteration_is_reported(X):
    recorder = Recorder()
    model = Power(max_iter=4).set_callbacks(recorder).fit(X)
    middle = ["begin iteration", "end iteration"] * 4
    assert recorder.events == ["setup", "begin fit", *middle, "end fit", "teardown"]
    assert len(recorder.values) == model.n_iter_ == 4
    np.testing.assert_array_equal(recorder.codes[-1], model.transform(X))


@needs_callbacks
def test_a_callback_stops_the_loop(X):
    recorder = Recorder(stop_after=3)
    model = Power(max_iter=50).set_callbacks(recorder).fit(X)
    assert (model.n_iter_, model.reason_) == (3, "callback")
    np.testing.assert_array_equal(model.vector_, Power(max_iter=3).fit(X).vector_)
    assert recorder.events[-2:] == ["end fit", "teardown"]


@needs_callbacks
def test_convergence_before_max_iter_closes_the_begun_iteration(X):
    recorder = Recorder()
    model = Power(max_iter=500, tol=1e-10).set_callbacks(recorder).fit(X)
    assert model.reason_ == "tol"
    assert recorder.events.count("begin iteration") == recorder.events.count("end iteration")


@needs_callbacks
def test_a_failing_callback_is_torn_down_and_leaves_nothing_behind(X):
    recorder = Recorder(fail_at=2)
    model = Power().set_callbacks(recorder)
    with pytest.raises(RuntimeError, match="a callback failed"):
        model.fit(X)
    assert recorder.events[-1] == "teardown"
    assert not [name for name in vars(model) if name.startswith("_callback")]


@needs_callbacks
def test_callbacks_do_not_change_the_result(X):
    np.testing.assert_array_equal(Power().set_callbacks(Recorder()).fit(X).vector_, Power().fit(X).vector_)


@needs_callbacks
def test_callbacks_survive_clone_and_can_be_removed(X):
    recorder = Recorder()
    model = clone(Power(max_iter=2).set_callbacks(recorder)).fit(X)
    assert recorder.events
    recorder.events.clear()
    model.set_callbacks().fit(X)
    assert recorder.events == []


@needs_callbacks
def test_progress_bar(X, capsys):
    pytest.importorskip("rich", reason="rich is not installed")
    from sklearn.callback import ProgressBar

    Power(max_iter=7).set_callbacks(ProgressBar()).fit(X)
    shown = capsys.readouterr().out
    assert "Power" in shown
    assert "100%" in shown


@needs_callbacks
def test_progress_of_a_pipeline_reaches_the_estimator(X, capsys):
    pytest.importorskip("rich", reason="rich is not installed")
    from sklearn.callback import ProgressBar

    make_pipeline(Power(max_iter=3), Power(max_iter=3)).set_callbacks(ProgressBar()).fit(X)
    assert "Power" in capsys.readouterr().out


@needs_callbacks
def test_what_is_no_callback_is_refused():
    with pytest.raises(TypeError, match="FitCallback protocol"):
        Power().set_callbacks("progress")


def test_old_scikit_learn_fits_without_callbacks_and_says_what_is_missing(X, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.callback", None)
    assert Power(max_iter=3).fit(X).n_iter_ == 3
    with pytest.raises(ImportError, match=r"scikit-learn 1\.9 or later"):
        Power().set_callbacks(Recorder())


def test_without_callbacks_a_step_never_asks_to_stop():
    step = Steps()
    assert step({"value": 1.0}) is False
    step.close()
    assert not step.stop_requested


def test_fitting_without_callbacks_loads_no_callback_package():
    code = "import sys, isogeom.decomposition; print('sklearn.callback' in sys.modules, 'rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


class Objectives:
    """A callback that writes down objectives, and asks to stop after some of them."""

    def __init__(self, stop_after=None):
        self.stop_after, self.values = stop_after, []

    def setup(self, estimator, context):
        self.values.clear()

    def on_fit_task_begin(self, estimator, context):
        pass

    def on_fit_task_end(self, estimator, context, *, metadata=None):
        if context.task_name != "iteration" or "objective" not in (metadata or {}):
            return False
        self.values.append(metadata["objective"])
        return len(self.values) == self.stop_after

    def teardown(self, estimator, context):
        pass


@needs_callbacks
@pytest.mark.parametrize(
    "estimator",
    [
        SemiNMF(3, alpha=0.1, init="kmeans", tol=1e-9, random_state=0),
        ICA(3, fun="exp", tol=1e-9, random_state=0),
    ],
    ids=lambda e: type(e).__name__,
)
def test_decompositions_report_and_can_be_stopped(estimator):
    rows = np.random.default_rng(1).laplace(size=(300, 6))
    whole = clone(estimator)
    everything = Objectives()
    whole.set_callbacks(everything).fit(rows)
    plain = clone(estimator).fit(rows)
    np.testing.assert_array_equal(whole.components_, plain.components_)
    assert len(everything.values) > 3
    stopped = clone(estimator)
    seen = Objectives(stop_after=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        stopped.set_callbacks(seen).fit(rows)
    assert seen.values == everything.values[:2]
    assert not stopped.converged_
    assert np.isfinite(stopped.transform(rows)).all()


@needs_callbacks
def test_a_stopped_fit_of_semi_nmf_says_so():
    rows = np.random.default_rng(1).laplace(size=(300, 6))
    model = SemiNMF(3, alpha=0.1, init="kmeans", tol=1e-9, random_state=0)
    assert model.set_callbacks(Objectives(stop_after=2)).fit(rows).stop_reason_ == "callback"
    assert model.n_iter_ == 2


class Metadata:
    """A callback that keeps the metadata of every step, and asks to stop after some of them."""

    def __init__(self, stop_after=None):
        self.stop_after, self.steps, self.n_tasks, self.max_subtasks = stop_after, [], 0, None

    def setup(self, estimator, context):
        self.max_subtasks = context.max_subtasks

    def on_fit_task_begin(self, estimator, context):
        self.n_tasks += context.task_name == "iteration"

    def on_fit_task_end(self, estimator, context, *, metadata=None):
        if context.task_name != "iteration" or metadata is None:
            return False
        self.steps.append(metadata)
        return len(self.steps) == self.stop_after

    def teardown(self, estimator, context):
        pass


@needs_callbacks
class TestICA:
    @pytest.fixture
    def rows(self):
        return np.random.default_rng(0).laplace(size=(500, 5)) @ np.random.default_rng(1).standard_normal((5, 5))

    def test_every_iteration_of_both_stages_is_reported(self, rows):
        seen = Metadata()
        model = ICA(4, random_state=0).set_callbacks(seen).fit(rows)
        assert len(seen.steps) == model.n_iter_
        fixed_point = [step for step in seen.steps if set(step) == {"change"}]
        assert seen.steps[: len(fixed_point)] == fixed_point
        assert 2 < len(fixed_point) <= 20
        assert fixed_point[-1]["change"] <= 1e-2 < fixed_point[-2]["change"] <= 1
        rest = seen.steps[len(fixed_point) :]
        assert all(set(step) == {"objective", "gradient_norm"} for step in rest)
        assert rest[-1]["gradient_norm"] == pytest.approx(model.gradient_norm_)
        np.testing.assert_array_equal(model.components_, ICA(4, random_state=0).fit(rows).components_)

    def test_a_callback_stops_among_the_fastica_steps(self, rows):
        seen = Metadata(stop_after=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConvergenceWarning)
            model = ICA(4, n_init=3, random_state=0).set_callbacks(seen).fit(rows)
        assert len(seen.steps) == model.n_iter_ == 2
        assert not model.converged_
        assert model.gradient_norm_ > 1e-6
        with pytest.warns(ConvergenceWarning, match="in 2 iterations"):
            same = ICA(4, max_iter=2, random_state=0).fit(rows)
        np.testing.assert_array_equal(model.components_, same.components_)


@needs_callbacks
class TestPCA:
    @pytest.fixture
    def rows(self, monkeypatch):
        monkeypatch.setattr("isogeom._moments._BLOCKS_PER_PASS", 1)
        return np.random.default_rng(0).standard_normal((5000, 64)) * np.linspace(3, 1, 64)

    def test_covariance_reports_the_rows_so_far(self, rows):
        seen = Metadata()
        model = PCA(3).set_callbacks(seen).fit(rows)
        counts = [step["n_samples"] for step in seen.steps]
        assert len(counts) == seen.n_tasks == seen.max_subtasks == 3
        assert counts == [2048, 4096, 5000]
        np.testing.assert_array_equal(model.components_, PCA(3).fit(rows).components_)

    def test_a_stopped_covariance_is_that_of_the_rows_so_far(self, rows):
        model = PCA(3).set_callbacks(Metadata(stop_after=2)).fit(rows)
        assert model.n_samples_ == 4096
        np.testing.assert_array_equal(model.components_, PCA(3).fit(rows[:4096]).components_)

    def test_randomized_reports_the_share_outside(self, rows):
        settings = {"svd_solver": "randomized", "iterated_power": 3, "random_state": 0}
        seen, stopped = Metadata(), Metadata(stop_after=2)
        model = PCA(3, **settings).set_callbacks(seen).fit(rows)
        shares = [step["objective"] for step in seen.steps]
        assert len(shares) == seen.n_tasks == seen.max_subtasks == 4
        assert shares == sorted(shares, reverse=True)
        # The basis has ten directions more than the components: nothing is left out but what the best 13 leave out.
        least = 1 - PCA(13).fit(rows).explained_variance_ratio_.sum()
        assert least <= shares[-1] < shares[0] < 1
        np.testing.assert_array_equal(model.components_, PCA(3, **settings).fit(rows).components_)
        early = PCA(3, **settings).set_callbacks(stopped).fit(rows)
        fewer = PCA(3, **{**settings, "iterated_power": 1}).fit(rows)
        np.testing.assert_array_equal(early.components_, fewer.components_)

    def test_other_fits_are_one_task(self, rows):
        for model, data in ((PCA(2, svd_solver="full"), rows), (PCA(2), Moments().update(rows))):
            seen = Metadata()
            model.set_callbacks(seen).fit(data)
            assert (seen.n_tasks, seen.max_subtasks, seen.steps) == (1, 1, [])
