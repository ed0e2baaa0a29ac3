"""A small model, its batches and its harvests: what the tests of stores share."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from isogeom.gradients import harvest

VOCAB, SITES = 12, ["embed", "block:in[0]", ":out"]


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.block, self.head = nn.Embedding(VOCAB, 5), nn.Linear(5, 4), nn.Linear(4, VOCAB)
        self.runs = 0

    def forward(self, input_ids):
        self.runs += 1
        return self.head(self.block(self.embed(input_ids)).tanh())


def make_batches(n=7, size=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(0, VOCAB, (size, 3 + i % 3), generator=generator)} for i in range(n)]


def run(out, model=None, batches=None, sites=SITES, **options):
    options = {"batches_per_shard": 2, **options}
    return harvest(model or Model(), batches or make_batches(), sites, out=out, **options)


def with_ids(batches):
    """Give every sample the number that it has when all batches are harvested in one go."""
    first, found = 0, []
    for batch in batches:
        n = len(batch["input_ids"])
        found.append({**batch, "sample_id": torch.arange(first, first + n)})
        first += n
    return found


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def assert_same(got, expected):
    assert list(got) == list(expected)
    np.testing.assert_array_equal(got.meta, expected.meta)
    np.testing.assert_array_equal(got.losses, expected.losses)
    for site in expected:
        for kind in ("activations", "gradients"):
            rows, wanted = getattr(got[site], kind), getattr(expected[site], kind)
            if wanted is None:
                assert rows is None
            else:
                assert rows.shape == wanted.shape
                np.testing.assert_array_equal(np.asarray(rows), wanted)


class StopError(Exception):
    pass


def stopping(n):
    for i, batch in enumerate(make_batches()):
        if i == n:
            raise StopError
        yield batch
