"""What counts as the same batch, the same model and the same callable."""

import contextlib
import functools
import io
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

from isogeom.gradients._fingerprint import batch_digest, describe, differences, fingerprint, model_digest  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def test_equal_batches_have_equal_digests():
    batch = {"ids": torch.arange(6).reshape(2, 3), "text": ("a", 1, None), "n": 2.5}
    same = OrderedDict(ids=torch.arange(6).reshape(2, 3).clone(), text=["a", 1, None], n=2.5)
    assert batch_digest(batch) == batch_digest(same)
    strided = torch.arange(12).reshape(2, 6)[:, ::2] // 2
    assert batch_digest(strided) == batch_digest(torch.tensor([[0, 1, 2], [3, 4, 5]]))


@pytest.mark.parametrize(
    "other",
    [
        {"ids": torch.arange(6).reshape(3, 2)},
        {"ids": torch.arange(6).reshape(2, 3).int()},
        {"ids": torch.tensor([[0, 1, 2], [3, 4, 6]])},
        {"id": torch.arange(6).reshape(2, 3)},
        {"ids": torch.arange(6).reshape(2, 3), "n": 1},
        torch.arange(6).reshape(2, 3),
        [torch.arange(6).reshape(2, 3)],
    ],
)
def test_other_batches_have_other_digests(other):
    assert batch_digest(other) != batch_digest({"ids": torch.arange(6).reshape(2, 3)})


def test_large_tensors_are_hashed_whole():
    x = torch.zeros(5_000_000)  # 20 MB: more than one piece
    y = x.clone()
    y[-1] = 1
    assert batch_digest(x) != batch_digest(y)
    assert batch_digest(x) == batch_digest(x.clone())
    assert batch_digest(torch.empty(0, 3)) != batch_digest(torch.empty(3, 0))


def test_objects_are_hashed_by_type():
    class Thing:
        pass

    assert batch_digest([Thing()]) == batch_digest([Thing()])


def test_model_digest_sees_parameters_and_buffers():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))

    model, expected = make(), model_digest(make())
    assert model_digest(model) == expected
    model[1].running_mean[0] = 1
    assert model_digest(model) != expected
    model = make()
    model[0].weight.data[1, 2] += 1e-3
    assert model_digest(model) != expected
    assert model_digest(make().to(torch.bfloat16)) != expected
    with pytest.raises(ValueError, match=r"parameter '0.weight' is on the meta device"):
        model_digest(nn.Sequential(nn.Linear(3, 2, device="meta")))


def test_callables_are_known_by_code_and_plain_values():
    def make(scale):
        return lambda model, batch: model(batch).sum() * scale

    assert describe(make(2)) == describe(make(2))
    assert describe(make(2)) != describe(make(3))
    assert describe(lambda m, b: m(b).sum()) != describe(lambda m, b: m(b).mean())
    assert describe(lambda m, b, k=1: m(b)) != describe(lambda m, b, k=2: m(b))
    assert describe(functools.partial(make(2), k=1)) != describe(functools.partial(make(2), k=2))
    assert describe(nn.MSELoss()) == describe(nn.MSELoss())
    assert describe(slice(1, None)) == [1, None, None]
    assert describe(None) is None


def linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(2, 2)


class Scaled:
    def __init__(self, scale):
        self.scale, self.inner = scale, [scale]

    def __call__(self, model, batch):
        return model(batch).sum() * self.scale

    def loss(self, model, batch):
        return model(batch).sum() * self.scale


CONTENTS = {
    "tensor": torch.tensor,
    "array": np.array,
    "numpy scalar": np.int64,
    "array of objects": lambda v: np.array([str(v), None], dtype=object),
    "list in a dict": lambda v: {"a": [1, np.array(v)]},
    "module": linear,
    "set": lambda v: {v, "a", "b"},
    "slice": slice,
    "object": Scaled,
    "function": lambda v: lambda x: x + v,
    "path": Path,
    "sparse tensor": lambda v: torch.eye(2).mul(v).to_sparse(),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_contents_are_seen_wherever_they_are(kind):
    make = (lambda v: Path(str(v))) if kind == "path" else CONTENTS[kind]

    def closing(value):
        return lambda model, batch: (model(batch), value)

    def defaulting(value):
        return lambda model, batch, extra=value: (model(batch), extra)

    wrappers = [closing, defaulting, lambda v: functools.partial(closing(1), v), lambda v: Scaled(v), Scaled]
    for wrap in [*wrappers, lambda v: Scaled(v).loss]:
        assert describe(wrap(make(1))) == describe(wrap(make(1)))
        assert describe(wrap(make(1))) != describe(wrap(make(2)))
    assert batch_digest({"x": make(1)}) == batch_digest({"x": make(1)})
    assert batch_digest({"x": make(1)}) != batch_digest({"x": make(2)})


def test_code_of_objects_and_helpers_is_seen():
    class Other(Scaled):
        def __call__(self, model, batch):
            return model(batch).mean() * self.scale

    Other.__qualname__ = "Scaled"
    assert describe(Other(1)) != describe(Scaled(1))
    assert describe(Scaled(1).loss) != describe(Scaled(1).__call__)

    def load(helper, scale):
        source = (
            f"SCALE, LOG = {scale}, []\ndef inner(x): return {helper}\ndef outer(x): return inner(x) * SCALE\n"
            "def loss(model, batch):\n    LOG.append(1)\n    return outer(model(batch))"
        )
        names = {"__name__": "user"}
        exec(source, names)
        return names

    expected = describe(load("x", 1)["loss"])
    names = load("x", 1)
    names["LOG"].append(3)  # a list may be a log: it is not compared
    assert describe(names["loss"]) == expected
    for scale in ("2", "(1, 2)", "True", "'a'"):
        assert describe(load("x", scale)["loss"]) != expected
    assert describe(load("x.sum()", 1)["loss"]) != expected


def test_what_refers_to_itself_ends():
    items = [1]
    items.append(items)
    one, two = Scaled(1), Scaled(2)
    one.other, two.other = two, one
    assert batch_digest([items, one]) == batch_digest([items, one])
    assert batch_digest(one) != batch_digest(two)


def test_a_loss_that_holds_the_model_is_not_bound_to_it():
    model, other = linear(0), linear(1)
    assert describe(Scaled(model), model) == describe(Scaled(other), other)
    assert describe(Scaled(model)) != describe(Scaled(other))


def test_plain_attributes_of_modules_are_seen():
    def make(**attributes):
        model = nn.Sequential(nn.LayerNorm(2), nn.Dropout(0.5))
        for name, value in attributes.items():
            setattr(model[1], name, value)
        return fingerprint(model, {})

    expected = make()
    for name, value in (("p", 0.25), ("inplace", True), ("scale", 3), ("mode", "a"), ("size", (1, 2))):
        (found,) = differences(expected, make(**{name: value}))
        assert f"model attribute '{name}'" in found
    # A forward pass may change what is private or a cache; flags of training are set aside.
    assert make(_calls=3, seq_len_cached=5, training=False, notes=["a"]) == expected


def test_names_do_not_change_from_process_to_process():
    code = (
        "from isogeom.gradients._fingerprint import describe\n"
        "print(describe(lambda m, b: m(b) if b['k'] in {'a', 'b', 'c', 'd'} else m(b).sum()))"
    )
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    other = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(code, {"__name__": "__main__"})
    assert here.getvalue() == other
    assert "lambda" in other


def test_differences_are_spelled_out():
    model = nn.Linear(2, 2)
    one, two = fingerprint(model, {"seed": 0, "rows": "mean"}), fingerprint(model, {"seed": 1, "rows": "mean"})
    assert differences(one, two) == ["seed: the store has 0, this call 1"]
    assert differences(one, {}) != []
    assert one["version of torch"] == torch.__version__
    assert one["model"] == "torch.nn.modules.linear.Linear"
