"""Probes and weight sites, checked against what real forward hooks see."""

import pytest

torch = pytest.importorskip("torch", reason="isogeom.gradients needs torch")

from torch import nn  # noqa: E402

from isogeom.gradients._probes import first_linear, probes, weight_sites  # noqa: E402

VOCABULARY, WIDTH, LAYERS, SEQ = 128, 32, 3, 7
ORDER = ["E0_in", "E0_out", "T1_in", "T1_out", "Tm", "Tl"]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Block(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        # Registered before the attention, run after it: the order of registration misleads here.
        self.mlp = nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)
        self.attention = nn.Linear(d, d)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Stack(nn.Module):
    def __init__(self, blocks, vocabulary=20, d=8):
        super().__init__()
        self.positions = nn.Embedding(5, d)
        self.tokens = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


class Mixture(nn.Module):
    """A block with more experts than there are blocks."""

    def __init__(self, d=8):
        super().__init__()
        self.project = nn.Linear(d, d)
        self.experts = nn.ModuleList(nn.Linear(d, d) for _ in range(6))


def hf_model(family):
    transformers = pytest.importorskip("transformers", reason="the families live in transformers (the hf extra)")
    size = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    gpt2 = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
    kind, config = {
        "gpt2": ("CausalLM", lambda: transformers.GPT2Config(**gpt2, bos_token_id=1, eos_token_id=2)),
        "gpt_neox": ("CausalLM", lambda: transformers.GPTNeoXConfig(**size)),
        "llama": ("CausalLM", lambda: transformers.LlamaConfig(**size, num_key_value_heads=2)),
        "olmo": ("CausalLM", lambda: transformers.OlmoConfig(**size)),
        "olmo2": ("CausalLM", lambda: transformers.Olmo2Config(**size)),
        "bert": ("MaskedLM", lambda: transformers.BertConfig(**size)),
        "camembert": ("MaskedLM", lambda: transformers.CamembertConfig(**size)),
        "modernbert": ("MaskedLM", lambda: transformers.ModernBertConfig(**size, cls_token_id=1, sep_token_id=2)),
        "eurobert": ("MaskedLM", lambda: transformers.EuroBertConfig(**size, mask_token_id=3)),
    }[family]
    torch.manual_seed(0)
    return getattr(transformers, f"AutoModelFor{kind}").from_config(config(), attn_implementation="eager").eval()


# family: block list, embedding stage, its norm, first linear of a block
FAMILIES = {
    "gpt2": ("transformer.h", "transformer.wte", None, "attn.c_attn"),
    "gpt_neox": ("gpt_neox.layers", "gpt_neox.embed_in", None, "attention.query_key_value"),
    "llama": ("model.layers", "model.embed_tokens", None, "self_attn.q_proj"),
    "olmo": ("model.layers", "model.embed_tokens", None, "self_attn.q_proj"),
    "olmo2": ("model.layers", "model.embed_tokens", None, "self_attn.q_proj"),
    "bert": ("bert.encoder.layer", "bert.embeddings", "LayerNorm", "attention.self.query"),
    "camembert": ("roberta.encoder.layer", "roberta.embeddings", "LayerNorm", "attention.self.query"),
    "modernbert": ("model.layers", "model.embeddings", "norm", "attn.Wqkv"),
    "eurobert": ("model.layers", "model.embed_tokens", None, "self_attn.q_proj"),
}


def run_ids(vocabulary=VOCABULARY, seq=SEQ):
    return torch.randint(4, vocabulary, (2, seq), generator=torch.Generator().manual_seed(1))


def observe(model, sites, forward):
    """Return what plain hooks see at each site, one tensor per firing."""
    seen = {site: [] for site in sites}
    handles = []
    for site in sites:
        name, _, suffix = site.partition(":")

        def hook(_module, args, kwargs, output, site=site, suffix=suffix):
            floating = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.is_floating_point()]
            value = floating[0] if suffix else output
            seen[site].append(value.detach().clone())

        handles.append(model.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
    with torch.no_grad():
        forward(model)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_probes_of_a_family_are_seen_by_hooks(family):
    model = hf_model(family)
    blocks, stage, norm, _ = FAMILIES[family]
    found = probes(model)
    expected = {
        **({} if norm is None else {"E0_in": f"{stage}.{norm}:in"}),
        "E0_out": stage,
        "T1_in": f"{blocks}.0:in",
        "T1_out": f"{blocks}.0",
        "Tm": f"{blocks}.1:in",
        "Tl": f"{blocks}.2:in",
    }
    assert found == expected
    assert list(found) == [name for name in ORDER if name in expected]
    ids = run_ids()
    seen = observe(model, found.values(), lambda m: m(input_ids=ids, attention_mask=torch.ones_like(ids)))
    for name, site in found.items():
        assert [x.shape for x in seen[site]] == [(2, SEQ, WIDTH)], name
        assert seen[site][0].dtype == torch.float32
    # The output of block 0 is the input of block 1, which is the middle one of three.
    torch.testing.assert_close(seen[found["T1_out"]][0], seen[found["Tm"]][0], rtol=0, atol=0)
    if norm is not None:
        torch.testing.assert_close(
            model.get_submodule(f"{stage}.{norm}")(seen[found["E0_in"]][0]), seen[found["E0_out"]][0]
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_sites_name_the_first_linear_executed(family):
    model = hf_model(family)
    blocks, _, _, linear = FAMILIES[family]
    ids = run_ids()

    def forward(m):
        m(input_ids=ids, attention_mask=torch.ones_like(ids))

    expected = {
        name: f"{blocks}.{i}.{linear}:weight" for name, i in {"T1_in": 0, "T1_out": 1, "Tm": 1, "Tl": 2}.items()
    }
    assert weight_sites(model) == expected
    assert weight_sites(model, forward) == expected
    # Independent of the helper: log every module with a matrix in block 1 as it runs.
    order, handles = [], []
    for name, module in model.get_submodule(f"{blocks}.1").named_modules():
        if getattr(module, "weight", None) is not None and module.weight.ndim == 2:
            handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: order.append(name)))
    forward(model)
    for handle in handles:
        handle.remove()
    assert order[0] == linear


def test_execution_order_overrides_registration_order():
    model = Stack([Block() for _ in range(2)])
    ids = run_ids(20, 5)
    assert first_linear(model, "blocks.0:in") == "blocks.0.mlp"
    assert first_linear(model, "blocks.0:in", lambda m: m(ids)) == "blocks.0.attention"
    assert weight_sites(model, lambda m: m(ids))["T1_out"] == "blocks.1.attention:weight"
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_hooks_are_removed_when_the_forward_pass_fails():
    model = Stack([Block() for _ in range(2)])
    with pytest.raises(ZeroDivisionError):
        first_linear(model, "blocks.0:in", lambda m: 1 / 0)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_experts_are_not_blocks():
    model = Stack([Mixture() for _ in range(4)])
    assert probes(model)["Tl"] == "blocks.3:in"
    assert first_linear(model, "blocks.2") == "blocks.3.project"


def test_the_longest_outermost_list_wins():
    model = nn.ModuleDict({"heads": nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), "core": Stack([Block()] * 1)})
    model["core"].blocks = nn.ModuleList(Block() for _ in range(5))
    assert probes(model) == {
        "E0_out": "core.tokens",
        "T1_in": "core.blocks.0:in",
        "T1_out": "core.blocks.0",
        "Tm": "core.blocks.2:in",
        "Tl": "core.blocks.4:in",
    }


def test_a_single_block_is_found_and_has_no_second_consumer():
    model = Stack([Block()])
    found = probes(model)
    assert found["T1_in"] == found["Tm"] == found["Tl"] == "blocks.0:in"
    assert set(weight_sites(model)) == {"T1_in", "Tm", "Tl"}
    with pytest.raises(ValueError, match=r"output of the last block.*'blocks\.0:in'"):
        first_linear(model, "blocks.0")


def test_a_module_list_may_itself_be_the_model():
    assert probes(nn.ModuleList(Block() for _ in range(2))) == {
        "T1_in": "0:in",
        "T1_out": "0",
        "Tm": "1:in",
        "Tl": "1:in",
    }


def test_blocks_in_a_sequential_are_found_where_no_list_holds_any():
    class Vision(nn.Module):
        def __init__(self, heads):
            super().__init__()
            self.patches = nn.Conv2d(3, 8, 4, 4)
            self.blocks = nn.Sequential(*(Block() for _ in range(4)))
            self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
            if heads:
                self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(3))

        def forward(self, x):
            return self.head(self.blocks(self.patches(x).flatten(2).mT).mean(1))

    found = probes(Vision(False))
    assert found == {"T1_in": "blocks.0:in", "T1_out": "blocks.0", "Tm": "blocks.2:in", "Tl": "blocks.3:in"}
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    seen = observe(Vision(False), found.values(), lambda m: m(x))
    assert [[value.shape for value in values] for values in seen.values()] == [[(2, 4, 8)]] * 4
    assert probes(Vision(True))["T1_in"] == "heads.0:in"  # a list comes first: it is meant to be run one by one


def test_blocks_that_are_linear_layers_read_the_probe_themselves():
    model = Stack([nn.Linear(8, 8) for _ in range(3)])
    assert weight_sites(model) == {
        "T1_in": "blocks.0:weight",
        "T1_out": "blocks.1:weight",
        "Tm": "blocks.1:weight",
        "Tl": "blocks.2:weight",
    }


def test_several_norms_in_the_embedding_stage_leave_e0_in_out():
    model = Stack([Block(), Block()])
    model.stage = nn.ModuleDict({"norm1": nn.LayerNorm(8), "norm2": nn.LayerNorm(8), "tokens": nn.Embedding(99, 8)})
    found = probes(model)
    assert "E0_in" not in found
    assert found["E0_out"] == "stage"  # 99 rows: the largest table, not the first


@pytest.mark.parametrize("getter", [lambda self: self.positions, None])
def test_a_declared_embedding_is_preferred_and_a_failing_getter_is_survived(getter):
    class Declared(Stack):
        def get_input_embeddings(self):
            if getter is None:
                raise NotImplementedError  # as transformers does for a model that declares no embedding
            return getter(self)

    assert probes(Declared([Block(), Block()]))["E0_out"] == ("tokens" if getter is None else "positions")


def test_transformer_encoder_has_probes_but_no_observable_projection():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True), 2, enable_nested_tensor=False
    ).eval()
    found = probes(encoder)
    assert found == {"T1_in": "layers.0:in", "T1_out": "layers.0", "Tm": "layers.1:in", "Tl": "layers.1:in"}
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    seen = observe(encoder, found.values(), lambda m: m(x))
    torch.testing.assert_close(seen["layers.0:in"][0], x)
    for forward in (None, lambda m: m(x)):
        with pytest.raises(ValueError, match=r"'layers\.0\.self_attn'.*nn\.MultiheadAttention"):
            weight_sites(encoder, forward)


@pytest.mark.parametrize(
    ("model", "lists", "message"),
    [
        (nn.Linear(2, 2), {}, "Lists of modules: none"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"": "2 x Linear"}, "the model itself: 2 x Linear"),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), {"": "1 x Conv2d, 1 x ReLU"}, "1 x Conv2d, 1 x ReLU"),
        (
            nn.ModuleDict({"mixed": nn.ModuleList([nn.Linear(2, 2), nn.GELU(), nn.GELU()])}),
            {"mixed": "1 x Linear, 2 x GELU"},
            "mixed: 1 x Linear, 2 x GELU",
        ),
        (
            nn.ModuleDict({"norms": nn.ModuleList(nn.LayerNorm(2) for _ in range(3))}),
            {"norms": "3 x LayerNorm"},
            "norms: 3 x LayerNorm",
        ),
        (nn.ModuleDict({"none": nn.ModuleList()}), {"none": "empty"}, "none: empty"),
    ],
)
def test_a_model_without_blocks_has_no_probes_and_lists_what_there_is(model, lists, message):
    found = probes(model)
    assert found == {}
    assert found.lists == lists
    assert repr(found) == f"Probes({{}}, lists={lists!r})"
    with pytest.raises(KeyError, match=rf"no probe 'T1_in'; found: none\. .*{message}.*by hand"):
        found["T1_in"]
    assert found.get("T1_in") is None
    for ask in (weight_sites, lambda model: first_linear(model, "0:in")):
        with pytest.raises(ValueError, match=rf"no nn.ModuleList or nn.Sequential of blocks.*{message}"):
            ask(model)


def test_an_unknown_model_still_names_its_embedding():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.cell = nn.Embedding(30, 8), nn.GRU(8, 8, batch_first=True)
            self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Bilinear(8, 8, 2)])

    found = probes(Recurrent())
    assert found == {"E0_out": "tokens"}
    with pytest.raises(KeyError, match=r"no probe 'Tm'; found: 'E0_out'. Lists of modules: heads: 1 x Linear, 1 x Bil"):
        found["Tm"]


def test_probes_of_a_known_model_are_a_plain_dictionary_to_look_at():
    found = probes(Stack([Block() for _ in range(3)]))
    assert found.lists == {"blocks": "3 x Block"}
    assert repr(found) == repr(dict(found))
    assert "E0_in" not in found
    with pytest.raises(KeyError, match="no probe 'E0_in'; found: 'E0_out', 'T1_in'"):
        found["E0_in"]


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, got str"):
        probes("gpt2")
    model = Stack([Block(), Block()])
    for site in ("tokens", "blocks.7:in", "blocks.0:weight", "blocks.0.mlp"):
        with pytest.raises(ValueError, match=f"site='{site}'"):
            first_linear(model, site)
    with pytest.raises(ValueError, match=r"'blocks\.0'.*ran no linear layer"):
        first_linear(model, "blocks.0:in", lambda m: None)
