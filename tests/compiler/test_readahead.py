from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from mmcompile.compiler import ahead as home
from mmcompile.compiler.ahead import ReadAhead
from mmcompile.compiler.sources.folder import FolderSource
from tests.compiler.builds import ROW_BYTES, dataset, inline, make_raw, run


@dataclass
class Slow:
    """Each read waits until it is let through; `order` is what was begun, `now` and `most` how many were at once."""

    answers: dict[bytes, bytes | BaseException]
    parallel: int = 2
    hold: threading.Event = field(default_factory=threading.Event)
    order: list[bytes] = field(default_factory=list)
    now: int = 0
    most: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def read(self, key: bytes) -> bytes:
        with self.lock:
            self.order.append(key)
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            assert self.hold.wait(60)
            answer = self.answers[key]
            if isinstance(answer, BaseException):
                raise answer
            return answer
        finally:
            with self.lock:
                self.now -= 1


def made(source: Any, keys: list[bytes], sizes: list[int] | None = None) -> ReadAhead:
    return ReadAhead(source, keys, [-1] * len(keys) if sizes is None else sizes)


def until(condition: Any, limit_s: float = 30.0) -> bool:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return bool(condition())


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read counts as slow, and the first is enough."""
    monkeypatch.setattr(home, "_SLOW_S", -1.0)
    monkeypatch.setattr(home, "_SLOW_READS", 1)


def keys_of(n: int) -> list[bytes]:
    return [b"%d" % i for i in range(n)]


def test_fast_reads_start_no_thread() -> None:
    keys = keys_of(50)
    source = Slow({k: k for k in keys})
    source.hold.set()
    before = threading.active_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "_SLOW_S", 3600.0)
        ahead = made(source, keys)
        assert [ahead.read(i) for i in range(50)] == keys
    assert threading.active_count() == before
    assert source.most == 1


def test_one_slow_read_among_fast_ones_is_an_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = keys_of(9)
    took = iter([0.0, 9.0, 0.0, 0.0] * 9)
    source = Slow({k: k for k in keys})
    source.hold.set()
    clock = [0.0]

    def tick() -> float:
        clock[0] += next(took) / 2
        return clock[0]

    monkeypatch.setattr(home.time, "perf_counter", tick)
    ahead = made(source, keys)
    assert [ahead.read(i) for i in range(9)] == keys
    assert not ahead._threads


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(st.data())
def test_what_comes_is_what_the_source_gives_whatever_is_passed_over(data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 30))
    keys = keys_of(n)
    fails = data.draw(st.sets(st.integers(0, 30)))
    memory = data.draw(st.sets(st.integers(0, 30)))
    answers: dict[bytes, bytes | BaseException] = {
        k: MemoryError() if i in memory else OSError(5, "oh", str(i)) if i in fails else k * 3 for i, k in enumerate(keys)
    }
    source = Slow(answers, parallel=data.draw(st.integers(1, 4)))
    source.hold.set()
    asked = [i for i in range(n) if data.draw(st.booleans())]
    sizes = [data.draw(st.sampled_from([-1, 3, 1 << 40])) for _ in keys]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(home, "_SLOW_S", -1.0)
        patch.setattr(home, "_SLOW_READS", data.draw(st.integers(1, 3)))
        ahead = made(source, keys, sizes)
        for i in asked:
            answer = answers[keys[i]]
            if isinstance(answer, BaseException):
                with pytest.raises(type(answer)):
                    ahead.read(i)
            else:
                assert ahead.read(i) == answer
        ahead.close()
    assert until(lambda: source.now == 0)


@pytest.mark.usefixtures("eager")
def test_as_many_files_as_pay_are_read_at_once_and_few_are_held() -> None:
    keys = keys_of(40)
    source = Slow({k: k for k in keys}, parallel=3)
    source.hold.set()
    ahead = made(source, keys)
    ahead.read(0)
    source.hold.clear()
    assert until(lambda: len(source.order) >= 1 + 3)
    source.hold.set()
    assert until(lambda: len(source.order) == 1 + 3 * 3)
    assert source.most <= 3
    assert [ahead.read(i) for i in range(1, 40)] == keys[1:]
    ahead.close()


@pytest.mark.usefixtures("eager")
def test_no_more_bytes_are_held_than_allowed_but_one_file_always_is() -> None:
    keys = keys_of(6)
    source = Slow({k: k for k in keys}, parallel=4)
    source.hold.set()
    size = home._HELD_BYTES // 2
    ahead = made(source, keys, [0, size, size, 3 * size, 1, 1])
    ahead.read(0)
    assert until(lambda: len(source.order) == 3)
    assert sum(ahead._held.values()) <= home._HELD_BYTES
    ahead.read(1)
    ahead.read(2)
    assert until(lambda: source.order[3:] == [b"3"])
    assert [ahead.read(i) for i in (3, 4, 5)] == keys[3:]
    ahead.close()


@pytest.mark.usefixtures("eager")
def test_a_file_that_hangs_is_waited_for_in_its_turn_and_not_before() -> None:
    keys = keys_of(4)

    class OneHangs(Slow):
        def read(self, key: bytes) -> bytes:
            return super().read(key) if key == b"2" else key

    source = OneHangs({k: k for k in keys})
    ahead = made(source, keys)
    assert [ahead.read(0), ahead.read(1)] == [b"0", b"1"]
    assert until(lambda: source.order == [b"2"])
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(ahead.read(2)))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    source.hold.set()
    waiting.join(30)
    assert got == [b"2"]
    assert ahead.read(3) == b"3"
    ahead.close()


@pytest.mark.usefixtures("eager")
def test_memory_that_ran_out_ahead_is_asked_for_again_in_turn() -> None:
    tries: list[int] = []

    class Once(Slow):
        def read(self, key: bytes) -> bytes:
            if key == b"1":
                tries.append(threading.get_ident())
                if len(tries) == 1:
                    raise MemoryError
            return key

    ahead = made(Once({}), keys_of(3))
    ahead.read(0)
    assert until(lambda: len(tries) == 1)
    assert ahead.read(1) == b"1"
    assert tries[1] == threading.get_ident() != tries[0]
    ahead.close()


@dataclass(frozen=True)
class Late(FolderSource):
    def read(self, key: bytes) -> bytes:
        time.sleep(0.003)
        return super().read(key)


def test_a_build_from_a_slow_disk_has_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)
    raw = make_raw(tmp_path / "raw", per_class=9)
    (raw / "cat" / "3.jpg").write_bytes(b"\xff\xd8\xff no picture")
    for name, source in (("fast", FolderSource(str(raw))), ("slow", Late(str(raw)))):
        run(source, tmp_path / name, rows=ROW_BYTES, max_rejects=1)
    assert dataset(tmp_path / "slow") == dataset(tmp_path / "fast")
