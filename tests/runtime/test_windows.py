"""Sliding windows against the dumbest way to make them: a loop over rows."""

from __future__ import annotations

import copy
import itertools
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from mmcompile import Augment, Cache, MMapShardDataset, ShardLoader, ShardSampler
from mmcompile.errors import CorruptShardError
from mmcompile.runtime.device import Resident
from mmcompile.runtime.windows import Windows, WindowSelection
from tests.support import make_dataset

COLUMNS = ("open", "close", "volume")
#: Groups end at these rows, shards and splits too here and there.
GROUPS = [("AAPL", 13), ("MSFT", 20), ("AAPL", 23), ("TSLA", 50)]
SHARDS = (5, 15, 3, 9, 1, 17)
SPLITS = {"train": 20, "val": 30}
N = 50


def table(root: Path, **others: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    values = {"x": rng.normal(size=(N, 3)).astype(np.float32), "n": rng.integers(0, 2**16, N).astype(np.uint16), "r": rng.normal(size=N)}
    labels = rng.integers(0, 3, N)
    arguments: dict[str, Any] = {"shards": SHARDS, "splits": SPLITS, "groups": GROUPS, "keyed": False, "facts": {"x": {"columns": COLUMNS}}}
    make_dataset(root, None, labels, values=values, **arguments | others)
    return {"label": labels, **values}


def begins(length: int, stride: int, ahead: int, start: int = 0, stop: int = N) -> list[int]:
    """The first row of each window, one row after the other."""
    bounds = sorted({0, N, *(end for _, end in GROUPS), 20})
    out = []
    for a, b in itertools.pairwise(bounds):
        a, b = max(a, start), min(b, stop)
        row = a
        while row + length - 1 + ahead < b:
            out.append(row)
            row += stride
    return out


def same(a: Any, b: Any) -> bool:
    a, b = (v if isinstance(v, torch.Tensor) else torch.from_numpy(np.array(v)) for v in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("windows") / "out"
    return root, table(root)


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 12),
    stride=st.integers(1, 14),
    horizon=st.sampled_from([None, 0, 1, 3]),
    split=st.sampled_from(["train", "val", "all"]),
    engine=st.sampled_from(["mmap", "pread"]),
)
def test_windows_are_those_of_a_loop(made: Any, length: int, stride: int, horizon: int | None, split: str, engine: str) -> None:
    root, of = made
    start, stop = {"train": (0, 20), "val": (20, N), "all": (0, N)}[split]
    first = begins(length, stride, horizon or 0, start, stop)
    ds = MMapShardDataset(root, split, engine=engine, fields=["x", "n", "label"])
    if not first:
        with pytest.raises(ValueError, match="fits into none of its groups"):
            ds.windows(length, stride, horizon, None if horizon is None else ["label"])
        return
    windows = ds.windows(length, stride, horizon, None if horizon is None else ["label"])
    assert len(windows) == len(first)
    parts = [np.stack([of[name][r : r + length] for r in first]) for name in ("x", "n")]
    last = [r + length - 1 + (horizon or 0) for r in first]
    parts.append(np.stack([of["label"][r : r + length] for r in first]) if horizon is None else of["label"][last])
    every = windows[:]
    assert all(same(a, b) for a, b in zip(every, parts, strict=True))
    for i, sample in enumerate(windows):
        assert all(same(a, b[i]) for a, b in zip(sample, parts, strict=True))
        assert type(sample[2]) is (torch.Tensor if horizon is None else int)
    order = np.random.default_rng(1).integers(0, len(first), 9)
    assert all(same(a, b[order]) for a, b in zip(windows[order], parts, strict=True))
    assert [windows.source(i) for i in range(len(first))] == [ds.source(r - start) for r in first]
    for batches in (DataLoader(windows, 4), ShardLoader(windows, 4)):
        assert all(same(torch.cat(a), b) for a, b in zip(zip(*batches, strict=True), parts, strict=True))
    if horizon is None:
        assert windows.targets is None
    else:
        assert same(windows.targets, of["label"][last])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 9), st.integers(1, 9), st.integers(0, 4), st.data())
def test_a_selection_of_windows_is_a_list_of_rows(sizes: list[int], length: int, stride: int, ahead: int, data: st.DataObject) -> None:
    edges = 3 + np.cumsum([0, *sizes])
    reach = length - 1 + ahead
    first = [r for a, b in itertools.pairwise(edges) for r in range(int(a), int(b) - reach, stride)]
    assume(first)
    found = WindowSelection(edges, length, stride, reach)
    assert len(found) == len(first)
    assert found.rows(np.arange(len(first))).tolist() == first
    assert [found.row(i) for i in range(-len(first), len(first))] == first * 2
    assert [found.find(row) for row in range(int(edges[-1]) + 5)] == [first.index(r) if r in first else -1 for r in range(int(edges[-1]) + 5)]
    cuts = np.array(sorted({0, *data.draw(st.lists(st.integers(0, int(edges[-1]) + 3), max_size=6))}))
    assert found.blocks(cuts).tolist() == sorted({0, len(first), *(sum(r < cut for r in first) for cut in cuts.tolist())})
    for end in (len(first), -len(first) - 1):
        with pytest.raises(IndexError, match=f"there are {len(first)} windows"):
            found.row(end)


@given(st.lists(st.integers(0, 60), max_size=12, unique=True), st.integers(1, 5), st.integers(0, 4))
def test_rows_that_some_windows_need(rows: list[int], length: int, horizon: int) -> None:
    needed = Windows(length, 1, horizon, "y").needed(np.sort(np.array(rows, np.int64)))
    wanted = sorted({r + k for r in rows for k in range(length + horizon)})
    assert needed.rows(np.arange(len(needed))).tolist() == wanted


def test_a_window_views_the_map_and_one_across_shards_is_a_copy(made: Any) -> None:
    root, of = made
    ds = MMapShardDataset(root, "train", fields=["x"])
    windows = ds.windows(4)
    assert windows[5].data_ptr() == ds[5].data_ptr()
    assert windows[6].data_ptr() == ds[6].data_ptr()
    across = windows[2]
    assert same(across, of["x"][2:6])
    across.zero_()
    assert same(windows[2], of["x"][2:6])
    own = MMapShardDataset(root, "train", fields=["x"], copy=True).windows(4)
    own[5].zero_()
    assert same(own[5], of["x"][5:9])


def test_targets_are_fields_or_columns_at_a_distance(made: Any) -> None:
    root, of = made
    ds = MMapShardDataset(root, "val", fields=["x", "n", "label", "r"], output="dict")
    first = begins(4, 1, 2, 20)
    at = np.array(first) + 5
    windows = ds.windows(4, horizon=2, target="close")
    sample, batch = windows[0], windows[:]
    assert list(sample) == list(batch) == ["x", "n", "label", "r", "x_target"]
    assert same(batch["x_target"], of["x"][at, 1])
    assert same(sample["x_target"], of["x"][at[0], 1])
    assert same(batch["label"], np.stack([of["label"][r : r + 4] for r in first]))
    two = ds.windows(4, horizon=2, target=["volume", "open"])[:]["x_target"]
    assert same(two, of["x"][at][:, [2, 0]])
    assert same(next(iter(DataLoader(ds.windows(4, horizon=2, target=["volume", "open"]), 99)))["x_target"], of["x"][at][:, [2, 0]])
    fields = MMapShardDataset(root, "val", fields=["x", "label", "r"]).windows(4, horizon=2, target=["r", "label", "close"])
    x, r, r_ahead, label, close = fields[:]
    assert same(x, np.stack([of["x"][k : k + 4] for k in first]))
    assert same(r, np.stack([of["r"][k : k + 4] for k in first]))
    assert same(r_ahead, of["r"][at])
    assert same(label, of["label"][at])
    assert same(close, of["x"][at][:, [1]])
    named = MMapShardDataset(root, "val", fields=["label", "r"], output="dict").windows(4, horizon=2, target=["label", "r"])
    assert list(named[0]) == ["r", "label", "r_target"]
    assert same(named[:]["r_target"], of["r"][at])
    with pytest.raises(ValueError, match=r"two values of a sample would have one name, 'x_target', of .*: leave one out of fields= or of target="):
        ds.windows(4, horizon=2, target=["x", "open"])
    beside = MMapShardDataset(root, "val", fields=["x", "r"]).windows(4, horizon=0, target="r")
    x, r = beside[:]
    assert same(r, of["r"][np.array(begins(4, 1, 0, 20)) + 3])


def test_targets_come_in_the_order_asked_whether_fields_names_them_or_not(made: Any) -> None:
    root, of = made
    at = np.array(begins(4, 1, 2, 20)) + 5
    ds = MMapShardDataset(root, "val", fields=["n", "x", "r"], output="dict")
    both = ds.windows(4, horizon=2, target=["open", "r", "close"])
    assert list(both[0]) == list(both[:]) == ["n", "x", "r", "x_target", "r_target"]
    assert same(both[:]["x_target"], of["x"][at][:, [0, 1]])
    assert list(ds.windows(4, horizon=2, target=["r", "open"])[0])[3:] == ["r_target", "x_target"]
    alone = MMapShardDataset(root, "val", fields=["n"], output="dict").windows(4, horizon=2, target=["label", "close", "r"])
    for values in (alone[:], next(iter(DataLoader(alone, 99))), next(iter(ShardLoader(alone, 99))), pickle.loads(pickle.dumps(alone))[:]):
        assert list(values) == ["n", "label", "x_target", "r"]
        assert same(values["label"], of["label"][at])
        assert same(values["x_target"], of["x"][at][:, [1]])
        assert same(values["r"], of["r"][at])
    assert same(alone.targets, of["label"][at])
    last = MMapShardDataset(root, "val", fields=["n"]).windows(4, horizon=0, target="close")[:][1]  # which no window holds
    assert same(last, of["x"][np.array(begins(4, 1, 0, 20)) + 3, 1])


def test_a_field_that_is_called_like_a_target_is_not_taken_for_it(tmp_path: Path) -> None:
    values = {"x": np.arange(18, dtype=np.float32).reshape(9, 2), "x_target": np.arange(9, dtype=np.int64), "n": np.zeros(9)}
    make_dataset(tmp_path, values=values, facts={"x": {"columns": ("a", "b")}}, keyed=False)
    for fields in (None, ["x", "n"]):
        with pytest.raises(ValueError, match="two values of a sample would have one name, 'x_target'"):
            MMapShardDataset(tmp_path, fields=fields).windows(2, horizon=1, target=["x_target", "a"])
    ds = MMapShardDataset(tmp_path, fields=["n"], output="dict")
    assert ds.windows(2, horizon=1, target="x_target")[:]["x_target"].tolist() == list(range(2, 9))
    assert ds.windows(2, horizon=1, target="b")[:]["x_target"].tolist() == list(range(5, 19, 2))


def test_what_makes_no_window_says_so(made: Any) -> None:
    root, _ = made
    ds = MMapShardDataset(root, "all")
    for arguments, said in (
        ((0,), "length must be an integer of at least 1"),
        ((4, 0), "stride must be an integer of at least 1"),
        ((4, 1, -1, "label"), "horizon must be an integer of at least 0"),
        ((4, 1, 1), "horizon= and target= go together"),
        ((4, 1, None, "label"), "horizon= and target= go together"),
        ((4, 1, 1, []), "target is the name of a field or column"),
        ((4, 1, 1, [3]), "target is the name of a field or column"),
        ((4, 1, 1, 3), "target is the name of a field or column, or a list of such names, not 3"),
        ((4, 1, 1, "adj"), r"target 'adj' names no field, and no column; the fields are \['label', 'x', 'n', 'r'\], their columns \['open',"),
        ((4, 1, 1, ["r", "r"]), "target names one twice"),
        ((4, 1, 0, "close"), "with horizon=0 the target's columns"),
        ((4, 1, 0, ["label", "x", "n", "r"]), "a window needs at least one other"),
        ((31,), "a window of 31 rows fits into none of its groups, the longest has 27 rows"),
        ((20, 1, 8, "label"), "a window of 20 rows and a target 8 rows after it fits into none of its groups, the longest has 27 rows"),
    ):
        with pytest.raises(ValueError, match=said):
            ds.windows(*arguments)
    for other in (ds.subset([1, 2]), ds.windows(4)):
        with pytest.raises(ValueError, match="call windows\\(\\) first"):
            other.windows(4)
    with pytest.raises(ValueError, match="augment needs an image"):
        ShardLoader(ds.windows(4), augment=Augment(hflip=0.5))


def test_numbers_that_no_int64_holds_are_as_good_as_any_that_is_too_large(made: Any) -> None:
    ds = MMapShardDataset(made[0], "all")
    for length, ahead in ((2**70, None), (2**63 - 1, None), (4, 2**63 - 4), (4, 2**80)):
        with pytest.raises(ValueError, match="fits into none of its groups, the longest has 27 rows"):
            ds.windows(length, horizon=ahead, target=None if ahead is None else "label")
    for stride in (28, 2**63 - 1, 2**70):
        far = ds.windows(4, stride)
        assert [far.source(i) for i in range(len(far))] == ["train/AAPL[0]", "MSFT[0]", "TSLA[0]"]
        assert len(ShardLoader(far, batch_size=2, shuffle=True).state_dict()) > 0


def test_columns_of_one_name_in_two_fields_are_not_guessed(tmp_path: Path) -> None:
    values = {name: np.zeros((9, 2), np.float32) for name in ("bid", "ask")}
    facts: dict[str, Any] = {name: {"columns": ("price", "size" if name == "bid" else "count")} for name in values}
    make_dataset(tmp_path, values=values, facts=facts, keyed=False)
    ds = MMapShardDataset(tmp_path)
    for target in ("price", ["size", "count"]):
        with pytest.raises(ValueError, match="a target's are of one"):
            ds.windows(2, horizon=1, target=target)
    assert ds.windows(2, horizon=1, target="count")[0][2].shape == ()


def test_a_dataset_with_keys_and_images_has_windows_within_its_splits(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (20, 3, 6, 5), dtype=np.uint8)
    labels = np.arange(20) % 4
    for layout in ("chw", "hwc"):
        root = tmp_path / layout
        normalize = ((0.5,) * 3, (0.25,) * 3)
        make_dataset(root, images, labels, layout=layout, shards=(7, 5, 8), splits={"train": 12, "val": 8}, normalize=normalize)
        raw = MMapShardDataset(root, "all", dtype=torch.uint8).windows(3, stride=2, horizon=0, target="label")
        first = [*range(0, 10, 2), *range(12, 18, 2)]
        assert same(raw[:][0], np.stack([images[r : r + 3] for r in first]))
        assert raw[:][1].tolist() == [int(labels[r + 2]) for r in first]
        assert all(same(raw[i][0], images[r : r + 3]) for i, r in enumerate(first))
        for crop in (None, 4):
            plain = MMapShardDataset(root, "all", crop=crop)
            windows = plain.windows(3, stride=2)
            wanted = torch.stack([plain[r : r + 3][0] for r in first])
            assert windows[:][0].equal(wanted)
            assert torch.stack([sample[0] for sample in windows]).equal(wanted)
            assert torch.cat([batch[0] for batch in ShardLoader(windows, 3, device="cpu")]).equal(wanted)
        assert raw.find(raw.source(2)) == 2
        with pytest.raises(KeyError):
            raw.find(plain.source(1))
        with pytest.raises(ValueError, match="augment is for single images, not for windows of them"):
            ShardLoader(raw, augment=Augment(hflip=0.5))
        clip = MMapShardDataset(root, "all", transform=lambda window: window.float().mean((0, 2, 3)), target_transform=lambda label: -label)
        mean, label = clip.windows(3, stride=2, horizon=0, target="label")[:]
        assert mean.allclose(wanted_mean(MMapShardDataset(root, "all"), first))
        assert label.tolist() == [-int(labels[r + 2]) for r in first]


def wanted_mean(ds: MMapShardDataset, first: list[int]) -> torch.Tensor:
    return torch.stack([ds[r : r + 3][0].mean((0, 2, 3)) for r in first])


def test_normalised_values_come_normalised_in_windows_and_targets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    array = rng.integers(0, 1000, (40, 2)).astype(np.int32)
    facts: dict[str, Any] = {"x": {"columns": ("a", "b"), "normalize": ((500.0, 400.0), (100.0, 50.0))}}
    make_dataset(tmp_path, values={"x": array}, facts=facts, keyed=False, shards=(25, 15))
    rows = (array.astype(np.float32) - np.float32([500, 400])) / np.float32([100, 50])
    windows = MMapShardDataset(tmp_path).windows(5, horizon=1, target=["b"])
    x, b = windows[:]
    assert same(x, np.stack([rows[r : r + 5] for r in range(35)]))
    assert same(b, rows[5:, [1]])
    assert same(windows[3][0], rows[3:8])
    assert same(windows[22][0], rows[22:27])
    assert same(windows[3][1], rows[8, [1]])
    raw = MMapShardDataset(tmp_path, dtype="int32").windows(5, horizon=1, target="b")
    assert same(raw[:][1], array[5:, 1])


def test_windows_on_a_device_are_those_of_the_files(made: Any) -> None:
    root, _ = made
    windows = MMapShardDataset(root, "val").windows(4, 2, horizon=1, target=["open", "volume", "label"])
    for held in (30, 12, 3):
        there = copy.copy(windows)
        needed = windows._needed()
        store = {c.field: c.base.batch(needed.rows(np.arange(held)), raw=True) for c in windows._columns}
        there._resident = Resident(torch.device("cpu"), store, needed)
        order = [7, 0, 3, 3]
        assert all(same(a, b) for a, b in zip(there[order], windows[order], strict=True))
        assert all(same(a, b) for a, b in zip(there[2], windows[2], strict=True))
        pairs = zip(ShardLoader(there, 3, shuffle=True, seed=1), ShardLoader(windows, 3, shuffle=True, seed=1), strict=True)
        assert all(same(a, b) for pair in pairs for a, b in zip(*pair, strict=True))
    with pytest.raises(ValueError, match="call windows\\(\\) first"):
        MMapShardDataset(root, "val").subset([1]).windows(4)
    assert windows.to_device("cpu")[3][0].equal(windows[3][0])
    some = windows.subset([5, 1, 5])
    assert some.to_device("cpu")[0][0].equal(windows[5][0])


def test_order_ranks_resume_and_workers_are_those_of_any_dataset(made: Any) -> None:
    root, of = made
    windows = MMapShardDataset(root, "val", fields=["x"]).windows(4)
    first = begins(4, 1, 0, 20)
    loader = ShardLoader(windows, 4, shuffle=True, seed=3)
    run = iter(loader)
    before = [next(run) for _ in range(3)]
    state = loader.state_dict()
    rest = list(run)
    after = ShardLoader(windows, 4, shuffle=True, seed=3)
    after.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(after, rest, strict=True))
    seen = sorted(torch.cat([*before, *rest])[:, 0, 0].tolist())
    assert seen == sorted(of["x"][first, 0].tolist())
    other = MMapShardDataset(root, "val", fields=["x"]).windows(4, 2)
    with pytest.raises(ValueError, match="part"):
        ShardLoader(other, 4).load_state_dict(state)
    ranks = [ShardLoader(windows, 2, shuffle="block", block_shards=2, rank=r, world_size=2, uneven="mask") for r in range(2)]
    rows = [x[0, 0] for loader in ranks for batch, valid in loader for x, good in zip(batch, valid, strict=True) if good]
    assert sorted(float(x) for x in rows) == seen
    sampler = ShardSampler(windows, 4, shuffle=True, seed=3)
    assert torch.cat(list(DataLoader(windows, 4, sampler=sampler, num_workers=2))).equal(torch.cat([*before, *rest]))
    again = pickle.loads(pickle.dumps(windows))
    assert len(pickle.dumps(windows)) < 1024
    assert same(again[:], np.stack([of["x"][r : r + 4] for r in first]))
    train, val = windows.random_split([0.7, 0.3], seed=1)
    assert sorted([*train[:][:, 0, 0].tolist(), *val[:][:, 0, 0].tolist()]) == seen
    assert windows.blocks().tolist()[0] == 0
    assert windows.part != other.part
    assert windows.warm().wait(60)


def test_a_hundred_million_windows_take_no_memory(tmp_path: Path) -> None:
    n, groups = 100_000_000, 1000
    starts = np.arange(groups + 1) * (n // groups)
    tracemalloc.start()
    found = Windows(64, 1, 5, "y").selection(starts, np.array([0, n // 2, n]), 0, n, "here")
    assert len(found) == n - groups * 68
    picked = np.random.default_rng(0).integers(0, len(found), 4096)
    rows = found.rows(picked)
    assert found.find(int(rows[7])) == picked[7]
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_groups_that_are_missing_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    make_dataset(tmp_path, values={"x": np.arange(20)}, groups=[("a", 9), ("b", 20)], keyed=False)
    ds = MMapShardDataset(tmp_path)
    next((tmp_path / "shards").glob("groups-*")).unlink()
    for use in (lambda: ds.windows(3), lambda: ds.source(0)):
        with pytest.raises(CorruptShardError, match=r"groups-.*missing"):
            use()


def test_groups_that_cross_a_split_are_cut_there(tmp_path: Path) -> None:
    make_dataset(tmp_path, values={"x": np.arange(20)}, groups=[("a", 20)], splits={"train": 11, "val": 9}, keyed=False)
    starts = MMapShardDataset(tmp_path, "all").windows(3)[:][:, 0].tolist()
    assert starts == [*range(9), *range(11, 18)]


def test_windows_come_through_a_cache_that_holds_a_few_shards(tmp_path: Path) -> None:
    array = np.random.default_rng(0).normal(size=(6000, 100)).astype(np.float32)
    columns = tuple(f"column {i}" for i in range(100))
    groups = [("a", 2500), ("b", 6000)]
    make_dataset(tmp_path / "out", values={"x": array}, facts={"x": {"columns": columns}}, shards=(500,) * 12, keyed=False, groups=groups)
    shard = 4096 + 500 * 400
    far = MMapShardDataset(tmp_path / "out", cache=Cache(tmp_path / "cache", max_bytes=8 * shard))
    here = MMapShardDataset(tmp_path / "out")
    assert far.fields == here.fields
    assert far.source(2501) == "b[1]"
    some, same_here = (ds.windows(64, 7, horizon=3, target="column 5") for ds in (far, here))
    order = np.random.default_rng(1).integers(0, len(some), 200)
    assert all(torch.equal(a, b) for a, b in zip(some[order], same_here[order], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(some[70], same_here[70], strict=True))
    arguments: dict[str, Any] = {"batch_size": 16, "seed": 2, "block_shards": 2}
    batches = zip(ShardLoader(some, shuffle=True, **arguments), ShardLoader(same_here, shuffle="block", **arguments), strict=True)
    assert all(torch.equal(a, b) for pair in batches for a, b in zip(*pair, strict=True))
    assert some.warm().wait(60)
