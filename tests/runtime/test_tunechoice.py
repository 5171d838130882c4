"""What is chosen from figures: made-up ones, whose right answers are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mmcompile.runtime.tunechoice import (
    Candidate,
    Facts,
    Limit,
    Parts,
    advice_of,
    against,
    bottleneck_of,
    choose,
    growing,
    limits_of,
    worth_a_round,
)


def shard(workers: int, *rates: float, prefetch: int | None = 2) -> Candidate:
    return Candidate("ShardLoader", workers, prefetch if workers else None, rates=rates)


def stock(workers: int, *rates: float, prefetch: int | None = 2) -> Candidate:
    return Candidate("DataLoader", workers, prefetch if workers else None, rates=rates)


# ---------------------------------------------------------------- the choice


def test_of_those_that_are_as_good_as_the_best_the_smallest_is_taken() -> None:
    found = choose([shard(1, 990.0), shard(2, 1000.0), shard(4, 1005.0), stock(1, 400.0)], 256)
    assert found.candidate == shard(1, 990.0)
    assert found.best == shard(4, 1005.0)
    assert found.share == pytest.approx(990 / 1005)
    assert found.keeps_up is None
    assert "within 1% of the fastest (ShardLoader with 4 threads)" in found.reason
    beside = choose([shard(0, 2000.0), shard(1, 990.0), shard(2, 1000.0)], 256)
    assert "within 1% of the fastest with workers (ShardLoader with 2 threads); without workers, which gave 2,000" in beside.reason


def test_more_workers_are_taken_where_they_add_something() -> None:
    assert choose([shard(1, 500.0), shard(2, 950.0), shard(4, 1000.0)], 256).candidate.num_workers == 4
    found = choose([shard(1, 1000.0), shard(2, 700.0)], 256)
    assert (found.candidate.num_workers, found.reason) == (1, "the fastest, and 2 workers add nothing")


def test_worker_processes_win_where_a_transform_needs_them() -> None:
    found = choose([shard(1, 100.0), shard(2, 101.0), stock(1, 95.0), stock(2, 190.0), stock(4, 360.0), stock(8, 362.0)], 256)
    assert found.candidate == stock(4, 360.0)


def test_fewer_batches_ahead_are_enough_where_more_add_nothing() -> None:
    few, many = shard(2, 1000.0, prefetch=2), shard(2, 1001.0, prefetch=4)
    assert choose([many, few], 256).candidate == few
    assert "(ShardLoader with 2 threads, prefetch_factor=4)" in choose([many, few], 256).reason


def test_threads_are_taken_before_as_many_processes() -> None:
    assert choose([stock(1, 1000.0), shard(1, 1000.0)], 256).candidate.loader == "ShardLoader"
    assert choose([stock(1, 1000.0), shard(2, 1000.0)], 256).candidate.loader == "DataLoader"


def test_pairs_of_a_round_are_compared_and_not_medians_of_a_noisy_machine() -> None:
    # each round both have half the machine or all of it; the second is always 10 % faster
    one, two = shard(1, 1000.0, 500.0, 1000.0, 500.0, 520.0), shard(2, 1100.0, 550.0, 1100.0, 550.0, 572.0)
    assert against(one, two) == pytest.approx(1 / 1.1)
    assert choose([one, two], 256).candidate == two


def test_noise_widens_what_counts_as_the_same_but_never_to_five_percent() -> None:
    best = shard(2, *[1000.0] * 8)
    steady = shard(1, *[970.0] * 8)
    noisy = shard(1, 760.0, 800.0, 900.0, 970.0, 970.0, 1100.0, 1200.0, 1300.0)
    lost = shard(1, 700.0, 750.0, 800.0, 945.0, 945.0, 1200.0, 1300.0, 1400.0)
    assert choose([best, steady], 256).candidate == best
    assert choose([best, noisy], 256).candidate == noisy
    assert choose([best, lost], 256).candidate == best


def test_without_workers_only_where_a_batch_takes_next_to_nothing() -> None:
    # 256 samples in 0.5 ms
    tiny = choose([shard(0, 512_000.0), shard(1, 300_000.0)], 256)
    assert (tiny.candidate.num_workers, tiny.best.num_workers) == (0, 0)
    assert "handing it over from a worker more" in tiny.reason
    # in 32 ms: training would stand still
    large = choose([shard(0, 8000.0), shard(1, 7000.0)], 256)
    assert (large.candidate.num_workers, large.best.num_workers, large.share) == (1, 0, 0.875)
    assert large.reason.startswith("the fastest with workers; without workers, which gave 8,000 samples/s, training would stand still")
    # of the two alike the one that works ahead
    assert choose([shard(0, 512_000.0), shard(1, 510_000.0)], 256).candidate.num_workers == 1
    only = choose([shard(0, 8000.0), shard(1)], 256)
    assert (only.candidate.num_workers, only.reason) == (0, "the fastest; none with workers was measured")


def test_what_failed_or_was_not_tried_is_never_chosen() -> None:
    failed = replace(shard(2, 5000.0), failed="RuntimeError: gone")
    assert choose([failed, shard(1, 1000.0), stock(2)], 256).candidate.num_workers == 1
    with pytest.raises(ValueError, match="no candidate was measured"):
        choose([failed, stock(1)], 256)


# ---------------------------------------------------------------- beside a step


def test_with_a_step_time_the_smallest_that_keeps_up_is_taken() -> None:
    some = [shard(0, 9000.0), shard(1, 5000.0), shard(2, 9000.0), shard(4, 16000.0)]
    found = choose(some, 256, needed_per_s=6400.0)
    assert (found.candidate.num_workers, found.keeps_up) == (2, True)
    assert found.reason == "the smallest setting that keeps up: 9,000 samples/s where training takes 6,400"
    assert choose(some, 256, needed_per_s=1000.0).candidate.num_workers == 1


def test_a_margin_remains() -> None:
    some = [shard(1, 1100.0), shard(2, 1240.0), shard(4, 1260.0)]
    assert choose(some, 256, needed_per_s=1000.0).candidate.num_workers == 4
    found = choose(some[:2], 256, needed_per_s=1000.0)
    assert (found.candidate.num_workers, found.keeps_up) == (2, False)


def test_without_workers_a_loader_keeps_up_if_its_batches_take_a_fiftieth_of_a_step() -> None:
    alone = shard(0, 50_000.0)
    assert choose([alone, shard(1, 40_000.0)], 256, needed_per_s=10_000.0).candidate.num_workers == 1
    assert choose([alone, shard(1, 900.0)], 256, needed_per_s=999.0).candidate == alone


def test_where_nothing_keeps_up_the_fastest_with_workers_is_taken() -> None:
    found = choose([shard(0, 512_000.0), shard(1, 300_000.0), shard(2, 400_000.0)], 256, needed_per_s=1e6)
    assert (found.candidate.num_workers, found.keeps_up) == (2, False)


def test_what_was_seen_to_wait_is_passed_over() -> None:
    some = [shard(1, 2000.0), shard(2, 4000.0)]
    assert choose(some, 256, 1000.0).candidate == some[0]
    assert choose(some, 256, 1000.0, some[:1]).candidate == some[1]
    assert choose(some, 256, 1000.0, some).keeps_up is False


# ---------------------------------------------------------------- which are measured


@pytest.mark.parametrize(
    ("rates", "more"),
    [([], True), ([100], True), ([100, 98], True), ([100, 98, 180], True), ([100, 101, 102], False), ([100, 190, 350, 360], True)],
)
def test_more_workers_are_tried_until_two_steps_add_nothing(rates: list[float], more: bool) -> None:
    assert growing(rates) is more


def test_what_is_far_behind_is_not_measured_again() -> None:
    first = [shard(1, 1000.0), shard(2, 700.0), stock(1, 200.0), stock(2)]
    assert worth_a_round(first) == [0, 1]
    later = [shard(1, *[1000.0] * 6), shard(2, *[700.0] * 6), shard(4, *[950.0] * 6), stock(1, 200.0)]
    assert worth_a_round(later) == [0, 2]
    assert worth_a_round([stock(1), replace(shard(1, 1.0), failed="late")]) == []


def test_the_smallest_that_keep_up_are_measured_again_however_slow() -> None:
    some = [shard(1, 100.0), shard(2, 300.0), shard(4, 500.0), shard(8, 4000.0)]
    assert worth_a_round(some) == [3]
    assert worth_a_round(some, 100.0) == [1, 2, 3]


# ---------------------------------------------------------------- bottleneck, limits, advice

FACTS = Facts(row_bytes=100_000, cpus=4)
MEMORY = {1: 10e9, 2: 16e9, 4: 20e9}


def test_limits_say_what_each_part_alone_allows() -> None:
    parts = Parts(gather_s=1e-5, convert_s=1e-4, loop_s=1e-6)
    found = {limit.part: limit for limit in limits_of(shard(2, 15_000.0), parts, MEMORY, FACTS, disk_per_s=5000.0)}
    assert found["memory"].samples_per_s == 160_000
    assert found["gather"].samples_per_s == pytest.approx(1.6 / 1e-5)  # two threads copy 1.6 times as much
    assert found["convert"].samples_per_s == pytest.approx(2 / 1e-4)
    assert found["convert"].used == pytest.approx(0.75)
    assert "disk" not in found  # what stays in memory does not wait for it
    assert next(iter(found)) == "convert"
    cold = limits_of(shard(2, 4900.0), parts, MEMORY, replace(FACTS, cold=True), disk_per_s=5000.0)
    assert cold[0] == Limit("disk", 5000.0, 4900 / 5000)


def test_a_transform_runs_in_the_loop_of_a_shardloader_and_in_each_process_of_a_dataloader() -> None:
    parts = Parts(gather_s=1e-6, transform_s=1e-3)
    of = {c.loader: {x.part: x.samples_per_s for x in limits_of(c, parts, MEMORY, FACTS)} for c in (shard(4, 900.0), stock(4, 3900.0))}
    assert of["ShardLoader"]["transform"] == pytest.approx(1000)
    assert of["DataLoader"]["transform"] == pytest.approx(4000)
    assert {x.part: x.samples_per_s for x in limits_of(stock(16, 1.0), parts, MEMORY, FACTS)}["transform"] == pytest.approx(4000)  # 4 CPUs


@pytest.mark.parametrize(
    ("choice", "limits", "keeps_up", "found"),
    [
        (shard(2, 900.0), [Limit("memory", 1000, 0.9), Limit("gather", 1100, 0.8)], None, "gather"),
        (shard(2, 900.0), [Limit("convert", 1000, 0.9), Limit("gather", 9000, 0.1)], False, "convert"),
        (shard(2, 900.0), [Limit("convert", 1000, 0.9)], True, "consumer"),
        (stock(2, 900.0), [Limit("gather", 9000, 0.1)], None, "processes"),
        (stock(2, 900.0), [Limit("transform", 1000, 0.9)], None, "transform"),
        (stock(0, 900.0), [Limit("loop", 2000, 0.45)], None, "loop"),
        (shard(1, 900.0), [Limit("disk", 1000, 0.9), Limit("gather", 9000, 0.1)], None, "disk"),
        (shard(0, 900.0), [], None, "loop"),
    ],
)
def test_the_bottleneck_is_the_part_nearest_its_limit(choice: Candidate, limits: list[Limit], keeps_up: bool | None, found: str) -> None:
    assert bottleneck_of(choice, limits, keeps_up) == found


def test_advice_fits_what_is_in_the_way() -> None:
    said = {
        name: " ".join(advice_of(name, shard(2, 1.0), FACTS)) for name in ("gather", "convert", "transform", "transfer", "loop", "disk", "processes")
    }
    assert all(said.values())
    assert advice_of("consumer", shard(2, 1.0), FACTS) == ()
    assert "device='cuda'" not in said["convert"]  # there is none
    assert "device='cuda'" in advice_of("convert", shard(2, 1.0), replace(FACTS, cuda_there=True))[0]
    assert advice_of("loop", shard(2, 1.0), replace(FACTS, one_batch=True)) == ("nothing to change: a batch is all that there is",)
    assert "larger batches" in said["loop"]
    assert "to_device" not in " ".join(said.values())
    on_device = replace(FACTS, cuda=True, fits=True)
    assert "to_device" in " ".join(advice_of("gather", shard(2, 1.0), on_device))
    assert "device='cuda'" not in " ".join(advice_of("convert", shard(2, 1.0), on_device))
    hooked = " ".join(advice_of("transform", stock(4, 1.0), replace(FACTS, hooked=True)))
    assert "augment=" in hooked
    assert "all 4" in hooked
    assert "set_num_threads" not in hooked
    assert "torch.set_num_threads(1)" in advice_of("transform", stock(4, 1.0), replace(FACTS, hooked=True, torch_threads=4))[-1]
    assert advice_of("gather", shard(2, 1.0), FACTS, [Limit("gather", 1.2, 0.8)]) == (
        "nothing to change: it is near what this machine's memory gives",
    )
    assert advice_of("gather", shard(2, 1.0), FACTS, [Limit("gather", 4.0, 0.25)])[0].startswith("no part is near its limit")
    stored = replace(FACTS, were_bytes=True, crop_share=0.77, sequence_gain=5.0)
    disk = " ".join(advice_of("disk", shard(2, 1.0), stored))
    for word in ("--dtype uint8", "77%", "5.0 times as fast in sequence", "--order shuffled"):
        assert word in disk
    assert "--dtype" not in said["disk"]
    assert "--dtype" not in " ".join(advice_of("gather", shard(2, 1.0), stored))  # a CPU that computes them has more to do
    assert "--dtype uint8" in advice_of("transfer", shard(2, 1.0), replace(stored, cuda=True))[0]
