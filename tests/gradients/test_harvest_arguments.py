"""Arguments and batches that harvest takes, and those that it refuses."""

import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gradients.small_models import TinyLM, flat_loss, make_ids  # noqa: E402
from torch import nn  # noqa: E402

from isogeom.gradients import harvest  # noqa: E402

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"batches": []}, ValueError, "batches is empty"),
        ({"batches": {"input_ids": make_ids(2, 3)}}, TypeError, "for a single batch pass"),
        ({"batches": make_ids(2, 3)}, TypeError, "for a single batch pass"),
        ({"batches": 3}, TypeError, "batches must be an iterable"),
        ({"batches": ["text"]}, TypeError, "batch 0 is a str"),
        ({"batches": [{"text": "a"}]}, ValueError, "no tensor with a batch axis.* it holds {'text': 'str'}.*tokenizer"),
        ({"batches": [([1], 2)]}, ValueError, "it holds {0: 'list', 1: 'int'}. Make tensors of lists and arrays"),
        ({"sites": []}, ValueError, "sites is empty"),
        ({"sites": {"blocks.0"}}, TypeError, "sites is a set, whose order changes"),
        ({"collect": "activations"}, TypeError, "collect must be a tuple"),
        ({"collect": ("acts",)}, ValueError, "'act', 'grad'"),
        ({"collect": ()}, ValueError, "'act', 'grad'"),
        ({"loss": "mse"}, ValueError, "'causal-lm', 'masked-lm'"),
        ({"loss": 3}, TypeError, "callable"),
        ({"mask": "all"}, TypeError, "mask must be None or a callable"),
        ({"mask": lambda b: b["input_ids"]}, TypeError, "mask must return a bool tensor"),
        ({"mask": lambda b: torch.ones(2, dtype=torch.bool)}, ValueError, r"mask returned shape \(2,\)"),
        ({"mask": lambda b: b["input_ids"] < 0}, ValueError, "no row is left"),
        ({"exclude_token_ids": 3}, TypeError, "exclude_token_ids must be a list"),
        ({"exclude_token_ids": [1.5]}, TypeError, "every item of exclude_token_ids must be an integer"),
        ({"positions": [1.5]}, TypeError, "every item of positions must be an integer, got 1.5"),
        ({"max_rows": 0}, ValueError, "max_rows must be between 1"),
        ({"max_rows": 2.5}, TypeError, "max_rows must be an integer, got 2.5"),
        ({"max_rows": True}, TypeError, "max_rows must be an integer"),
        ({"seed": -1}, ValueError, "seed must be between 0"),
        ({"loss": lambda m, b: m(**b).sum().item()}, TypeError, "loss must return a tensor .* got float"),
        ({"loss": lambda m, b: m(**b).sum().to(torch.complex64)}, TypeError, "real floating tensor"),
        ({"loss": lambda m, b: m(**b).sum().detach()}, RuntimeError, "does not require grad"),
        ({"loss": lambda m, b: m(**b).sum() * torch.nan}, ValueError, "the loss of batch 0 is nan"),
        ({"model": print}, TypeError, "model must be a torch.nn.Module"),
        ({"model": nn.DataParallel(TinyLM())}, TypeError, "DataParallel.*model.module"),
    ],
)
def test_wrong_arguments(change, error, match):
    arguments = {"model": TinyLM(), "batches": [{"input_ids": make_ids(2, 3)}], "sites": ["blocks.0"], **change}
    with pytest.raises(error, match=match):
        harvest(arguments.pop("model"), arguments.pop("batches"), arguments.pop("sites"), **arguments)


def test_script_modules_are_refused():
    class Traced(nn.Module):
        def forward(self, x):
            return x * 2

    scripted = object.__new__(torch.jit.ScriptModule)
    with pytest.raises(TypeError, match="ScriptModule"):
        harvest(scripted, [torch.ones(2, 3)], ["x"], loss=flat_loss)
    assert harvest(Traced(), [torch.ones(2, 3)], [":out"], loss=flat_loss, collect=["activations"]).n_rows == 2


def test_inference_mode_is_refused_for_gradients():
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        harvest(TinyLM(), [{"input_ids": make_ids(2, 3)}], ["blocks.0"])


def test_changing_width_between_batches():
    with pytest.raises(ValueError, match="activations of site ':out' have 5 features, but 4 in earlier batches"):
        harvest(nn.Identity(), [torch.ones(2, 4), torch.ones(2, 5)], [":out"], loss=flat_loss, collect=["activations"])


def test_progress_shows_where_somebody_watches(capsys, monkeypatch):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    batches = [{"input_ids": make_ids(2, 3)}] * 2

    def shown(**options):
        assert harvest(TinyLM(), batches, ["blocks.0"], **options).n_rows == 8
        return "rows=8" in capsys.readouterr().err

    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert not shown()  # a captured stream is no terminal
    assert not shown(progress=True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert shown()
    assert shown(progress=True)
    assert not shown(progress=False)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert not shown()
    monkeypatch.setattr(sys, "stderr", None)
    assert harvest(TinyLM(), batches, ["blocks.0"]).n_rows == 8


@pytest.mark.parametrize("progress", [None, 1, "auto"])
def test_progress_is_true_or_false(progress):
    with pytest.raises(TypeError, match=f"progress must be True or False, got {progress!r}"):
        harvest(TinyLM(), [], ["blocks.0"], progress=progress)


# ---------------------------------------------------------------------- batches and imports


def test_batches_may_nest_and_keep_their_types():
    Pair = namedtuple("Pair", "x extra")
    seen = []

    def loss(model, batch):
        seen.append((type(batch), type(batch.extra), list(batch.extra)))
        return flat_loss(model, batch.x)

    h = harvest(nn.Linear(4, 2), [Pair(torch.ones(2, 3, 4), {"y": [torch.zeros(2)], "name": "a"})], [":out"], loss=loss)
    assert h.n_rows == 6
    assert seen == [(Pair, dict, ["y", "name"])]


@pytest.mark.parametrize("kind", ["mapping", "tuple", "tensor", "nested"])
def test_a_loss_that_works_in_place_leaves_the_callers_batch_alone(kind):
    x, extra = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), np.ones(2)
    batch = {
        "mapping": {"x": x, "extra": extra},
        "tuple": (x, extra),
        "tensor": x,
        "nested": ({"x": [x]}, extra, torch.zeros(4)),
    }[kind]
    before, bases = x.clone(), []

    def loss(model, batch):
        value = batch if kind == "tensor" else batch["x"] if kind == "mapping" else batch[0]
        value = value["x"][0] if kind == "nested" else value
        bases.append(value.data_ptr())
        value.mul_(2).add_(1)
        if kind == "mapping":
            batch["extra"] *= 0
            batch["new"] = batch.pop("x")
        elif kind != "tensor":
            batch[1][:] = 0
        return model(value).square().sum()

    first, again = (harvest(nn.Linear(3, 2).requires_grad_(False), [batch], [":out"], loss=loss) for _ in range(2))
    assert torch.equal(x, before)
    assert extra.tolist() == [1, 1]
    assert x.data_ptr() not in bases
    assert kind != "mapping" or list(batch) == ["x", "extra"]
    assert first.n_rows == again.n_rows == 4


def test_the_first_tensor_of_a_tuple_counts_the_samples():
    class Graph(nn.Linear):
        def forward(self, x, edges):
            return super().forward(torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]))

    torch.manual_seed(0)
    model, x, edges = Graph(3, 2), torch.randn(5, 3), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    h = harvest(model, [(x, edges)], [":in[0]", ":out"], loss=lambda model, batch: model(*batch).square().sum())
    assert h.meta.sample_id.tolist() == [0, 1, 2, 3, 4]
    assert h.meta.token_id.tolist() == [-1] * 5
    np.testing.assert_array_equal(h[":in[0]"].activations, x)
    out = model(x, edges).detach()
    np.testing.assert_allclose(h[":out"].gradients, 2 * out, rtol=1e-6)
    np.testing.assert_allclose(h[":in[0]"].gradients[:4], 2 * out[1:] @ model.weight.detach(), rtol=1e-5, atol=1e-6)
    tokens = harvest(nn.Embedding(9, 3), [(edges, torch.ones(2))], [":out"], loss=lambda m, b: m(b[0]).square())
    assert tokens.meta.token_id.tolist() == edges.ravel().tolist()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_in_a_batch(layout, tmp_path):
    class Padded(nn.Linear):
        def forward(self, batch):
            return super().forward(torch.nested.to_padded_tensor(batch["rows"], 0.0))

    def batches(value=1.0):
        rows = [torch.full((2, 3), value), torch.ones(4, 3)]
        return [{"rows": torch.nested.nested_tensor(rows, layout=layout), "lengths": torch.tensor([2, 4])}]

    def run(batches, **options):
        return harvest(Padded(3, 2), batches, [":out"], loss=flat_loss, **options)

    torch.manual_seed(0)
    assert run(batches()).n_rows == 8
    with pytest.raises(ValueError, match="no tensor with a batch axis"):
        run([{"rows": batches()[0]["rows"]}])
    torch.manual_seed(0)
    run(batches(), out=tmp_path / "out")
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="batch 0 has other contents"):
        run(batches(2.0), out=tmp_path / "out")


def test_one_tensor_in_two_places_of_a_batch_stays_one():
    x = torch.ones(2, 3)

    def loss(model, batch):
        assert batch["a"] is batch["b"][0]
        assert batch["a"].requires_grad
        assert batch["a"].is_leaf
        return flat_loss(model, batch["a"])

    x.requires_grad_(True)
    harvest(nn.Linear(3, 2), [{"a": x, "b": [x]}], [":out"], loss=loss)
    assert x.grad is None


def test_a_mask_that_changes_the_batch_is_refused():
    with pytest.raises(ValueError, match="mask changed a tensor of batch 0 in place"):
        harvest(nn.Linear(3, 2), [torch.ones(2, 3)], [":out"], loss=flat_loss, mask=lambda x: x.mul_(2).sum(1) > 0)


def test_a_mask_taken_from_the_batch_is_read_before_the_loss_runs():
    def loss(model, batch):
        batch["keep"].zero_()
        return flat_loss(model, batch["x"])

    batch = {"x": torch.ones(3, 3), "keep": torch.tensor([True, False, True])}
    h = harvest(nn.Linear(3, 2), [batch], [":out"], loss=loss, mask=lambda batch: batch["keep"])
    assert h.meta.sample_id.tolist() == [0, 2]


def test_missing_torch_names_the_extra():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try:\n    import isogeom.gradients\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "pip install 'isogeom[torch]'" in done.stdout
