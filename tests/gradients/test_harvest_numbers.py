"""The numbers that harvest keeps: dtypes, values that are not finite, and memory."""

import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from gradients.small_models import TinyLM, flat_loss, make_ids, next_token_sum, reference  # noqa: E402
from torch import nn  # noqa: E402

from isogeom.gradients import harvest  # noqa: E402

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_come_as_float32(dtype):
    model, ids = TinyLM().to(dtype), make_ids(3, 5)
    h = harvest(model, [{"input_ids": ids}], ["blocks.1"])
    model.eval()
    trace = model.trace(ids)
    (g,) = torch.autograd.grad(
        next_token_sum(trace["logits"].float() if dtype == torch.bfloat16 else trace["logits"], ids), trace["blocks.1"]
    )
    assert h["blocks.1"].gradients.dtype == np.float32
    np.testing.assert_array_equal(h["blocks.1"].activations, trace["blocks.1"][:, :-1].reshape(-1, 6).detach().float())
    np.testing.assert_allclose(h["blocks.1"].gradients, g[:, :-1].reshape(-1, 6).float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["activations", "gradients"])
def test_values_that_are_not_finite(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            nn.init.zeros_(self.first.weight), nn.init.ones_(self.first.bias)

        def forward(self, x):
            h = self.first(x)
            if kind == "gradients":
                return (h - 1 + x[..., :1] * 1e-40).abs().sqrt()  # infinite slope where x is 0
            return h

        def extra_repr(self):
            return kind

    model, good, bad = Model(), torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    if kind == "gradients":
        bad[0, 1] = 0

        def loss(model, x):
            out = model(x)
            return out[torch.isfinite(out)].sum()
    else:
        bad[0, 1, 0] = torch.nan

        def loss(model, x):
            return model(x).nan_to_num().sum()

    with pytest.raises(ValueError, match=rf"the {kind} of site 'first' hold \d+ values that are not finite.*batch 1"):
        harvest(model, [good, bad], ["first"], loss=loss)

    def mask(x):
        return torch.isfinite(x).all(-1) & (x != 0).all(-1)

    h = harvest(model, [good, bad], ["first"], loss=loss, mask=mask, collect=[kind])
    assert h.n_rows == 11


def test_only_what_is_asked_for_is_collected():
    batch = {"input_ids": make_ids(2, 4)}
    enabled = []

    def loss(model, batch):
        enabled.append(torch.is_grad_enabled())
        return next_token_sum(model(batch["input_ids"]), batch["input_ids"])

    acts = harvest(TinyLM(), [batch], ["embed"], loss=loss, collect=["activations"])["embed"]
    grads = harvest(TinyLM(), [batch], ["embed"], loss=loss, collect=("gradients",))["embed"]
    assert enabled == [False, True]
    assert acts.gradients is None
    assert grads.activations is None
    assert acts.activations.shape == grads.gradients.shape == (8, 6)
    with torch.inference_mode():
        same = harvest(TinyLM(), [batch], ["embed"], loss=loss, collect=["activations"])["embed"]
    np.testing.assert_array_equal(same.activations, acts.activations)


def test_models_that_return_their_own_loss():
    class WithLoss(TinyLM):
        def forward(self, input_ids):
            return {"loss": next_token_sum(super().forward(input_ids), input_ids)}

    ids = make_ids(3, 5)
    h = harvest(WithLoss(), [{"input_ids": ids}], ["blocks.0"], loss=lambda model, batch: model(**batch)["loss"])
    expected = reference(TinyLM(), ids, "blocks.0")[1]
    np.testing.assert_allclose(h["blocks.0"].gradients[h.meta.position < 4], expected, rtol=1e-5, atol=1e-7)
    assert np.abs(h["blocks.0"].gradients[h.meta.position == 4]).max() == 0


def test_memory_of_past_batches_is_released():
    # A token in the autograd node of each batch lives exactly as long as the graph does.
    class Token:
        pass

    class Tagged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.token = Token()
            tokens.append(weakref.ref(ctx.token))
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    def loss(model, x):
        alive.append(sum(token() is not None for token in tokens))
        return flat_loss(model, Tagged.apply(x.requires_grad_()))

    tokens, alive = [], []
    harvest(nn.Sequential(nn.Linear(4, 4)), [torch.ones(2, 3, 4) for _ in range(6)], ["0:in", "0"], loss=loss)
    assert len(tokens) == 6
    assert max(alive) <= 1


# Resident memory after 40 and after 200 batches.
_FLAT = """
import sys
import torch
from torch import nn
from isogeom.gradients import harvest

torch.set_num_threads(1)
PAGE = 4096
resident = []

def loss(model, x):
    with open("/proc/self/statm") as file:
        resident.append(int(file.read().split()[1]) * PAGE)
    return model(x).square().sum()

model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.Tanh())])
batches = (torch.randn(250, 128) for _ in range(200))
options = {"rows": {"max_rows": 100}, "moments": {"reduce": "moments"}, "disk": {"out": sys.argv[2]}}[sys.argv[1]]
harvest(model, batches, ["0:in", "3", "7:out", "8:weight"], loss=loss, **options)
print(resident[40], resident[-1], len(resident))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("kind", ["rows", "moments", "disk"])
def test_memory_is_flat_over_200_batches(kind, tmp_path):
    command = [sys.executable, "-c", _FLAT, kind, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    early, late, n = map(int, done.stdout.split())
    assert n == 200
    # The graphs of these 160 batches hold 50 MB and more, their rows 150 MB and more.
    assert late - early < 16e6
