"""Names of sites: globs, suffixes, errors."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from isogeom.gradients import harvest  # noqa: E402
from isogeom.gradients._sites import resolve_sites  # noqa: E402

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
    with pytest.raises(TypeError, match=r"nn.Linear and transformers' Conv1D only, not of ReLU"):
        names("layers.0.act:weight")
    with pytest.raises(TypeError, match="not of Layer"):
        names("layers.*:weight")

    class Conv1D(nn.Module):  # same name as the layer of transformers, but a true convolution
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3, 4))

    with pytest.raises(TypeError, match="not of Conv1D"):
        names("0:weight", model=nn.Sequential(Conv1D()))


@pytest.mark.parametrize(
    ("wrap", "site", "match"),
    [
        (lambda x: (x, 2 * x), "wrap", r"several fit, choose one by its suffix: :out\[0\] \(2, 3, 4\).*; :out\[1\]"),
        (lambda x: {"a": x, "b": x.mean(1)}, "wrap", r":out\[a\] \(2, 3, 4\).*; :out\[b\] \(2, 4\)"),
        (lambda x: (x.sum(),), "wrap", r"none fits: :out\[0\] \(\) torch.float32"),
        (lambda x: x[:1], "wrap", r"batch=2; none fits: :out \(1, 3, 4\)"),
        (lambda x: x[:, None], "wrap", r"none fits: :out \(2, 1, 3, 4\) .*name the layer that pools or flattens them"),
        (lambda x: (x, 2 * x), "wrap:out[2]", r"there is no item \[2\]; the value has items \[0, 1\]"),
        (lambda x: {"a": x}, "wrap:out[c]", r"no item \[c\]; the value has items \['a'\]"),
        (lambda x: x, "wrap:out[0]", "no items, it is a Tensor"),
        (lambda x: x, "wrap:in[y]", r"called with 1 positional inputs and keywords \[\]"),
        (lambda x: x, "wrap:in[3]", "called with 1 positional inputs"),
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


def test_the_first_suitable_input_is_plain_and_positional():
    class Reads(nn.Module):
        def forward(self, pair, mask, h, other):
            return h + other + pair[0]

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.reads = Reads()

        def forward(self, x):
            return self.reads((x, x), torch.ones(2, 3, dtype=torch.bool), 2 * x, other=3 * x)

    h = harvest(
        Outer(),
        [torch.ones(2, 3, 4)],
        ["reads:in", "reads:in[pair][1]", "reads:in[other]"],
        loss=total,
        collect=["activations"],
    )
    assert [rows.activations[0, 0] for rows in h.values()] == [2, 1, 3]


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
