"""Harvest in child processes that are killed at random moments (run by test_crash.py).

The children are forked, so that torch is imported once. Prints the number of kills and how the folders ended.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from isogeom.gradients import harvest

N_KILLS = {"rows": 20, "sample": 10, "moments": 10, "reduced": 10}
OPTIONS = {
    "rows": {},
    "sample": {"max_rows": 200},
    "moments": {"reduce": "moments"},
    "reduced": {"max_rows": 200, "reduce": "moments"},
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20)

    def forward(self, input_ids):
        return self.head(self.block(self.embed(input_ids)).tanh())


def run(out, options):
    ids = torch.randint(0, 20, (24, 8, 9), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": batch} for batch in ids]
    harvest(Model(), batches, ["embed", "block"], out=out, batches_per_shard=2, progress=False, **options)


def child(out, options):
    """Start a harvest in a process of its own; return its id."""
    pid = os.fork()
    if pid == 0:
        try:
            run(out, options)
            os._exit(0)
        except BaseException as error:
            print("child failed:", error, flush=True)
            os._exit(1)
    return pid


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def main(folder, mode, seed):
    options = OPTIONS[mode]
    rng = np.random.default_rng(seed)
    start = time.perf_counter()
    os.waitpid(child(folder / "whole", options), 0)
    duration = time.perf_counter() - start
    expected = content(folder / "whole")
    kills, finished = 0, 0
    while kills < N_KILLS[mode]:
        pid = child(folder / "part", options)
        time.sleep(rng.uniform(0, duration))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            kills += 1
            continue
        assert os.WEXITSTATUS(status) == 0
        assert content(folder / "part") == expected, "a resumed run differs from an uninterrupted one"
        shutil.rmtree(folder / "part")
        finished += 1
    _, status = os.waitpid(child(folder / "part", options), 0)
    assert status == 0
    assert content(folder / "part") == expected, "the last run differs from an uninterrupted one"
    print(f"{mode}: {kills} kills, {finished + 1} runs finished, {len(expected)} equal files")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in OPTIONS:
        (Path(sys.argv[1]) / name).mkdir()
        main(Path(sys.argv[1]) / name, name, int(sys.argv[2]))
