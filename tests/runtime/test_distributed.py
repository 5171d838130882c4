"""The sampler in real processes, joined by gloo or by a launcher's variables."""

from __future__ import annotations

import datetime
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

from mmcompile.runtime.sampler import ShardSampler, ranks

SIZES = (0, 1, 2, 5, 12, 23)
BATCH = 2
#: Steps after which the state is taken; 23 samples have at least 4 steps for 3 ranks.
STOP = 2

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")


class Squares(Dataset[tuple[int, float, bool]]):
    """Samples that say which they are, a value for a metric, and whether it counts."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[int, float, bool]:
        return int(index), float(index) ** 2, getattr(index, "valid", None) is not False


def batches(sampler: ShardSampler, n: int) -> list[list[int]]:
    return [batch[0].tolist() for batch in DataLoader(Squares(n), batch_size=BATCH, sampler=sampler)]


def mean(sampler: ShardSampler, n: int, joined: bool) -> float:
    """The mean of the values that count, in as many steps as the sampler has; over all ranks where they are joined."""
    sums = torch.zeros(2, dtype=torch.float64)
    for _, values, valid in DataLoader(Squares(n), batch_size=BATCH, sampler=sampler):
        step = torch.stack([(values * valid).sum(), valid.sum()])
        if joined:
            torch.distributed.all_reduce(step)  # waits for ever where a rank has fewer steps
        sums += step
    return (sums[0] / sums[1]).item()


def run_rank(rank: int, world_size: int, folder: str) -> None:
    """What one rank sees, written as JSON."""
    early = ShardSampler(range(23), BATCH, shuffle=True, seed=3)  # made before there is a group
    os.environ.update(RANK="0", WORLD_SIZE="7")  # a group says more than variables
    limit = datetime.timedelta(seconds=120)  # unequal steps are an error then
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=limit)
    out: dict[str, Any] = {"ranks": ranks(), "given": ranks(0, 1), "early": batches(early, 23)}
    for n in SIZES:
        for uneven in ("wrap", "drop", "mask"):
            sampler = ShardSampler(range(n), BATCH, shuffle=uneven == "wrap", uneven=uneven)
            length = len(sampler)
            out[f"{uneven} {n}"] = [length, batches(sampler, n)]
        if n:
            out[f"mean {n}"] = mean(ShardSampler(range(n), BATCH, uneven="mask"), n, joined=True)
    sampler = ShardSampler(range(23), BATCH, shuffle=True, seed=3)
    received = []
    for batch in DataLoader(Squares(23), batch_size=BATCH, sampler=sampler):
        received.append(batch[0].tolist())
        if len(received) == STOP:
            break
    state = sampler.state_dict(received=STOP)
    other = ShardSampler(range(23), BATCH, shuffle=True)
    other.load_state_dict(state)
    out["resumed"] = [received, state, batches(other, 23)]
    torch.distributed.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(out))


@pytest.fixture(scope="module", params=[2, 3])
def joined(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("group")
    torch.multiprocessing.start_processes(run_rank, (request.param, str(folder)), nprocs=request.param, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


def flat(parts: list[list[list[int]]]) -> list[int]:
    return [row for part in parts for batch in part for row in batch]


def test_ranks_are_those_of_the_group_when_iteration_begins(joined: list[dict[str, Any]]) -> None:
    assert [tuple(out["ranks"]) for out in joined] == [(rank, len(joined)) for rank in range(len(joined))]
    assert all(out["given"] == [0, 1] for out in joined)
    expected = [batches(ShardSampler(range(23), BATCH, shuffle=True, seed=3, rank=rank, world_size=len(joined)), 23) for rank in range(len(joined))]
    assert [out["early"] for out in joined] == expected


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("uneven", ["wrap", "drop", "mask"])
def test_ranks_share_all_samples_in_equal_steps(joined: list[dict[str, Any]], uneven: str, n: int) -> None:
    found = [out[f"{uneven} {n}"] for out in joined]
    parts = [part for _, part in found]
    assert len({tuple(map(len, part)) for part in parts}) == 1
    assert all(length == sum(map(len, part)) for length, part in found)
    counts = Counter(flat(parts))
    total = n // len(joined) if uneven == "drop" else -(-n // len(joined))
    assert counts.total() == total * len(joined)
    if uneven == "drop":
        assert max(counts.values(), default=1) == 1
    else:
        assert set(counts) == set(range(n))


@pytest.mark.parametrize("n", SIZES[1:])
def test_a_metric_under_mask_is_one_processs(joined: list[dict[str, Any]], n: int) -> None:
    expected = mean(ShardSampler(range(n), BATCH, rank=0, world_size=1), n, joined=False)
    assert [out[f"mean {n}"] for out in joined] == [expected] * len(joined)


def test_states_are_the_same_on_all_ranks_and_go_on_with_what_was_not_seen(joined: list[dict[str, Any]]) -> None:
    states = [out["resumed"][1] for out in joined]
    assert states == [{"generation": None, "seed": 3, "epoch": 0, "position": STOP * BATCH * len(joined)}] * len(joined)
    whole = [received + rest for received, _, rest in (out["resumed"] for out in joined)]
    assert whole == [out["early"] for out in joined]
    seen = flat([received for received, _, _ in (out["resumed"] for out in joined)])
    alone = ShardSampler(range(23), 5, shuffle=True, rank=0, world_size=1)
    alone.load_state_dict(states[0])
    assert sorted(seen + list(map(int, alone))) == list(range(23))


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")])
def test_a_launchers_variables_without_a_group_divide_the_samples(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name in ("RANK", "WORLD_SIZE") or name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    seen: list[int] = []
    for rank in range(2):
        monkeypatch.setenv(names[0], str(rank))
        monkeypatch.setenv(names[1], "2")
        seen += map(int, ShardSampler(range(11), 2, shuffle=True))
    assert len(seen) == 12
    assert set(seen) == set(range(11))
