from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.compiler import driver, output, planning, statcache, task
from mmcompile.compiler.driver import BuildOptions, build
from mmcompile.compiler.options import allowed_rejects
from mmcompile.compiler.outcome import Progress
from mmcompile.compiler.preprocess import Normalize, Preprocess
from mmcompile.compiler.sources import STAT_DTYPE, Scan, labelled
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.compiler.sources.keys import Keys
from mmcompile.errors import BuildError, DecodeError, FormatError, OptionError, OutputExistsError, SourceError
from mmcompile.format.fields import Split
from mmcompile.format.lock import Lock
from mmcompile.format.npy import ALIGN
from mmcompile.format.reader import Reader
from mmcompile.format.verify import verify
from mmcompile.text import go_on
from tests.compiler import builds
from tests.compiler.builds import BROKEN, SMALL, age, dataset, expected, images, inline, keys, make_raw, picture, run, shard_stats, snapshot, write


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "processes" not in request.fixturenames:
        inline(monkeypatch)


@pytest.fixture
def processes() -> None:
    """Asked for by tests that need real workers."""


def fresh(raw: Any, preprocess: Preprocess | None = SMALL, **more: Any) -> dict[str, bytes]:
    """The dataset of a build into a new folder."""
    clean = Path(raw.root if isinstance(raw, FolderSource) else raw).parent / "fresh"
    shutil.rmtree(clean, ignore_errors=True)
    run(raw, clean, preprocess, **more)
    return dataset(clean)


def index_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "index.json").read_bytes())
    return found


# ---------------------------------------------------------------- what is built


def test_rows_are_those_of_every_file_in_the_order_of_imagefolder(raw: Path, out: Path) -> None:
    report = run(raw, out)
    scan = FolderSource(str(raw)).scan()
    assert np.array_equal(images(out), expected(raw, SMALL))
    assert keys(out) == scan.keys
    reader = Reader(out)
    assert scan.labels is not None
    assert reader.column("label").tolist() == scan.labels.tolist()
    assert reader.classes == ("cat", "dog")
    assert (report.samples, report.decoded, report.copied, report.kept, report.rejects) == (12, 12, 0, 0, 0)
    assert report.shards == len(reader.table) > 2
    assert report.bytes == sum(len(data) for data in dataset(out).values())
    assert report.generation == reader.generation


def test_a_flat_folder_has_no_labels(tmp_path: Path, out: Path) -> None:
    raw = write(tmp_path / "raw", {f"{i}.png": picture(i) for i in range(5)})
    run(raw, out)
    assert np.array_equal(images(out), expected(raw, SMALL))
    assert Reader(out).classes is None
    assert [f.name for f in Reader(out).index.fields] == ["image"]


@pytest.mark.usefixtures("processes")
def test_workers_and_pieces_change_no_byte_and_no_file(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(raw, {"cat/broken.png": BROKEN, "dog/1.broken.jpg": b"no jpeg"})
    made = []
    for workers, piece in ((1, 256), (2, 1), (3, 2), (2, 256)):
        monkeypatch.setattr("mmcompile.compiler.pieces._MOST_ITEMS", piece)
        out = tmp_path / f"out-{workers}-{piece}"
        run(raw, out, workers=workers, max_rejects=2)
        made.append(({p.name for p in (out / "shards").iterdir()}, dataset(out)))
    assert all(m == made[0] for m in made)


@pytest.mark.parametrize("rows", [1, 2, 1000])
def test_the_size_of_shards_moves_cuts_and_no_row(raw: Path, out: Path, rows: int) -> None:
    run(raw, out, rows=rows)
    assert np.array_equal(images(out), expected(raw, SMALL))
    counts = Reader(out).table["rows"].tolist()
    assert max(counts) <= 2 * rows
    assert rows > 1 or len(counts) >= 6


DTYPES = ["uint8", "uint16", "int32", "float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("layout", ["chw", "hwc"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [None, Normalize((0.5, 0.25, 0.1), (0.5, 2.0, 0.3))])
def test_every_dtype_layout_and_normalisation_is_stored_as_the_cast_says(
    tmp_path: Path, out: Path, dtype: str, layout: str, normalize: Normalize | None
) -> None:
    raw = write(tmp_path / "raw", {f"{c}/{i}.png": picture(i) for c in "ab" for i in range(2)})
    if dtype == "int32" and normalize is not None:
        with pytest.raises(OptionError, match="clash"):
            Preprocess(crop=8, dtype=dtype, normalize=normalize)
        return
    preprocess = Preprocess(crop=8, dtype=dtype, layout=layout, normalize=normalize)
    run(raw, out, preprocess, rows=1000)
    found = images(out)
    assert found.shape == (4, *((3, 8, 8) if layout == "chw" else (8, 8, 3)))
    assert found.tobytes() == expected(raw, preprocess).tobytes()
    field = Reader(out).index.fields[0]
    assert (field.dtype, field.layout) == (dtype, layout)
    deferred = normalize is not None and dtype in ("uint8", "uint16")
    assert field.normalize == ((normalize.mean, normalize.std) if deferred and normalize else None)
    # numpy alone reads it
    (shard,) = (np.load(p, mmap_mode="r") for p in (out / "shards").glob("image-*.npy"))
    assert shard.tobytes() == found.tobytes()


@pytest.mark.parametrize(("mode", "channels"), [("gray", 1), ("rgba", 4)])
def test_other_modes_have_their_channels(tmp_path: Path, out: Path, mode: str, channels: int) -> None:
    raw = write(tmp_path / "raw", {"a.png": picture(1), "b.png": picture(2, mode="RGBA"), "c.png": picture(3, mode="L")})
    preprocess = Preprocess(crop=8, mode=mode)
    run(raw, out, preprocess)
    assert images(out).shape == (3, channels, 8, 8)
    assert np.array_equal(images(out), expected(raw, preprocess))


def test_statistics_are_those_of_all_pixels_and_normalize_auto_hands_them_to_the_reader(raw: Path, out: Path) -> None:
    run(raw, out, replace(SMALL, normalize="auto"))
    value = images(out).transpose(1, 0, 2, 3).reshape(3, -1).astype("f8") / 255
    field = Reader(out).index.fields[0]
    assert field.normalize is not None
    assert np.allclose(field.normalize[0], value.mean(1), rtol=1e-12)
    assert np.allclose(field.normalize[1], value.std(1), rtol=1e-9)
    found = index_of(out)["statistics"]["all"]["image"]
    assert tuple(found["mean"]) == field.normalize[0]
    assert images(out).dtype == np.uint8


def test_normalize_auto_of_pictures_that_do_not_vary_is_refused_and_nothing_published(tmp_path: Path, out: Path) -> None:
    raw = write(tmp_path / "raw", {"a.ppm": b"P6 8 8 255\n" + bytes(192)})
    with pytest.raises(BuildError, match="give --mean and --std"):
        run(raw, out, replace(SMALL, normalize="auto"))
    assert not (out / "index.json").exists()


def test_mode_keep_takes_the_most_frequent_mode_and_rejects_strays(tmp_path: Path, out: Path) -> None:
    raw = write(tmp_path / "raw", {f"{i}.png": picture(i, mode="L" if i else "RGB") for i in range(4)})
    with pytest.raises(DecodeError, match="1 of 4"):
        run(raw, out, replace(SMALL, mode="keep"))
    report = run(raw, out, replace(SMALL, mode="keep"), max_rejects=1)
    assert report.shape == (1, 8, 8)
    assert index_of(out)["settings"]["preprocess"]["kept_mode"] == "L"
    write(raw, {f"more-{i}.png": picture(i) for i in range(9)})
    with pytest.raises(OptionError, match="published with pictures of mode L"):
        run(raw, out, replace(SMALL, mode="keep"), max_rejects="50%")


def test_one_image_is_a_dataset_and_none_is_an_error(tmp_path: Path, out: Path) -> None:
    raw = write(tmp_path / "raw", {"only.png": picture(1)})
    assert run(raw, out).samples == 1
    (raw / "only.png").unlink()
    with pytest.raises(SourceError, match="no images"):
        run(raw, tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Listed:
    """A source of what it is given."""

    root = "/nowhere"

    def __init__(self, items: list[tuple[bytes, bytes | OSError]]) -> None:
        self.items = dict(items)

    def identity(self) -> dict[str, object]:
        return {"kind": "listed"}

    def location(self) -> str:
        return "listed"

    def scan(self, progress: Any = None) -> Scan:
        return Scan(Keys.of(self.items), *labelled(None, len(self.items)), np.full(len(self.items), -1, STAT_DTYPE))

    def read(self, key: bytes) -> bytes:
        found = self.items[key]
        if isinstance(found, OSError):
            raise found
        return found

    def stat(self, key: bytes) -> tuple[int, int, int, int]:
        return (-1, -1, -1, -1)


def test_another_source_works_by_the_protocol_alone_and_an_empty_one_is_an_error(out: Path) -> None:
    run(Listed([(b"x", picture(1)), (b"y", picture(2))]), out)
    assert keys(out) == [b"x", b"y"]
    with pytest.raises(SourceError, match="no images"):
        run(Listed([]), out)


def test_more_than_256_classes_lie_in_a_file_of_their_own(tmp_path: Path, out: Path) -> None:
    small = picture(0)
    raw = write(tmp_path / "raw", {f"class {c:03d}/0.png": small for c in range(257)})
    run(raw, out, rows=1000)
    assert set(index_of(out)["classes"]) == {"file"}
    assert Reader(out).classes == tuple(f"class {c:03d}" for c in range(257))
    assert Reader(out).column("label").tolist() == list(range(257))


def test_names_that_are_no_utf8_survive_in_classes_keys_and_rejects(tmp_path: Path, out: Path) -> None:
    raw = os.fsencode(tmp_path / "raw")
    folder = os.path.join(raw, b"caf\xe9")
    os.makedirs(folder)
    for name, data in ((b"\xff one.png", picture(1)), (b"\xfe bad.png", BROKEN)):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)
    report = run(tmp_path / "raw", out, max_rejects=1)
    assert keys(out) == [b"caf\xe9/\xff one.png"]
    assert Reader(out).classes == (os.fsdecode(b"caf\xe9"),)
    assert report.rejects_file is not None
    (line,) = Path(report.rejects_file).read_bytes().splitlines()
    assert json.loads(line)["key"] == {"bytes": "caf%E9/%FE%20bad.png"}
    assert dataset(out) == fresh(tmp_path / "raw", max_rejects=1)
    assert run(tmp_path / "raw", out, max_rejects=1).decoded == 0


def test_the_index_says_nothing_of_this_machine_or_this_run(raw: Path, out: Path, tmp_path: Path) -> None:
    run(raw, out, max_rejects="7%")
    text = (out / "index.json").read_text()
    for word in (str(tmp_path), str(raw), f'"{socket.gethostname()}"', "workers", "max_rejects", "engine", '"7%"', '"pid"', "time", "date"):
        assert word not in text, word


def test_raw_is_never_written(raw: Path, out: Path) -> None:
    write(raw, {"cat/broken.png": BROKEN})
    before = snapshot(raw)
    with pytest.raises(DecodeError):
        run(raw, out)
    run(raw, out, max_rejects=1)
    run(raw, out, max_rejects=1)
    assert snapshot(raw) == before


def test_progress_is_told_in_stages_and_ends_with_all_items_settled(raw: Path, out: Path) -> None:
    write(raw, {"cat/broken.png": BROKEN})
    told: list[Progress] = []
    run(raw, out, max_rejects=1, progress=told.append)
    assert [s for i, s in enumerate(p.stage for p in told) if i == 0 or s != told[i - 1].stage][-2:] == ["build", "publish"]
    last = [p for p in told if p.stage == "build"][-1]
    assert (last.done, last.total, last.rejects) == (13, 13, 1)


# ---------------------------------------------------------------- rebuilds


def settled(out: Path) -> set[str]:
    """What lies in .build between runs."""
    return {str(p.relative_to(out / ".build")) for p in (out / ".build").rglob("*")}


def test_a_rerun_keeps_every_shard_and_touches_none(raw: Path, out: Path) -> None:
    age(raw)
    run(raw, out)
    before, bytes_before = shard_stats(out), dataset(out)
    report = run(raw, out)
    assert (report.kept, report.decoded, report.copied, report.changed) == (12, 0, 0, ())
    assert shard_stats(out) == before
    assert dataset(out) == bytes_before
    assert settled(out) <= {"lock", "seals", "tmp", "settings.json", "stat-cache"}


def add_near_the_front(raw: Path) -> int:
    write(raw, {"cat/00.png": picture(77)})
    return 1


def change(raw: Path) -> int:
    write(raw, {"cat/0.png": picture(78), "dog/deep/2.png": picture(79)})
    return 2


def rename_file(raw: Path) -> int:
    (raw / "cat" / "0.png").rename(raw / "dog" / "zzz.png")
    return 0


def rename_class(raw: Path) -> int:
    (raw / "cat").rename(raw / "zebra")
    return 0


def add_class(raw: Path) -> int:
    write(raw, {"bird/0.png": picture(80)})
    return 1


def remove(raw: Path) -> int:
    (raw / "cat" / "0.png").unlink()
    (raw / "dog" / "4.png").unlink()
    return 0


def swap(raw: Path) -> int:
    one, two = raw / "cat" / "0.png", raw / "cat" / "4.png"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    return 0


def copy_under_another_extension(raw: Path) -> int:
    (raw / "dog" / "copy.jpg").write_bytes((raw / "cat" / "0.png").read_bytes())
    (raw / "cat" / "1.jpg").rename(raw / "cat" / "1.png")
    return 0


def flatten(raw: Path) -> int:
    for path in [p for p in raw.rglob("*") if p.is_file()]:
        path.rename(raw / f"{path.parent.name}-{path.name}")
    for folder in sorted((p for p in raw.rglob("*") if p.is_dir()), reverse=True):
        folder.rmdir()
    return 0


@pytest.mark.parametrize(
    "how", [add_near_the_front, change, rename_file, rename_class, add_class, remove, swap, copy_under_another_extension, flatten]
)
@pytest.mark.parametrize("old", [False, True])
def test_a_rebuild_ends_with_the_bytes_of_a_clean_build_and_decodes_only_what_is_new(raw: Path, out: Path, how: Any, old: bool) -> None:
    if old:
        age(raw)
    run(raw, out)
    new = how(raw)
    report = run(raw, out)
    assert report.decoded == new
    assert report.decoded + report.copied + report.kept == report.samples
    assert dataset(out) == fresh(raw)
    again = run(raw, out)
    assert (again.kept, again.decoded, again.copied) == (report.samples, 0, 0)


def test_after_a_rename_of_a_class_the_image_shards_of_others_stay(tmp_path: Path, out: Path) -> None:
    raw = make_raw(tmp_path / "raw", per_class=9, classes=("a", "m", "z"))
    run(raw, out)
    before = {p.name: p.stat().st_ino for p in (out / "shards").glob("image-*")}
    (raw / "z").rename(raw / "zz")
    run(raw, out)
    after = {p.name: p.stat().st_ino for p in (out / "shards").glob("image-*")}
    same = [name for name in before if before[name] == after.get(name)]
    assert len(same) >= len(before) // 2


def test_a_file_that_changed_within_one_tick_of_its_clock_is_read_again(raw: Path, out: Path) -> None:
    path = raw / "cat" / "0.png"
    data = picture(5)
    stamp = path.stat().st_mtime_ns
    run(raw, out)
    new = picture(6)
    path.write_bytes(new[: len(data)] if len(new) >= len(data) else new)
    path.write_bytes(picture(6))
    os.utime(path, ns=(stamp, stamp))  # the size differs or not, the time does not
    assert run(raw, out).decoded == 1
    assert dataset(out) == fresh(raw)


def test_changing_a_normalisation_that_the_reader_applies_decodes_nothing(raw: Path, out: Path) -> None:
    run(raw, out)
    before = shard_stats(out)
    preprocess = replace(SMALL, normalize=Normalize((0.1, 0.2, 0.3), (1.0, 2.0, 3.0)))
    report = run(raw, out, preprocess)
    assert (report.kept, report.decoded, report.copied) == (12, 0, 0)
    assert len(report.changed) == 1
    assert report.changed[0].startswith("normalize: None -> ")
    assert shard_stats(out) == before
    assert dataset(out) == fresh(raw, preprocess)


def test_other_settings_are_named_and_only_rows_that_fit_are_used(raw: Path, out: Path) -> None:
    run(raw, out)
    old = dataset(out)
    report = run(raw, out, replace(SMALL, crop=6))
    assert report.changed == ("crop: 8 -> 6",)
    assert (report.decoded, report.copied, report.kept) == (12, 0, 0)
    assert dataset(out) == fresh(raw, replace(SMALL, crop=6))
    # the first generation is still there, and its rows are used when one goes back
    report = run(raw, out)
    assert (report.decoded, report.samples) == (0, 12)
    assert dataset(out) == old


def test_another_shard_size_copies_all_rows(raw: Path, out: Path) -> None:
    run(raw, out, rows=3)
    report = run(raw, out, rows=5)
    assert report.decoded == 0
    assert any(line.startswith("shard_bytes:") for line in report.changed)
    assert dataset(out) == fresh(raw, rows=5)


def use_versions(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    """Build as if these library versions were installed."""
    real = planning.versions_of
    monkeypatch.setattr(planning, "versions_of", lambda preprocess: {**real(preprocess), **found})


def test_another_library_version_stops_the_build_and_with_redecode_decodes_the_formats_it_touches(
    raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(raw, out)
    before = dataset(out)
    jpeg = planning.versions_of(SMALL)["libjpeg_turbo"]
    use_versions(monkeypatch, libjpeg_turbo="9.9")
    for dry in (True, False):
        with pytest.raises(BuildError, match=rf"6 images would be decoded again only .*libjpeg_turbo {jpeg} -> 9\.9.*--redecode") as caught:
            run(raw, out, dry_run=dry)
    assert {**caught.value.details, "pins": 0} == {"count": 6, "versions": {"libjpeg_turbo": [jpeg, "9.9"]}, "pins": 0, "redecode": True}
    assert dataset(out) == before
    report = run(raw, out, options={"redecode": True})
    assert (report.decoded, report.copied) == (6, 6)  # the JPEGs anew, the PNGs as they are
    assert any(line.startswith("versions.") for line in report.changed)
    assert dataset(out) == fresh(raw)


def test_a_default_size_is_chosen_said_and_never_changed_silently(tmp_path: Path, out: Path) -> None:
    raw = write(tmp_path / "raw", {f"{i}.png": picture(i) for i in range(3)})
    report = run(raw, out, None)
    assert report.shape == (3, 12, 10)
    assert "12x10 kept" in report.geometry
    write(raw, {"other.png": picture(9, size=(20, 30))})
    with pytest.raises(OptionError, match=r"--keep-size 12x10.*--resize 256 --crop 256") as caught:
        run(raw, out, None)
    assert caught.value.details == {"before": "--keep-size 12x10", "now": "--resize 256 --crop 256"}
    with pytest.raises(DecodeError, match="1 of 4"):
        run(raw, out, Preprocess(keep_size=(12, 10)))
    assert run(raw, out, Preprocess(keep_size=(12, 10)), max_rejects=1).samples == 3


# ---------------------------------------------------------------- bad images


@pytest.fixture
def bad(raw: Path) -> Path:
    return write(raw, {"cat/0.bad.png": BROKEN, "cat/zz.jpg": b"no image at all", "dog/empty.png": b"", "dog/cut.png": picture(3)[:-40]})


def test_all_bad_images_are_found_in_one_run_and_nothing_is_published(bad: Path, out: Path) -> None:
    with pytest.raises(DecodeError, match=r"4 of 16 images were rejected .*0 allowed") as caught:
        run(bad, out)
    details = caught.value.details
    assert (details["rejects"], details["allowed"]) == (4, 0)
    assert not (out / "index.json").exists()
    assert not (out / "generations").exists()
    lines = [json.loads(line) for line in Path(details["report"]).read_bytes().splitlines()]
    assert [line["key"] for line in lines] == ["cat/0.bad.png", "cat/zz.jpg", "dog/cut.png", "dog/empty.png"]
    assert [line["size"] for line in lines] == [(bad / line["key"]).stat().st_size for line in lines]
    assert all(len(line["source_hash"]) == 32 and line["stage"] and line["code"] and line["message"] for line in lines)
    assert details["examples"][0][0] == "cat/0.bad.png"


def test_going_on_without_them_decodes_nothing_and_equals_a_build_that_allowed_them(bad: Path, out: Path) -> None:
    with pytest.raises(DecodeError):
        run(bad, out)
    report = run(bad, out, max_rejects=4)
    assert (report.decoded, report.samples, report.rejects) == (0, 12, 4)
    assert dataset(out) == fresh(bad, max_rejects=4)
    assert report.rejects_file is not None
    assert len(Path(report.rejects_file).read_bytes().splitlines()) == 4
    assert not (out / ".build" / "rejects.jsonl").exists()
    assert images(out).tobytes() == expected(bad, SMALL, keys(out)).tobytes()
    again = run(bad, out, max_rejects=4)
    assert (again.kept, again.decoded, again.rejects) == (12, 0, 4)


def test_rerunning_after_mending_decodes_only_the_mended(bad: Path, out: Path) -> None:
    with pytest.raises(DecodeError):
        run(bad, out)
    write(bad, {"cat/0.bad.png": picture(31), "dog/empty.png": picture(32)})
    (bad / "cat" / "zz.jpg").unlink()
    (bad / "dog" / "cut.png").unlink()
    report = run(bad, out)
    assert (report.decoded, report.samples, report.rejects) == (2, 14, 0)
    assert dataset(out) == fresh(bad)


def test_more_rejects_than_before_leave_the_published_dataset_as_it_is(bad: Path, out: Path) -> None:
    run(bad, out, max_rejects=4)
    before = dataset(out)
    write(bad, {"dog/new.png": BROKEN + b"2"})
    with pytest.raises(DecodeError, match="5 of 17"):
        run(bad, out, max_rejects=4)
    assert dataset(out) == before


def test_rejects_are_remembered_by_content_and_not_decoded_again(bad: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DecodeError):
        run(bad, out)
    (bad / "cat" / "0.bad.png").rename(bad / "cat" / "renamed.png")
    monkeypatch.setattr("mmcompile.compiler.task.decode.decode", lambda *a, **k: pytest.fail("decoded"))
    run(bad, out, max_rejects=4)
    monkeypatch.undo()
    inline(monkeypatch)
    assert dataset(out) == fresh(bad, max_rejects=4)


def test_a_reject_of_what_the_dtype_cannot_hold_is_not_remembered_for_another_dtype(tmp_path: Path, out: Path) -> None:
    tiff = _float_tiff(1e6)
    raw = write(tmp_path / "raw", {"a.png": picture(1, mode="L"), "wide.tif": tiff})
    half, single = (Preprocess(crop=8, mode="gray", dtype=d, scale="none") for d in ("float16", "float32"))
    with pytest.raises(DecodeError, match="value-range"):
        run(raw, out, half)
    assert run(raw, out, single).rejects == 0
    assert dataset(out) == fresh(raw, single)


def _float_tiff(value: float) -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.full((10, 10), value, np.float32)).save(file, "TIFF")
    return file.getvalue()


def test_a_name_decides_for_tga_which_has_no_signature(tmp_path: Path, out: Path) -> None:
    tga = picture(4, "TGA")
    raw = write(tmp_path / "raw", {"a.tga": tga, "b.png": picture(1)})
    run(raw, out)
    (raw / "a.tga").rename(raw / "a.png")
    with pytest.raises(DecodeError):
        run(raw, out)
    (raw / "a.png").rename(raw / "c.tga")
    assert run(raw, out).rejects == 0
    assert dataset(out) == fresh(raw)


def test_when_all_are_rejected_nothing_can_be_published(tmp_path: Path, out: Path) -> None:
    raw = write(tmp_path / "raw", {"a.png": BROKEN, "b.png": b""})
    with pytest.raises(DecodeError, match="all 2 images were rejected"):
        run(raw, out, max_rejects="100%")
    assert not (out / "index.json").exists()


def test_a_shard_of_nothing_but_rejects_is_none_and_is_not_decoded_again(tmp_path: Path, out: Path) -> None:
    raw = write(tmp_path / "raw", {**{f"a/{i}.png": BROKEN + b"%d" % i for i in range(6)}, "b/0.png": picture(1)})
    run(raw, out, rows=1, max_rejects=6)
    assert Reader(out).table["rows"].tolist() == [1]
    again = run(raw, out, rows=1, max_rejects=6)
    assert (again.decoded, again.rejects, again.samples) == (0, 6, 1)
    assert dataset(out) == fresh(raw, rows=1, max_rejects=6)


@pytest.mark.parametrize(
    ("text", "items", "allowed"),
    [(0, 10, 0), (3, 10, 3), ("3", 10, 3), ("29%", 100, 29), ("7%", 100, 7), ("2.5%", 39, 0), ("2.5%", 40, 1), ("100%", 7, 7), ("0%", 7, 0)],
)
def test_allowed_rejects_are_a_number_or_an_exact_share_rounded_down(text: int | str, items: int, allowed: int) -> None:
    assert allowed_rejects(text, items) == allowed


@pytest.mark.parametrize("text", ["-1", -1, "101%", "-2%", "many", "%", "nan%", "inf%", "", "1.5", True, None])
def test_any_other_number_of_rejects_is_refused_before_anything_is_written(raw: Path, out: Path, text: Any) -> None:
    with pytest.raises(OptionError, match="--max-rejects"):
        run(raw, out, max_rejects=text)
    assert not out.exists()


def test_a_share_of_rejects_is_of_the_items_planned(bad: Path, out: Path) -> None:
    with pytest.raises(DecodeError, match="3 allowed"):
        run(bad, out, max_rejects="24%")
    assert run(bad, out, max_rejects="25%").rejects == 4


def test_an_error_that_nobody_foresaw_is_the_fault_of_one_file(raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mmcompile.compiler import task

    real = task.store

    def odd(pixels: Any, preprocess: Any, depth: int, *out: Any) -> Any:
        if pixels[0, 0, 0] == expected(raw, SMALL)[3][0, 0, 0]:
            raise ZeroDivisionError("oh")
        return real(pixels, preprocess, depth, *out)

    monkeypatch.setattr(task, "store", odd)
    with pytest.raises(DecodeError) as caught:
        run(raw, out)
    lines = [json.loads(line) for line in Path(caught.value.details["report"]).read_bytes().splitlines()]
    assert lines[0]["code"] == "unexpected"
    assert lines[0]["error"] == "ZeroDivisionError"
    assert "oh" not in json.dumps(lines)


# ---------------------------------------------------------------- unreadable sources


class Flaky(FolderSource):
    """A folder some of whose files cannot be read."""

    def read(self, key: bytes) -> bytes:
        if key.endswith(b"vanishes.png"):
            os.unlink(os.path.join(self.root, os.fsdecode(key)))
        if key.endswith(b"forbidden.png"):
            raise PermissionError(13, "Permission denied")
        return super().read(key)


@pytest.mark.parametrize("also_bad", [False, True])
def test_unreadable_files_are_no_rejects_all_are_named_all_else_is_sealed(raw: Path, out: Path, also_bad: bool) -> None:
    write(raw, {"cat/vanishes.png": picture(50), "dog/forbidden.png": picture(51)})
    (raw / "dog" / "dangling.png").symlink_to("nowhere")
    if also_bad:
        write(raw, {"cat/0.png": BROKEN})
    rejects = int(also_bad)
    with pytest.raises(SourceError, match="3 files could not be read") as caught:
        run(Flaky(str(raw)), out, max_rejects="100%")
    assert caught.value.details["keys"] == ["cat/vanishes.png", "dog/dangling.png", "dog/forbidden.png"]
    assert caught.value.details["rejects"] == rejects
    assert len((out / ".build" / "rejects.jsonl").read_bytes().splitlines()) == rejects
    assert not (out / "index.json").exists()
    excluded = Flaky(str(raw), exclude=("cat/vanishes.png", "dog/dangling.png", "dog/forbidden.png"))
    report = run(excluded, out, max_rejects="100%")
    assert (report.decoded, report.samples, report.rejects) == (0, 12 - rejects, rejects)
    assert dataset(out) == fresh(excluded, max_rejects="100%")


def test_a_source_that_became_unreadable_is_not_taken_from_a_seal(raw: Path, out: Path) -> None:
    write(raw, {"dog/0.bad.png": BROKEN})
    with pytest.raises(DecodeError):
        run(raw, out)
    (raw / "cat" / "0.png").unlink()
    (raw / "cat" / "0.png").symlink_to("nowhere")
    with pytest.raises(SourceError, match=r"cat/0\.png"):
        run(raw, out, max_rejects=1)


def test_a_file_that_is_readable_the_second_time_is_a_row(raw: Path, out: Path) -> None:
    class Once(FolderSource):
        def read(self, key: bytes) -> bytes:
            if key == b"cat/0.png" and not seen:
                seen.append(key)
                raise OSError(5, "Input/output error")
            return super().read(key)

    seen: list[bytes] = []
    report = run(Once(str(raw)), out)
    assert report.samples == 12
    assert dataset(out) == fresh(raw)


# ---------------------------------------------------------------- OUT


REFUSED: dict[str, dict[str, bytes]] = {
    "things of others": {"notes.txt": b"x"},
    "an index that is not ours": {"index.json": b'{"format": "other"}'},
    "an index that is no JSON": {"index.json": b"x", "else": b""},
    "shards of others": {"shards/000001.tar": b"x"},
    "a build folder of others": {".build/debug/x.o": b"x"},
    "generations of others": {"generations/one.json": b"{}"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_out_that_holds_something_else_is_refused_untouched(raw: Path, out: Path, name: str) -> None:
    write(out, REFUSED[name])
    before = snapshot(out)
    with pytest.raises(OutputExistsError, match="choose"):
        run(raw, out)
    assert snapshot(out) == before


@pytest.mark.parametrize("name", ["shards", "generations", ".build"])
@pytest.mark.parametrize("published", [False, True])
def test_a_link_in_place_of_a_folder_of_ours_is_refused_untouched(raw: Path, out: Path, tmp_path: Path, name: str, published: bool) -> None:
    if published:
        run(raw, out)
        (out / name).rename(tmp_path / "else")
    else:
        out.mkdir()
        write(tmp_path / "else", {"tmp/precious": b"x"})
    (out / name).symlink_to(tmp_path / "else")
    before = snapshot(tmp_path)
    with pytest.raises((OutputExistsError, FormatError), match="link"):
        run(raw, out)
    assert snapshot(tmp_path) == before


def test_an_out_that_is_a_file_or_a_dangling_link_is_refused(raw: Path, tmp_path: Path) -> None:
    write(tmp_path, {"file": b"x"})
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(OutputExistsError, match="not a folder"):
            run(raw, tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("where", [".", "out", "cat/out", "../link/out"])
def test_an_out_inside_raw_is_refused_and_raw_untouched(raw: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "link").symlink_to(raw)
    before = snapshot(raw)
    with pytest.raises(OutputExistsError, match="inside RAW"):
        run(raw, raw / where if ".." not in where else tmp_path / "link" / "out")
    assert snapshot(raw) == before


def test_an_empty_folder_a_linked_folder_and_leftovers_of_a_kill_are_fine(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "real", {f".index.json.{'a' * 16}.tmp": b"half", f"shards/.keys.{'b' * 16}.tmp": b"half", f".build/.lock.{'c' * 16}.tmp": b""})
    run(raw, tmp_path / "link")
    assert dataset(tmp_path / "real") == fresh(raw)
    assert not [p for p in (tmp_path / "real").rglob("*") if p.name.endswith(".tmp")]


def test_files_of_others_beside_a_published_dataset_are_left_alone(raw: Path, out: Path) -> None:
    run(raw, out)
    write(out, {"README.md": b"mine", "shards/mine.tmp": b"x", f"shards/image-{'0' * 32}.npy": b"x"})
    make_raw(raw, per_class=7, seed=900)
    run(raw, out)
    assert (out / "README.md").read_bytes() == b"mine"
    assert (out / "shards" / "mine.tmp").exists()
    assert (out / "shards" / f"image-{'0' * 32}.npy").exists()


# ---------------------------------------------------------------- two at once


def test_a_second_build_is_refused_naming_the_first(raw: Path, out: Path) -> None:
    (out / ".build").mkdir(parents=True)
    script = """
        import sys
        from mmcompile.format.lock import Lock
        with Lock(sys.argv[1]):
            print("locked", flush=True)
            sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(out / ".build" / "lock")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder.stdin, holder.stdout:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(BuildError, match=rf"another run is at work here \(process {holder.pid} on "):
            run(raw, out)
        assert not (out / "shards").exists()
        holder.kill()
        holder.wait()
    assert run(raw, out).samples == 12  # the lock of a dead process is not in the way


def test_a_build_whose_folder_was_deleted_publishes_nothing(raw: Path, out: Path) -> None:
    run(raw, out)
    before = dataset(out)
    make_raw(raw, per_class=8, seed=5)
    moments = ["plan", "build", "publish"]
    for moment in moments:

        def delete(progress: Progress, moment: str = moment) -> None:
            if progress.stage == moment or (moment == "plan" and progress.stage == "check"):
                shutil.rmtree(out / ".build", ignore_errors=True)

        with pytest.raises(BuildError, match=r"\.build was removed while the build ran"):
            run(raw, out, replace(SMALL, crop=7), progress=delete)
        assert dataset(out) == before
        assert not (out / ".build").exists() or not (out / ".build" / "seals").exists()
    run(raw, out)
    assert dataset(out) == fresh(raw)


def test_without_file_locks_a_build_needs_to_be_told(raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("mmcompile.format.lock.fcntl.flock", none)
    with pytest.raises(BuildError, match="--no-lock"):
        run(raw, out)
    assert run(raw, out, options={"lock": False}).samples == 12


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("kind", ["image", "label", "samples", "keys"])
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_damaged_files_of_the_published_dataset_are_never_copied_on(raw: Path, out: Path, kind: str, how: str) -> None:
    run(raw, out)
    (raw / "cat" / "0.png").rename(raw / "cat" / "00.png")
    (raw / "dog").rename(raw / "zebra")
    for path in sorted((out / "shards").glob(f"{kind}-*.npy")):
        data = bytearray(path.read_bytes())
        if how == "gone":
            path.unlink()
        elif how == "cut":
            path.write_bytes(data[:-1])
        else:
            data[ALIGN + (len(data) - ALIGN) // 2] ^= 4
            path.write_bytes(data)
    run(raw, out, rows=4)
    assert dataset(out) == fresh(raw, rows=4)


@pytest.mark.parametrize("how", ["flip", "cut", "empty"])
def test_a_damaged_seal_and_stat_cache_count_as_absent(bad: Path, out: Path, how: str) -> None:
    age(bad)
    with pytest.raises(DecodeError):
        run(bad, out)
    paths = [*(out / ".build" / "seals").glob("*.json"), out / ".build" / "stat-cache"]
    assert len(paths) > 3
    for path in paths:
        data = bytearray(path.read_bytes())
        if how == "flip":
            data[len(data) // 2] ^= 1
        path.write_bytes(data if how == "flip" else data[: len(data) // 2] if how == "cut" else b"")
    (out / ".build" / "settings.json").write_bytes(b"[1]")
    report = run(bad, out, max_rejects=4)
    assert report.decoded == 12
    assert dataset(out) == fresh(bad, max_rejects=4)


def test_a_sealed_file_that_is_gone_or_short_is_made_again(bad: Path, out: Path) -> None:
    with pytest.raises(DecodeError):
        run(bad, out)
    for i, kind in enumerate(("image", "label", "samples", "keys")):
        path = sorted((out / "shards").glob(f"{kind}-*.npy"))[i % 2]
        path.unlink() if i % 2 else path.write_bytes(path.read_bytes()[:-1])
    run(bad, out, max_rejects=4)
    assert dataset(out) == fresh(bad, max_rejects=4)


def test_seals_and_files_that_no_generation_names_are_removed_after_publishing(raw: Path, out: Path) -> None:
    write(raw, {"cat/bad.png": BROKEN})
    with pytest.raises(DecodeError):
        run(raw, out, replace(SMALL, crop=7))
    abandoned = {p.name for p in (out / "shards").iterdir()}
    assert abandoned
    run(raw, out, max_rejects=1)
    named = {Path(name).name for name in dataset(out) if name.startswith("shards/")}
    assert {p.name for p in (out / "shards").iterdir()} == named
    assert not list((out / ".build" / "seals").iterdir())


# ---------------------------------------------------------------- dry run, disk, options


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("published", [False, True])
def test_a_dry_run_says_what_would_be_built_and_writes_nothing(raw: Path, out: Path, tmp_path: Path, published: bool) -> None:
    if published:
        run(raw, out)
        write(raw, {"dog/new.png": picture(99)})
    before = snapshot(tmp_path)
    report = run(raw, out, dry_run=True)
    assert snapshot(tmp_path) == before
    n = 13 if published else 12
    assert (report.samples, report.classes, report.dry_run, report.generation) == (n, ("cat", "dog"), True, None)
    assert report.bytes >= n * builds.ROW_BYTES
    assert report.free_bytes is not None
    assert report.free_bytes > 0
    assert report.estimate_s is not None
    assert (report.kept > 0) == published
    json.dumps(report.to_json())


def test_too_little_space_is_said_before_anything_is_decoded(raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "free_bytes", lambda _: 100)
    monkeypatch.setattr("mmcompile.compiler.task.decode.decode", lambda *a, **k: pytest.fail("decoded"))
    with pytest.raises(BuildError, match="100 are free") as caught:
        run(raw, out)
    assert caught.value.details == {"needed": 12 * (builds.ROW_BYTES + 256), "free": 100}
    monkeypatch.setattr(driver, "free_bytes", lambda _: None)
    monkeypatch.undo()
    inline(monkeypatch)
    assert run(raw, out).samples == 12


def test_free_bytes_are_those_of_the_disk_that_out_will_be_on(tmp_path: Path) -> None:
    assert output.free_bytes(tmp_path / "not" / "yet") == output.free_bytes(tmp_path)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Any:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting is not permitted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.usefixtures("processes")
def test_a_full_disk_is_a_clear_error_and_the_next_run_goes_on(tmp_path: Path, tiny_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = make_raw(tmp_path / "raw", per_class=20)
    monkeypatch.setattr(driver, "free_bytes", lambda _: None)  # the check before the start is not what is tested here
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(820 << 10))
    with pytest.raises(BuildError, match="no space left on the device; what is finished is kept"):
        run(raw, tiny_disk / "out", workers=2)
    assert not (tiny_disk / "out" / "index.json").exists()
    sealed = len(list((tiny_disk / "out" / ".build" / "seals").glob("*.json")))
    ballast.unlink()
    report = run(raw, tiny_disk / "out", workers=2)
    assert report.decoded < 40 if sealed else report.decoded == 40
    assert dataset(tiny_disk / "out") == fresh(raw)


def test_an_out_that_cannot_be_written_is_a_build_error_naming_the_file(raw: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setattr("mmcompile.compiler.pixelrows.os.pwrite", refuse)
    with pytest.raises(BuildError, match="some/file: Permission denied"):
        run(raw, out)


@pytest.mark.parametrize(("name", "value"), [("workers", 0), ("shard_bytes", 0), ("decode_timeout_s", 0.0), ("decode_timeout_s", float("nan"))])
def test_options_check_themselves(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        BuildOptions(**{name: value})


def test_settings_that_would_not_fit_the_index_are_refused_early(raw: Path, out: Path) -> None:
    source = FolderSource(str(raw), exclude=tuple(f"{i:0200d}" for i in range(3000)))
    with pytest.raises(OptionError, match="give patterns"):
        run(source, out)


def test_a_build_into_a_relative_folder_works(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build("raw", "out", preprocess=SMALL, options=BuildOptions(workers=1, shard_bytes=600))
    assert len(Reader(tmp_path / "out")) == 12


def test_a_lock_knows_when_its_folder_was_replaced(tmp_path: Path) -> None:
    folder = tmp_path / ".build"
    folder.mkdir()
    with Lock(folder / "lock") as lock:
        assert lock.still_held()
        shutil.rmtree(folder)
        assert not lock.still_held()
        folder.mkdir()
        with Lock(folder / "lock") as other:
            assert other.still_held()
            assert not lock.still_held()


def test_the_printed_exclusion_takes_out_one_file_whatever_its_name(raw: Path, out: Path) -> None:
    write(raw, {f"cat/photo{i}.jpg": picture(90 + i, "JPEG") for i in (1, 2)})
    (raw / "cat" / "photo[1].jpg").symlink_to("gone")
    total = sum(1 for path in raw.rglob("*") if path.is_file())
    with pytest.raises(SourceError) as caught:
        run(raw, out)
    assert caught.value.details["keys"] == ["cat/photo[1].jpg"]
    (command,) = go_on(["build", "raw", "out"], caught.value.details)
    assert command[1][-2:] == ["--exclude", "cat/photo[[]1].jpg"]
    assert run(FolderSource(str(raw), exclude=(command[1][-1],)), out).samples == total


def test_a_folder_switched_while_it_is_built_is_read_again_when_it_is_back(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stat of one file is never remembered with the content of another."""
    monkeypatch.setattr(statcache, "_YOUNG_NS", 0)
    for version, seed in (("v1", 10), ("v2", 20)):
        write(tmp_path / version, {f"c/{i}.png": picture(seed + i) for i in range(4)})
    link = tmp_path / "raw"

    def point(version: str) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(version)

    point("v1")
    scanned = FolderSource(str(link)).scan()
    point("v2")

    class Switched(FolderSource):
        """Listed v1, and reads v2: the link was switched after the scan."""

        def scan(self, progress: Any = None) -> Scan:
            return scanned

    assert run(Switched(str(link)), out).decoded == 4
    point("v1")
    assert run(link, out).decoded == 4
    assert dataset(out) == fresh(link)


@pytest.mark.parametrize("kind", ["image", "label", "samples", "keys"])
def test_a_sealed_shard_that_was_damaged_is_made_again_not_published(raw: Path, out: Path, kind: str) -> None:
    write(raw, {"dog/broken.png": BROKEN})
    with pytest.raises(DecodeError):
        run(raw, out)
    victim = sorted((out / "shards").glob(f"{kind}-*"))[0]
    data = bytearray(victim.read_bytes())
    data[ALIGN] ^= 1
    victim.write_bytes(data)
    run(raw, out, max_rejects=1)
    assert dataset(out) == fresh(raw, max_rejects=1)
    assert verify(out).ok


def test_another_raw_into_the_same_out_is_warned_of(raw: Path, out: Path, tmp_path: Path) -> None:
    run(raw, out)
    old = Reader(out).generation
    assert not [w for w in run(raw, out).warnings if "replaces" in w]
    flat = write(tmp_path / "flat", {f"{i}.png": picture(i) for i in range(3)})
    (warning,) = [w for w in run(flat, out).warnings if "replaces" in w]
    assert "12 samples with labels by 3 without labels" in warning
    assert old in warning
    assert len(Reader(out, generation=old)) == 12


def test_what_a_worker_has_to_load_is_loaded_before_a_file_is_in_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else loading torch on a slow disk would be taken for a picture that takes too long."""
    seen: list[str] = []
    take = task.Hand.take
    monkeypatch.setattr(task, "warm_up", lambda preprocess: seen.append("loaded"))
    monkeypatch.setattr(task.Hand, "take", lambda self, item: (seen.append("taken"), take(self, item))[1])
    inline(monkeypatch)
    run(make_raw(tmp_path / "raw", 2), tmp_path / "out")
    assert (seen[0], seen.count("taken")) == ("loaded", 4)


@dataclass(frozen=True)
class Strange(FolderSource):
    """A source of somebody's own, with a split that cannot be called so."""

    def scan(self, progress: Any = None) -> Scan:
        scan = super().scan(progress)
        return replace(scan, splits=(Split("../x", 0, len(scan.keys)),))


def test_splits_of_a_source_of_ones_own_are_held_against_the_same_rule(tmp_path: Path) -> None:
    make_raw(tmp_path / "raw")
    with pytest.raises(SourceError, match=r"raw: '\.\./x' is no name of a split"):
        run(Strange(str(tmp_path / "raw")), tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()
