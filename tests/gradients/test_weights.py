"""Factor rows of embeddings, tied weights, and norms of weight gradients, against autograd sample by sample."""

import pickle
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from isogeom.gradients import harvest, open_harvest, weight_gradient_norms  # noqa: E402

torch.set_num_threads(1)
VOCABULARY, WIDTH = 9, 6  # few tokens, so that most stand in a sample more than once


class Model(nn.Module):
    def __init__(self, tied=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, **options)
        self.hidden = nn.Linear(WIDTH, 5)
        self.last = nn.Linear(5, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, attention_mask=None):
        h = self.embed(input_ids)
        h = h + self.last(torch.tanh(self.hidden(h.cumsum(1))))
        return self.head(h)


def make_ids(*shape, seed=0):
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def per_sample(model, ids, weight, loss=None):
    """The gradient of a weight for every sample, formed in full."""
    gradients = []
    for row in ids.split(1):
        total = cross_entropy(model(row)[0, :-1], row[0, 1:], reduction="sum") if loss is None else loss(model, row)
        gradients.append(torch.autograd.grad(total, weight)[0].to_dense())
    return torch.stack(gradients).double().numpy()


def dense(rows, n):
    """The weight gradient that factor rows of an embedding stand for, by one-hot rows."""
    onehot = np.zeros((len(rows.activations), n))
    onehot[np.arange(len(onehot)), rows.activations[:, 0]] = 1
    return onehot.T @ rows.gradients


def basis(r, d, seed=1):
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((d, r)))[0].T


# ---------------------------------------------------------------------- embeddings


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("options", [{}, {"sparse": True}, {"padding_idx": 3}], ids=["plain", "sparse", "padding"])
def test_factor_rows_of_an_embedding_give_its_weight_gradient(options, frozen):
    model, ids = Model(**options), make_ids(4, 7)
    expected = per_sample(model, ids, model.embed.weight)
    model.requires_grad_(not frozen)
    h = harvest(model, [{"input_ids": ids[:3]}, {"input_ids": ids[3:]}], ["embed:weight", "hidden:weight"])
    rows = h["embed:weight"]
    assert rows.activations.dtype == np.int64
    assert rows.activations.shape == (24, 1)
    np.testing.assert_array_equal(rows.activations[:, 0], h.meta.token_id)
    for i in range(4):
        got = dense(h.select(h.meta.sample_id == i)["embed:weight"], VOCABULARY)
        np.testing.assert_allclose(got, expected[i], rtol=1e-4, atol=1e-6)
    if "padding_idx" in options:
        assert (ids[:, :-1] == 3).any()  # else the test says nothing about padding
        assert (rows.gradients[h.meta.token_id == 3] == 0).all()
        output = harvest(model, [{"input_ids": ids}], ["embed"])
        assert (output["embed"].gradients[output.meta.token_id == 3] != 0).any()


def test_ids_are_those_of_the_layer_and_not_of_the_batch():
    class Shifted(Model):
        def forward(self, input_ids):
            return super().forward((input_ids + 2) % VOCABULARY)

    model, ids = Shifted(), make_ids(2, 5)
    h = harvest(model, [{"input_ids": ids}], ["embed:weight"])
    np.testing.assert_array_equal(h["embed:weight"].activations[:, 0], (h.meta.token_id + 2) % VOCABULARY)


@pytest.mark.parametrize("options", [{"max_rows": 7}, {"sample_rate": 0.5}, {"rows": "last"}, {"positions": [1, 3]}])
def test_a_choice_of_rows_is_the_same_for_ids(options):
    batches = [{"input_ids": make_ids(3, 6)}, {"input_ids": make_ids(2, 4, seed=1)}]
    h = harvest(Model(), batches, ["embed:weight", "hidden"], **options)
    assert 0 < h.n_rows < 21
    np.testing.assert_array_equal(h["embed:weight"].activations[:, 0], h.meta.token_id)
    acts = harvest(Model(), batches, ["embed:weight"], collect=["act"], **options)["embed:weight"]
    np.testing.assert_array_equal(acts.activations, h["embed:weight"].activations)
    assert acts.gradients is None
    grads = harvest(Model(), batches, ["embed:weight"], collect=["grad"], **options)["embed:weight"]
    np.testing.assert_allclose(grads.gradients, h["embed:weight"].gradients, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"max_rows": 11}], ids=["all", "sample"])
@pytest.mark.parametrize("batches_per_shard", [1, 2, 16])
def test_ids_in_a_folder_are_those_in_memory(options, batches_per_shard, tmp_path):
    batches = [{"input_ids": make_ids(3, 6, seed=i)} for i in range(5)]
    sites = ["embed:weight", "hidden:weight"]
    expected = harvest(Model(), batches, sites, **options)
    settings = {"out": tmp_path / "out", "batches_per_shard": batches_per_shard, **options}

    def interrupted():
        yield from batches[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        harvest(Model(), interrupted(), sites, **settings)
    for h in (harvest(Model(), batches, sites, **settings), open_harvest(tmp_path / "out")):
        rows = h["embed:weight"]
        assert rows.activations.dtype == np.int64
        np.testing.assert_array_equal(np.asarray(rows.activations), expected["embed:weight"].activations)
        np.testing.assert_array_equal(np.asarray(rows.gradients), expected["embed:weight"].gradients)
        for site in sites:
            norms = [
                weight_gradient_norms(part[site].activations, part[site].gradients, groups=part.meta.sample_id)
                for part in (h, expected)
            ]
            np.testing.assert_array_equal(*norms)


def test_an_output_cut_by_a_hook_has_no_ids():
    model = Model()
    model.embed.register_forward_hook(lambda module, args, output: output[:, 1:])
    with pytest.raises(ValueError, match="'embed:weight': the embedding was not called with one id per row"):
        harvest(model, [{"input_ids": make_ids(2, 5)}], ["embed:weight"], loss=lambda m, batch: m(**batch).sum())


class Scaled(nn.Embedding):
    def forward(self, input):
        return 3 * super().forward(input)


@pytest.mark.parametrize(
    ("change", "options", "error", "match"),
    [
        ("scaled", {}, TypeError, r"Scaled has a forward\(\) of its own.*harvest its output"),
        ("frequency", {}, ValueError, "scale_grad_by_freq=True divides the gradient of a token by its count"),
        ("", {"reduce": "moments"}, ValueError, "reduce='moments' cannot take site 'embed:weight', whose rows are"),
        ("", {"rows": "mean"}, ValueError, "rows='mean' cannot take site 'embed:weight'"),
        ("", {"dtype": "float16"}, ValueError, "dtype='float16' cannot take site 'embed:weight'.*dtype='float32'"),
        ("positions", {}, ValueError, r"'positions:weight' needs one floating tensor .* with batch=2; none fits"),
    ],
)
def test_embeddings_whose_factors_would_mislead_are_refused(change, options, error, match):
    model, site = Model(scale_grad_by_freq=change == "frequency"), "embed:weight"
    if change == "scaled":
        model.embed = Scaled(VOCABULARY, WIDTH)
    if change == "positions":

        class Positioned(Model):
            def __init__(self):
                super().__init__()
                self.positions = nn.Embedding(10, VOCABULARY)

            def forward(self, input_ids):  # one look-up for all samples: no sample has rows of its own
                return super().forward(input_ids) + self.positions(torch.arange(input_ids.shape[1]))

        model, site = Positioned(), "positions:weight"
    with pytest.raises(error, match=match):
        harvest(model, [{"input_ids": make_ids(2, 5)}], [site], **options)


# ---------------------------------------------------------------------- tied weights


def tied_gpt2():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


@pytest.mark.parametrize(
    ("site", "other"), [("transformer.wte:weight", "lm_head"), ("lm_head:weight", "transformer.wte")]
)
def test_a_tied_weight_is_reported_from_either_side(site, other):
    model = tied_gpt2()
    with pytest.warns(UserWarning, match=rf"site '{site}' is tied: it is that of '{other}' as well.*'{other}:weight'"):
        harvest(model, [{"input_ids": make_ids(2, 5)}], [site])


def test_both_sides_of_a_tied_weight_add_up_to_its_gradient():
    model, ids = tied_gpt2(), make_ids(3, 6)
    weight = model.lm_head.weight
    assert weight is model.transformer.wte.weight
    expected = per_sample(lambda row: model(input_ids=row).logits, ids, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        h = harvest(model, [{"input_ids": ids}], ["transformer.wte:weight", "lm_head:weight"])
    for i in range(3):
        part = h.select(h.meta.sample_id == i)
        read = dense(part["transformer.wte:weight"], VOCABULARY)
        write = part["lm_head:weight"].gradients.T @ part["lm_head:weight"].activations
        np.testing.assert_allclose(read + write, expected[i], rtol=1e-3, atol=1e-5)
        assert min(np.abs(read).max(), np.abs(write).max()) > 0.01


@pytest.mark.parametrize("options", [{}, {"max_rows": 7}], ids=str)
@pytest.mark.parametrize("reduce", [None, "moments"])
def test_the_result_keeps_what_a_weight_is_tied_with(reduce, options, tmp_path):
    model = tied_gpt2()
    model.extra = nn.Linear(8, VOCABULARY, bias=False)  # it never runs
    model.extra.weight = model.lm_head.weight
    sites = ["lm_head:weight", "transformer.h.0.mlp.c_fc:weight", "lm_head", "lm_head:in"]
    expected = [("transformer.wte", "extra"), (), (), ()]
    batches = [{"input_ids": make_ids(2, 5 + i)} for i in range(3)]

    def run(out=None, batches=batches):
        with pytest.warns(UserWarning, match="is tied: .* add the others that the model calls to sites"):
            return harvest(model, batches, sites, reduce=reduce, out=out, batches_per_shard=1, **options)

    def ties(h):
        return [h[site].tied for site in sites]

    assert ties(run()) == ties(run(tmp_path / "a", batches[:2])) == expected
    assert ties(run(tmp_path / "a", batches[:2])) == expected  # nothing is computed
    run(tmp_path / "b", batches[2:])
    joined = open_harvest([tmp_path / "a", tmp_path / "b"])
    assert ties(open_harvest(tmp_path / "a")) == ties(joined) == ties(pickle.loads(pickle.dumps(joined))) == expected
    assert "tied with 'transformer.wte', 'extra'" in repr(joined["lm_head:weight"])
    assert "tied" not in repr(joined["lm_head"])
    if reduce is None:
        assert ties(joined.select([0, 1])) == ties(next(joined.iter_blocks(2))) == expected
    else:
        assert ties(run().merge(run())) == expected


def test_both_sides_of_a_tied_weight_name_each_other(tmp_path):
    sites = ["transformer.wte:weight", "lm_head:weight"]
    harvest(tied_gpt2(), [{"input_ids": make_ids(2, 5)}], sites, out=tmp_path / "out")
    h = open_harvest(tmp_path / "out")
    assert [h[site].tied for site in sites] == [("lm_head",), ("transformer.wte",)]


def test_a_linear_layer_with_a_forward_of_its_own_warns():
    class Scaled(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight * 3)

    class Renamed(nn.Linear):
        pass

    model, batches = nn.Sequential(Scaled(3, 2), Renamed(2, 2)), [torch.ones(4, 3)]
    with pytest.warns(UserWarning, match=r"site '0:weight': Scaled has a forward\(\) of its own; .*, unscaled"):
        harvest(model, batches, ["0:weight"], loss=lambda model, x: model(x).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        harvest(model, batches, ["0", "1:weight"], loss=lambda model, x: model(x).sum())


def test_only_tied_weights_are_reported():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Model()
        model.alias = model.head  # one module under two names is no second use
        h = harvest(model, [{"input_ids": make_ids(2, 5)}], ["embed:weight", "head:weight", "hidden:weight"])
        assert [rows.tied for rows in h.values()] == [(), (), ()]
        harvest(Model(tied=True), [{"input_ids": make_ids(2, 5)}], ["embed", "head:in", "hidden:weight"])


# ---------------------------------------------------------------------- norms


@pytest.mark.parametrize("r", [None, 2, 5])
@pytest.mark.parametrize("name", ["embed", "hidden", "head"])
@pytest.mark.parametrize("length", [3, 40], ids=["short", "long"])
def test_norms_equal_those_of_the_gradients_of_samples(name, r, length):
    model, ids = Model(), make_ids(5, length)
    weight = model.get_submodule(name).weight
    Q = None if r is None else basis(r, weight.shape[1])
    h = harvest(model, [{"input_ids": ids}], [f"{name}:weight"])
    rows = h[f"{name}:weight"]
    gradients = per_sample(model, ids, weight)
    projected = gradients if Q is None else gradients @ Q.T
    expected = np.sqrt((projected**2).sum((1, 2)))
    got = weight_gradient_norms(rows.activations, rows.gradients, Q, groups=h.meta.sample_id)
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    total = np.linalg.norm(projected.sum(0))
    np.testing.assert_allclose(weight_gradient_norms(rows.activations, rows.gradients, Q), [total], rtol=1e-4)


def test_norms_of_conv1d():
    model, ids = tied_gpt2(), make_ids(3, 6)
    site = "transformer.h.1.mlp.c_fc"
    weight, Q = model.get_submodule(site).weight, basis(3, 8)
    gradients = per_sample(lambda row: model(input_ids=row).logits, ids, weight)  # (d_in, d_out)
    h = harvest(model, [{"input_ids": ids}], [f"{site}:weight"])
    rows = h[f"{site}:weight"]
    got = weight_gradient_norms(rows.activations, rows.gradients, Q, groups=h.meta.sample_id)
    np.testing.assert_allclose(got, np.sqrt(((Q @ gradients) ** 2).sum((1, 2))), rtol=1e-3)


@pytest.mark.parametrize("table", [False, True], ids=["linear", "embedding"])
@pytest.mark.parametrize("labels", ["one", "mixed", "strings"])
@pytest.mark.parametrize("r", [None, 3])
def test_norms_by_blocks_equal_the_definition(table, labels, r, monkeypatch):
    monkeypatch.setattr("isogeom.gradients._weights._ROWS", 7)
    monkeypatch.setattr("isogeom.gradients._weights._COLUMNS", 2)
    rng = np.random.default_rng(0)
    n, d = 50, 5
    G = rng.standard_normal((n, d))
    X = rng.integers(0, 4, n) if table else rng.standard_normal((n, 6))
    groups = {"one": None, "mixed": rng.integers(-2, 3, n), "strings": rng.choice(["b", "a"], n)}[labels]
    Q = None if r is None else rng.standard_normal((r, d if table else 6))  # not orthonormal
    expected = []
    for label in [None] if groups is None else np.unique(groups):
        here = np.ones(n, bool) if groups is None else groups == label
        gradient = (np.eye(4)[X[here]].T @ G[here]) if table else G[here].T @ X[here]
        expected.append(np.linalg.norm(gradient if Q is None else gradient @ Q.T))
    np.testing.assert_allclose(weight_gradient_norms(X, G, Q, groups=groups), expected, rtol=1e-12)


def test_gradients_that_cancel_have_norm_zero():
    X, G = np.array([[1.0, 2.0], [1.0, 2.0]]), np.array([[3.0], [-3.0]])
    assert weight_gradient_norms(X, G).tolist() == [0.0]
    assert weight_gradient_norms(np.array([4, 4]), G).tolist() == [0.0]
    assert weight_gradient_norms(np.array([4, 5]), G)[0] == pytest.approx(np.sqrt(18))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"X": [[1.0]]}, TypeError, "X must be an array"),
        ({"X": np.ones((4, 2), dtype=bool)}, TypeError, "real numbers or token ids, got bool"),
        ({"X": np.ones((3, 2))}, ValueError, r"X must have shape \(4, d_in\) to go with G of shape \(4, 3\)"),
        ({"X": np.ones((4, 2), dtype=int)}, ValueError, r"shape \(4, 1\) or \(4,\), as token ids have"),
        ({"X": np.array([0, 1, -1, 2])}, ValueError, "token ids, at least 0, got -1"),
        ({"X": np.full((4, 2), np.nan)}, ValueError, "X holds values that are not finite"),
        ({"G": np.full((4, 3), np.inf)}, ValueError, "G holds values that are not finite"),
        ({"G": np.ones(4)}, ValueError, r"G must have shape \(n_rows, d_out\), got \(4,\)"),
        ({"X": np.ones((0, 2)), "G": np.ones((0, 3))}, ValueError, "no rows"),
        ({"basis": np.ones((2, 3))}, ValueError, r"basis must have shape \(r, 2\), on the input side"),
        ({"basis": np.full((1, 2), np.nan)}, ValueError, "basis holds values"),
        ({"basis": "all"}, TypeError, r"basis must be an array of numbers of shape \(r, 2\), got str"),
        ({"groups": [0, 1]}, ValueError, r"one label per row, shape \(4,\), got \(2,\)"),
        ({"groups": [0.0, 1.0, np.nan, 1.0]}, ValueError, "groups holds NaN"),
    ],
)
def test_bad_arguments_of_norms(change, error, match):
    arguments = {"X": np.ones((4, 2)), "G": np.ones((4, 3)), "basis": None, "groups": None, **change}
    with pytest.raises(error, match=match):
        weight_gradient_norms(arguments["X"], arguments["G"], arguments["basis"], groups=arguments["groups"])
