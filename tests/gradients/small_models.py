"""Small models and losses, and their rows without hooks: what the tests of harvest share."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Block(nn.Module):
    """Residual block; the mixing over positions is causal, so that later tokens reach earlier gradients."""

    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.act = nn.Tanh()
        self.down = nn.Linear(2 * d, d)

    def forward(self, x):
        h = self.norm(x)
        steps = torch.arange(1, x.shape[1] + 1, dtype=h.dtype)[:, None]
        h = h.cumsum(1) / steps
        return x + self.down(self.act(self.up(h)))


class TinyLM(nn.Module):
    def __init__(self, vocab=11, d=6, n_blocks=3, tied=False, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(n_blocks))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(d, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, attention_mask=None):
        return self.trace(input_ids)["logits"]

    def trace(self, ids):
        out = {"embed": self.embed(ids)}
        h = out["embed"]
        for i, block in enumerate(self.blocks):
            h = out[f"blocks.{i}"] = block(h)
        out["logits"] = self.head(self.drop(h))
        return out


class InPlace(nn.Module):
    """What `first` returns is changed in place at once; a 3-D linear layer with bias returns a view."""

    def __init__(self, bias=True):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4, bias=bias)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x)
        h *= 3
        h += 1
        return self.last(self.relu(h))

    def plain(self, h):
        return self.last(torch.relu(3 * h + 1))


def make_ids(*shape, vocab=11, seed=3):
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def next_token_sum(logits, ids):
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def reference(model, ids, name):
    """Rows of activation and gradient at `name`, all but the last position, without hooks."""
    model.eval()
    trace = model.trace(ids)
    (g,) = torch.autograd.grad(next_token_sum(trace["logits"], ids), trace[name])
    rows = [x[:, :-1].reshape(-1, x.shape[-1]).detach().numpy() for x in (trace[name], g)]
    model.train()
    return rows


def freeze(model):
    return model.requires_grad_(False)


def hook_counts(model):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]


def flat_loss(model, batch):
    """A loss for any module with a tensor output: smooth, not linear."""
    out = model(batch)
    return (out**2).sum() / 2 + out.sin().sum()
