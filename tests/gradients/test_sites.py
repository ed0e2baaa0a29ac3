"""Names of sites: globs, suffixes, errors."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from isogeom.gradients import harvest  # noqa: E402
from isogeom.gradients._capture import Capture  # noqa: E402
from isogeom.gradients._sampling import BatchRows  # noqa: E402
from isogeom.gradients._sites import resolve_sites  # noqa: E402
from isogeom.gradients._underflow import underflow  # noqa: E402

torch.set_num_threads(1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.proj(x))


class Model(nn.Module):
    def __init__(self, n=3, wrap=lambda x: x):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(n))
        self.wrap = nn.Module()
        self.wrap.forward = wrap

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        out = self.wrap(x)
        return out[0] if isinstance(out, tuple) else next(iter(out.values())) if isinstance(out, dict) else out


def names(*sites, model=None):
    return [site.name for site in resolve_sites(model or Model(), list(sites))]


def total(model, batch):
    return model(batch).square().sum()


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        (["layers.0"], ["layers.0"]),
        (["layers.*"], ["layers.0", "layers.1", "layers.2"]),
        (["layers.*.proj:weight"], [f"layers.{i}.proj:weight" for i in range(3)]),
        (["layers.[02]:in"], ["layers.0:in", "layers.2:in"]),
        (["layers.1", "layers.*"], ["layers.1", "layers.0", "layers.2"]),
        (["layers.1", "layers.1:out", "layers.1"], ["layers.1"]),
        (["layers.1", "layers.1:in", "layers.1:out[0]"], ["layers.1", "layers.1:in", "layers.1:out[0]"]),
        ([":out"], [":out"]),
    ],
)
def test_names_and_globs(sites, expected):
    assert names(*sites) == expected


def test_a_module_with_two_names_is_found_by_both():
    model = Model()
    model.alias = model.layers[0]
    assert names("alias", "layers.0", model=model) == ["alias", "layers.0"]


@pytest.mark.parametrize("sites", ["layers.0", 3, None])
def test_sites_must_be_a_list(sites):
    with pytest.raises(TypeError, match="sites must be a list of strings"):
        resolve_sites(Model(), sites)


def test_sites_must_hold_strings():
    with pytest.raises(TypeError, match="sites must be strings, got 3"):
        names("layers.0", 3)


@pytest.mark.parametrize("site", ["*", "*:in"])
def test_everything_is_refused(site):
    with pytest.raises(ValueError, match="would harvest everything"):
        names(site)


@pytest.mark.parametrize(
    ("site", "close"),
    [("layer.1", "'layers.1'"), ("layers.*.prj", "'layers.0.proj'"), ("quite_different", "'layers', 'wrap'")],
)
def test_unknown_names_show_close_ones(site, close):
    with pytest.raises(ValueError, match=f"matches no module of the model; close names: .*{close}"):
        names(site)


@pytest.mark.parametrize(
    "site", ["", "layers.0:", "layers.0:output", "layers.0:out[", "layers.0:weight[0]", "layers.0:in:out"]
)
def test_suffixes_that_are_not_understood(site):
    with pytest.raises(ValueError, match="is not understood: write"):
        names(site)


def test_weight_sites_need_a_linear_layer():
    with pytest.raises(TypeError, match=r"nn.Linear, transformers' Conv1D and nn.Embedding only, not of ReLU"):
        names("layers.0.act:weight")
    with pytest.raises(TypeError, match="not of Layer"):
        names("layers.*:weight")

    class Conv1D(nn.Module):  # same name as the layer of transformers, but a true convolution
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3, 4))

    with pytest.raises(TypeError, match="not of Conv1D"):
        names("0:weight", model=nn.Sequential(Conv1D()))
    with pytest.raises(TypeError, match="not of EmbeddingBag"):
        names("0:weight", model=nn.Sequential(nn.EmbeddingBag(3, 4)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("wrap", "site", "match"),
    [
        (lambda x: (x, 2 * x), "wrap", r"several fit, choose one by its suffix: :out\[0\] \(2, 3, 4\).*; :out\[1\]"),
        (lambda x: {"a": x, "b": x.mean(1)}, "wrap", r":out\[a\] \(2, 3, 4\).*; :out\[b\] \(2, 4\)"),
        (lambda x: (x.sum(),), "wrap", r"none fits: :out\[0\] \(\) torch.float32"),
        (lambda x: x[:1], "wrap", r"batch=2; none fits: :out \(1, 3, 4\) .*A batch of 1 stands for all samples"),
        (lambda x: x.flatten(0, 1), "wrap", r"none fits: :out \(6, 4\) .*\(batch \* seq, d\): name a module around"),
        (lambda x: x[:, None], "wrap", r"none fits: :out \(2, 1, 3, 4\) .*name the layer that pools or flattens them"),
        (lambda x: (x, 2 * x), "wrap:out[2]", r"there is no item \[2\]; the value has items \[0, 1\]"),
        (lambda x: {"a": x}, "wrap:out[c]", r"no item \[c\]; the value has items \['a'\]"),
        (lambda x: x, "wrap:out[0]", "no items, it is a Tensor"),
        (lambda x: x, "wrap:in[y]", r"no input \[y\]; the inputs of Module are \['x'\], and it was called with 1 of"),
        (lambda x: torch.nested.nested_tensor(list(x)), "wrap", ":out is a nested tensor, .*: pad it"),
        (lambda x: x, "wrap:in[3]", r"there is no input \[3\]; the inputs of Module are \['x'\]"),
        (lambda x: (x, x.long()), "wrap:out[1]", r"none fits: :out\[1\] \(2, 3, 4\) torch.int64"),
    ],
)
def test_tensors_that_cannot_be_chosen(wrap, site, match):
    with pytest.raises(ValueError, match=match):
        harvest(Model(wrap=wrap), [torch.ones(2, 3, 4)], [site], loss=total)


@pytest.mark.parametrize("site", ["wrap:in", "wrap:in[0]", "wrap:in[x]", "wrap:out[-1]", "wrap:out[0]"])
def test_tensors_that_can_be_chosen(site):
    h = harvest(Model(wrap=lambda x: (x, 2 * x)), [torch.ones(2, 3, 4)], [site], loss=total, collect=["activations"])
    assert h[site].activations.shape == (6, 4)
    assert list(h) == [site]


class Reads(nn.Module):
    def forward(self, pair, mask, h, other=0, weight=1):
        return (h + other) * weight + pair[0]


class Outer(nn.Module):
    """Calls `reads` with what `make` makes of x, positional or by keyword."""

    def __init__(self, make):
        super().__init__()
        self.reads, self.make = Reads(), make

    def forward(self, x):
        args, kwargs = self.make(x)
        return self.reads(*args, **kwargs)


def input_row(make, *sites):
    rows = harvest(Outer(make), [torch.ones(2, 3, 4)], list(sites), loss=total, collect=["activations"])
    return [site.activations[0, 0] for site in rows.values()]


MASK = torch.ones(2, 3, dtype=torch.bool)


def test_an_input_comes_before_those_inside_a_container_and_before_one_number_per_token():
    def make(x):
        return ((x, 5 * x), MASK, 2 * x), {"weight": 7 * x[..., :1]}

    assert input_row(make, "reads:in", "reads:in[pair][1]", "reads:in[weight]") == [2, 5, 7]
    assert input_row(lambda x: ((x, 3 * x[..., 0], 2 * x), {}), "reads:in[h]") == [2]


def test_a_float_mask_beside_the_rows_is_no_candidate():
    class Masked(nn.Module):
        def forward(self, mask, h):
            return h * mask[..., None]

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Masked()

        def forward(self, x):
            return self.inner(5 * x[..., 0], 2 * x)

    h = harvest(Calls(), [torch.ones(2, 3, 4)], ["inner:in"], loss=total, collect=["activations"])
    assert (h["inner:in"].activations == 2).all()


def test_two_inputs_that_fit_are_an_error_that_lists_them():
    def make(x):
        return ((x, x), MASK, 2 * x), {"other": 3 * x}

    match = r"several fit, choose one by its suffix: :in\[2\] \(2, 3, 4\).*; :in\[other\] \(2, 3, 4\)"
    with pytest.raises(ValueError, match=match):
        input_row(make, "reads:in")
    assert input_row(make, "reads:in[2]", "reads:in[h]", "reads:in[other]") == [2, 2, 3]
    # One tensor in two places is no choice: query, key and value of a self-attention.
    attention = nn.Sequential(SelfAttention())
    h = harvest(attention, [torch.ones(2, 3, 4)], ["0.attention:in"], loss=total)
    assert h["0.attention:in"].activations.shape == (6, 4)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def test_hooks_see_what_the_users_hooks_return():
    model = Model()
    model.layers[0].register_forward_hook(lambda m, args, out: out * 0 + 7)
    h = harvest(model, [torch.ones(2, 3, 4)], ["layers.0"], loss=total)
    assert (h["layers.0"].activations == 7).all()


class Noisy(nn.Module):
    """Dropout that does not heed evaluation mode, or does."""

    def __init__(self, always):
        super().__init__()
        self.always = always
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x):
        x = self.dropout(self.linear(x))
        return nn.functional.dropout(x, 0.5, training=self.always or self.training)


def test_dropout_that_is_active_warns_once():
    batches = [torch.ones(2, 3, 4)] * 3
    with pytest.warns(UserWarning, match="drawn in the forward pass of batch 0, in evaluation mode: dropout") as caught:
        harvest(Noisy(True), batches, ["linear"], loss=total)
    assert len([w for w in caught if "random numbers" in str(w.message)]) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("collect", [["activations"], ["activations", "gradients"]])
def test_dropout_that_heeds_evaluation_mode_does_not_warn(collect):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        harvest(Noisy(False).train(), [torch.ones(2, 3, 4)] * 2, ["linear", "dropout"], loss=total, collect=collect)


# ---------------------------------------------------------------------- layouts that a shape does not show


def convolutional():
    return nn.Sequential(
        nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1)),
        nn.GELU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
        nn.BatchNorm1d(5),
        nn.ReLU(),
        nn.Linear(5, 2),
    )


@pytest.mark.parametrize(
    ("site", "layer"),
    [
        ("0.0", "Conv1d"),
        ("0.0:in", "Conv1d"),
        ("0:in", "Conv1d"),
        ("0.1", "BatchNorm1d"),
        ("0.2", "BatchNorm1d"),
        ("0.3", "BatchNorm1d"),
        ("0", "BatchNorm1d"),
        ("1", "BatchNorm1d"),
        ("2:in", "AdaptiveAvgPool1d"),
    ],
)
@pytest.mark.parametrize("collect", [["activations"], ["activations", "gradients"]])
def test_maps_with_channels_first_are_refused(site, layer, collect):
    match = rf"site {site!r} has maps of shape \(batch, channels, length\) = \(5, \d, \d\), as {layer} .*pools or"
    with pytest.raises(ValueError, match=match):
        harvest(convolutional(), [torch.ones(5, 3, 8)], [site], loss=total, collect=collect)


def test_what_follows_the_pooling_is_not_refused():
    h = harvest(convolutional(), [torch.ones(5, 3, 8)], ["3", "4:in", "5", "6", ":out"], loss=total)
    assert [rows.activations.shape for rows in h.values()] == [(5, 4), (5, 4), (5, 5), (5, 5), (5, 2)]
    # A chain that ends with a linear layer, and its activations, have rows of shape (batch, seq, d).
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Dropout(0.1))
    assert harvest(model, [torch.ones(5, 3, 4)], ["0", "1", "0.1"], loss=total).n_rows == 15


# ---------------------------------------------------------------------- globs, dictionaries, half precision


def test_globs_leave_out_what_is_never_called():
    model = nn.Module()
    model.layers, model.laptop = nn.ModuleList([nn.Linear(4, 4)]), nn.Linear(4, 4)
    assert names("la*", model=model) == ["laptop"]
    with pytest.raises(ValueError, match=r"matches only containers, which are never called: 'layers'; .*'layers\.\*'"):
        names("lay*", model=model)
    with pytest.raises(ValueError, match="would harvest everything"):
        names("**", model=model)


def test_a_dictionary_of_sites_is_met_with_its_values():
    with pytest.raises(TypeError, match=r"sites is a dict of names to sites: pass its \.values\(\)"):
        resolve_sites(Model(), {"T1_in": "layers.0:in"})


def test_gradients_that_float16_makes_zero_warn_once():
    model = Model().half()
    with pytest.warns(UserWarning, match=r"all gradients of site 'layers\.0' in batch 0 are 0 in float16") as caught:
        h = harvest(
            model,
            [torch.ones(2, 3, 4).half()] * 2,
            ["layers.0", "layers.1"],
            loss=lambda model, x: model(x).float().sum() * 1e-9,
        )
    assert (h["layers.0"].gradients == 0).all()
    assert len([w for w in caught if "float16" in str(w.message)]) == 1


def test_rows_that_will_be_stored_as_zero_warn_once():
    capture = Capture([], frozenset(), "float16")
    capture.begin(BatchRows(3, 0), 2)
    tiny = torch.full((2, 3, 4), 1e-9)
    with pytest.warns(UserWarning, match=r"all gradients of site 'a' in batch 3 are 0 in float16, as .* is 1e-09"):
        capture._copy("a", "gradients", tiny)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture._copy("b", "gradients", tiny)


@pytest.mark.parametrize(
    ("value", "kind", "made", "stored", "found"),
    [
        (1e-9, "gradients", torch.float32, "float16", "as the largest is 1e-09; store them with dtype='float32'"),
        (1e-9, "activations", torch.float32, "float16", "as the largest is 1e-09"),
        (1e-9, "gradients", torch.float32, "bfloat16", None),
        (1e-7, "gradients", torch.float32, "float16", None),
        (0.0, "gradients", torch.float32, "float16", None),
        (0.0, "activations", torch.float16, "float32", None),
        (0.0, "gradients", torch.float16, "float32", "run the model in bfloat16 or float32, or multiply the loss"),
    ],
)
def test_rows_that_round_to_zero(value, kind, made, stored, found):
    rows = torch.tensor([[0.0, value]])
    text = underflow(rows, kind, made, stored)
    assert text is None if found is None else found in text
    assert underflow(rows[:0], kind, made, stored) is None
