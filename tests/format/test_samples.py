from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from mmcompile.format.index import DTYPES, Field
from mmcompile.format.samples import FLAGS, combine_statistics, hash_pair, keys_of, pair_hash, row_hashes, sample_dtype, shard_sums


def field(dtype: str = "uint8", channels: int = 3) -> Field:
    return Field("image", dtype, (channels, 4, 5), "image", "chw")


LABEL = Field("label", "int64", (), "class")


@pytest.mark.parametrize(("dtype", "kind"), [("uint8", "<u8"), ("uint16", "<u8"), ("float32", "<f8"), ("int16", "<f8"), ("bfloat16", "<f8")])
def test_the_record_has_exact_sums_of_its_kind(dtype: str, kind: str) -> None:
    record = sample_dtype((field(dtype, 4), LABEL))
    assert record["sum"].base == record["sum_squares"].base == np.dtype(kind)
    assert record["sum"].shape == (4,)
    assert record.itemsize == 70 + 64
    assert "sum" not in (sample_dtype((LABEL,)).names or ())


def test_flags_are_single_bits_with_words_of_their_own() -> None:
    assert all(bit & (bit - 1) == 0 for bit in FLAGS)
    assert len(set(FLAGS.values())) == len(FLAGS)
    assert all(word.split() == [word] for word in FLAGS.values())


@given(st.binary(max_size=40))
def test_a_hash_survives_as_a_pair(data: bytes) -> None:
    digest = xxhash.xxh3_128_hexdigest(data)
    pair = np.array([hash_pair(digest)], "<u8")
    assert pair_hash(pair[0]) == digest


def test_trailing_zeros_of_a_hash_are_kept() -> None:
    for digest in ("0" * 32, "ff" + "0" * 30, "0" * 31 + "1"):
        assert pair_hash(np.array(hash_pair(digest), "<u8")) == digest


@given(st.lists(st.binary(max_size=9), max_size=9))
def test_keys_come_back(keys: list[bytes]) -> None:
    samples = np.zeros(len(keys), sample_dtype((LABEL,)))
    samples["key_stop"] = np.cumsum([len(k) for k in keys])
    assert keys_of(samples, b"".join(keys)) == keys


@given(st.integers(1, 5), st.sampled_from(sorted(DTYPES)), st.sampled_from([(), (3,), (2, 3)]), st.integers(0, 99))
def test_row_hashes_are_of_the_concatenated_bytes(n: int, dtype: str, shape: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = DTYPES[dtype].itemsize * math.prod(shape)
    first = np.frombuffer(rng.bytes(n * size), DTYPES[dtype]).reshape(n, *shape)
    second = rng.integers(0, 9, n)
    expected = [xxhash.xxh3_64_intdigest(first[i : i + 1].tobytes() + second[i : i + 1].tobytes()) for i in range(n)]
    assert row_hashes([first, second]).tolist() == expected
    assert row_hashes([np.asfortranarray(first), second]).tolist() == expected


def exact(values: Any) -> tuple[Fraction, Fraction]:
    items = [Fraction(v) for v in values.reshape(-1).tolist()]
    mean = sum(items, Fraction(0)) / len(items)
    return mean, sum(((v - mean) ** 2 for v in items), Fraction(0)) / len(items)


def records(pixels: Any, depth: int, dtype: str = "uint8") -> Any:
    """Provenance of (N, C, H, W) pixels."""
    out = np.zeros(len(pixels), sample_dtype((Field("image", dtype, pixels.shape[1:], "image", "chw"),)))
    kind = out["sum"].dtype
    out["sum"], out["sum_squares"], out["depth"] = pixels.astype(kind).sum((2, 3)), (pixels.astype(kind) ** 2).sum((2, 3)), depth
    return out


@given(npst.arrays(np.uint8, st.tuples(st.integers(1, 6), st.just(2), st.integers(1, 4), st.just(3))), st.booleans(), st.data())
def test_statistics_are_the_floats_nearest_to_the_exact_values(pixels: Any, scale: bool, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(pixels) - 1))
    parts = [p for p in (pixels[:cut], pixels[cut:]) if len(p)]
    found = combine_statistics([shard_sums(records(p, 8), p[0, 0].size) for p in parts], scale)
    assert found is not None
    assert found["pixels"] == pixels[:, 0].size
    for c in range(2):
        mean, variance = exact(pixels[:, c])
        unit = 255 if scale else 1
        assert found["mean"][c] == float(mean / unit)
        assert found["std"][c] == math.sqrt(float(variance / unit**2))


@given(npst.arrays(np.float64, (3, 1, 2, 2), elements=st.integers(-1000, 1000).map(lambda v: v / 8)))
def test_float_sources_have_statistics_as_they_are(pixels: Any) -> None:
    found = combine_statistics([shard_sums(records(pixels, 0, "float32"), 4)], True)
    assert found is not None
    mean, variance = exact(pixels)
    assert found["mean"] == [float(mean)]
    assert found["std"] == [math.sqrt(float(variance))]


def test_depths_are_combined_on_one_scale() -> None:
    eight, sixteen = np.full((1, 1, 1, 2), 255, np.uint8), np.full((1, 1, 1, 2), 65535, np.uint16)
    sums = [shard_sums(records(eight, 8), 2), shard_sums(records(sixteen, 16, "uint16"), 2)]
    found = combine_statistics(sums, True)
    assert found is not None
    assert (found["mean"], found["std"], [s["depth"] for s in found["sums"]]) == ([1.0], [0.0], [8, 16])


def test_sums_above_64_bits_stay_exact() -> None:
    entry = {"depth": 16, "pixels": 1 << 60, "sum": [(1 << 60) * 65535], "sum_squares": [(1 << 60) * 65535**2]}
    found = combine_statistics([[entry]] * 3, True)
    assert found is not None
    assert (found["mean"], found["std"], found["sums"][0]["sum"]) == ([1.0], [0.0], [3 * (1 << 60) * 65535])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e308])
def test_sources_that_have_no_finite_sums_have_no_statistics(value: float) -> None:
    pixels = np.ones((2, 1, 2, 2))
    pixels[1, 0, 0] = value
    with np.errstate(over="ignore", invalid="ignore"):
        sums = shard_sums(records(pixels, 0, "float32"), 4)
    assert combine_statistics([sums], True) is None


def test_nothing_has_no_statistics() -> None:
    assert combine_statistics([], True) is None
    assert shard_sums(np.zeros(3, sample_dtype((LABEL,))), 0) == []
