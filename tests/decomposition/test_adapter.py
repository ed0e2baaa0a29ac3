import inspect
import sys
from unittest import mock

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.decomposition import FastICA
from sklearn.exceptions import NotFittedError

from isogeom import _xp
from isogeom.decomposition import ICA, PCA, OvercompleteAdapter, SemiNMF, _tracing

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* did not converge:sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:n_gaussian_=:UserWarning"),
]
MODELS = [
    SemiNMF(3, random_state=0, tol=1e-3),
    SemiNMF(3, alpha=0.05, random_state=0, tol=1e-3),
    PCA(3),
    PCA(3, whiten=True),
    ICA(3, random_state=0),
]
# What a concept explainer touches: the abstract methods of overcomplete.base.BaseDictionaryLearning, its attributes,
# and the torch.nn.Module methods that explainers call on it.
PROTOCOL = ["encode", "decode", "fit", "get_dictionary", "nb_concepts", "device", "fitted", "to", "eval", "train"]


@pytest.fixture
def rows():
    return np.random.default_rng(0).laplace(size=(80, 6)) + 1.0


@pytest.fixture
def overcomplete_base(monkeypatch):
    """Abstract base class of the real package, or skip; its heavy optional imports are never used here."""
    pytest.importorskip("torch", reason="torch is not installed")
    plt = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    for name in ("torchvision", "timm", "timm.data", "cv2", "skimage", "einops"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    # Removed from matplotlib 3.9, still called at import.
    monkeypatch.setattr(plt.cm, "get_cmap", plt.get_cmap, raising=False)
    return pytest.importorskip("overcomplete.base", reason="overcomplete is not installed").BaseDictionaryLearning


@pytest.mark.parametrize("model", MODELS, ids=repr)
def test_round_trip_in_every_library(model, as_array, rows):
    X = as_array(rows)
    adapter = OvercompleteAdapter(type(model)(**model.get_params()))
    assert (adapter.fitted, adapter.nb_concepts) == (False, 3)
    Z, D = adapter.fit(X)
    assert (adapter.fitted, adapter.nb_concepts) == (True, 3)
    assert tuple(Z.shape) == (80, 3)
    assert tuple(D.shape) == (3, 6)
    assert type(Z) is type(D)
    np.testing.assert_allclose(_xp.to_numpy(adapter.encode(X)), _xp.to_numpy(Z), atol=1e-8)
    expected = _xp.to_numpy(adapter.estimator.inverse_transform(Z))
    np.testing.assert_allclose(_xp.to_numpy(adapter.decode(Z)), expected, atol=1e-10)


def test_the_protocol_is_complete():
    adapter = OvercompleteAdapter(SemiNMF(2))
    assert [name for name in PROTOCOL if not hasattr(adapter, name)] == []
    assert adapter.eval() is adapter
    assert adapter.train(False) is adapter
    assert "SemiNMF" in repr(adapter)


def test_against_the_real_base_class(overcomplete_base):
    for name in overcomplete_base.__abstractmethods__:
        theirs = list(inspect.signature(getattr(overcomplete_base, name)).parameters)
        ours = list(inspect.signature(getattr(OvercompleteAdapter, name)).parameters)
        assert ours[: len(theirs)] == theirs
    assert overcomplete_base.__abstractmethods__ <= set(PROTOCOL)


def test_decoding_is_differentiable_and_agrees_with_importance(rows):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from isogeom.decomposition import concept_importance

    X = torch.asarray(rows)
    adapter = OvercompleteAdapter(PCA(3, whiten=True))
    Z, D = adapter.fit(X)
    head = torch.linspace(-1, 1, 6, dtype=torch.float64)
    leaf = Z.clone().requires_grad_()
    torch.tanh(adapter.decode(leaf) @ head).sum().backward()
    slope = 1 - torch.tanh(adapter.decode(Z) @ head) ** 2
    torch.testing.assert_close(concept_importance(Z, slope[:, None] * head, D), Z * leaf.grad)


@pytest.mark.parametrize("model", [*MODELS, SemiNMF(8, alpha=0.02, ridge=0.3, random_state=0, tol=1e-3)], ids=repr)
@pytest.mark.parametrize("entries", [1, 2**22])
def test_encoding_is_differentiable(model, rows, entries, monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(_tracing, "_SYSTEM_ENTRIES", entries)
    adapter = OvercompleteAdapter(clone(model))
    X = torch.asarray(rows)
    adapter.fit(X)
    x = X[:7].clone().requires_grad_()
    codes = adapter.encode(x)
    assert torch.equal(codes.detach(), adapter.encode(X[:7]))
    assert codes.requires_grad
    assert not adapter.encode(X).requires_grad
    # Central differences of `transform`, which knows nothing of gradients; no code is near its bound here.
    weights = torch.linspace(-1, 2, codes.numel(), dtype=X.dtype).reshape(codes.shape)
    (codes * weights).sum().backward()
    slopes = torch.zeros_like(X[:7])
    for i in range(7):
        for j in range(6):
            up, down = X[:7].clone(), X[:7].clone()
            up[i, j] += 1e-6
            down[i, j] -= 1e-6
            change = adapter.estimator.transform(up) - adapter.estimator.transform(down)
            slopes[i, j] = (change * weights).sum() / 2e-6
    torch.testing.assert_close(x.grad, slopes, rtol=1e-6, atol=1e-7)


def test_gradients_through_both_ways_project(rows):
    """Decoding what was encoded is a projection on the atoms in use; its derivative is too."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    adapter = OvercompleteAdapter(SemiNMF(8, alpha=0, random_state=0, tol=1e-3))
    adapter.fit(torch.asarray(rows))
    for row in torch.asarray(rows)[:5]:
        J = torch.autograd.functional.jacobian(lambda x: adapter.decode(adapter.encode(x[None]))[0], row)
        active = adapter.get_dictionary()[adapter.encode(row[None])[0] > 0]
        torch.testing.assert_close(J, torch.linalg.pinv(active) @ active, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_in_lower_precision(rows, dtype):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    X = torch.asarray(rows).to(getattr(torch, dtype))
    adapter = OvercompleteAdapter(SemiNMF(3, random_state=0, tol=1e-3))
    adapter.fit(X)
    x, wide = X.clone().requires_grad_(), X.double().requires_grad_()
    codes = adapter.encode(x)
    assert codes.dtype == torch.float32
    codes.sum().backward()
    adapter.encode(wide).sum().backward()
    assert x.grad.dtype == X.dtype
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=5e-3 if dtype == "float16" else 1e-5, atol=1e-3)


def test_models_built_from_a_number_of_concepts(rows):
    """What Xplique's factorizer and Interpreto's explainer do with the class of a model, step by step."""
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def model_class(nb_concepts, device=None, **options):
        return OvercompleteAdapter(SemiNMF(nb_concepts, **options), device=device)

    model = model_class(nb_concepts=3, device="cpu", random_state=0)
    assert (model.nb_concepts, model.fitted, str(model.device)) == (3, False, "cpu")
    codes, atoms = (part.detach().cpu().numpy() for part in model.fit(torch.tensor(rows, device="cpu")))
    assert model.fitted
    np.testing.assert_array_equal(model.encode(torch.tensor(rows)).detach().cpu().numpy(), codes)
    activations = torch.tensor(rows, requires_grad=True)
    loss = model.decode(model.encode(activations)).square().sum()
    loss.backward()
    assert float(activations.grad.abs().max()) > 0
    np.testing.assert_allclose(float(loss), np.sum((codes @ atoms) ** 2), rtol=1e-12)
    model.to(torch.device("cpu"))
    model.device = torch.device("cpu")
    assert isinstance(model.get_dictionary(), torch.Tensor)


def test_batches_are_concatenated_in_order(rows):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.utils.data import DataLoader, TensorDataset

    X = torch.asarray(rows)
    whole, batched = OvercompleteAdapter(PCA(2)), OvercompleteAdapter(PCA(2))
    Z, _ = whole.fit(X)
    loader = DataLoader(TensorDataset(X), batch_size=32)
    torch.testing.assert_close(batched.fit(loader)[0], Z)
    torch.testing.assert_close(batched.encode(loader), Z)
    with pytest.raises(ValueError, match="x yielded no batches"):
        batched.encode(iter(()))


def test_moving_keeps_the_callers_estimator_as_it_is(rows):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    model = PCA(2).fit(torch.asarray(rows))
    adapter = OvercompleteAdapter(model)
    assert adapter.device == torch.device("cpu")
    assert adapter.to("meta") is adapter
    assert adapter.device == "meta"
    assert adapter.get_dictionary().device.type == "meta"
    assert model.components_.device.type == "cpu"
    other = OvercompleteAdapter(PCA(2), device="cpu")
    other.device = torch.device("cpu")
    other.fit(torch.asarray(rows))
    assert other.encode(torch.asarray(rows)).device.type == "cpu"


def test_numpy_and_scikit_learn_models(rows):
    adapter = OvercompleteAdapter(FastICA(3, random_state=0))
    Z, D = adapter.to("cpu").fit(rows, max_iter=400)
    assert adapter.estimator.max_iter == 400
    np.testing.assert_allclose(D, adapter.estimator.mixing_.T, atol=1e-10)
    np.testing.assert_allclose(adapter.decode(Z), adapter.estimator.inverse_transform(Z), atol=1e-10)


def test_errors(rows):
    adapter = OvercompleteAdapter(SemiNMF(2, random_state=0, tol=1e-3))
    for call in (lambda: adapter.encode(rows), lambda: adapter.decode(rows), adapter.get_dictionary):
        with pytest.raises(NotFittedError):
            call()
    adapter.fit(rows)
    with pytest.raises(ValueError, match=r"z has shape \(80, 6\), expected \(n_samples, 2\)"):
        adapter.decode(rows)


@pytest.mark.parametrize(
    "wrap", [list, tuple, iter, lambda parts: [(p, None) for p in parts], lambda parts: [[p] for p in parts]]
)
def test_batches_may_come_in_any_iterable(as_array, rows, wrap):
    X = as_array(rows)
    whole, batched = OvercompleteAdapter(PCA(2)), OvercompleteAdapter(PCA(2))
    Z, _ = whole.fit(X)
    parts = [X[:32, ...], X[32:33, ...], X[33:, ...]]
    np.testing.assert_array_equal(_xp.to_numpy(batched.fit(wrap(parts))[0]), _xp.to_numpy(Z))
    np.testing.assert_array_equal(_xp.to_numpy(batched.encode(wrap(parts))), _xp.to_numpy(Z))


def test_nested_lists_are_rows(rows):
    expected = OvercompleteAdapter(PCA(2)).fit(rows)[0]
    for x in (rows.tolist(), list(rows), tuple(map(tuple, rows.tolist()))):
        np.testing.assert_array_equal(OvercompleteAdapter(PCA(2)).fit(x)[0], expected)


def test_what_is_no_array_is_named(rows):
    adapter = OvercompleteAdapter(PCA(2))
    with pytest.raises(TypeError, match="x must be an array, or an iterable of arrays, got dict"):
        adapter.fit({"rows": rows})
    with pytest.raises(TypeError, match="got int"):
        adapter.fit(3)
    with pytest.raises(TypeError, match=r"Batch 1 of x is no array of shape \(any, n_features\), but a ndarray"):
        adapter.fit((rows, rows[:, 0]))
