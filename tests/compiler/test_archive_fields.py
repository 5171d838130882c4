"""Members of tar archives beside the image of a sample: masks and further pictures, arrays, texts and lists, as fields of it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmcompile.compiler.preprocess import Preprocess
from mmcompile.compiler.sources.archive import ArchiveSource
from mmcompile.compiler.sources.choose import SourceOptions, open_source
from mmcompile.errors import SourceError
from mmcompile.format.reader import Reader
from mmcompile.format.rejects import load_rejects
from mmcompile.format.verify import verify
from tests.compiler.builds import dataset, inline, run
from tests.compiler.test_archive import tar


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "workers" not in request.node.name:
        inline(monkeypatch)


def png(array: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()


def ids(i: int) -> Any:
    made = np.full((16, 24), 7, np.uint8)
    made[2 : 6 + i % 3, 9:15] = (0, 255)[i % 2]
    return made


def samples(count: int, start: int = 0) -> list[tuple[str, bytes]]:
    """A picture that shows its mask, that mask, and a grey picture beside it."""
    out = []
    for i in range(start, start + count):
        out += [
            (f"{i:03}.depth.png", png(ids(i) // 2)),
            (f"{i:03}.png", png(np.stack([ids(i)] * 3, -1))),
            (f"{i:03}.seg.png", png(ids(i))),
        ]
    return out


def source(*raw: Path, **more: Any) -> ArchiveSource:
    found = open_source([str(path) for path in raw], SourceOptions(**more))
    assert isinstance(found, ArchiveSource)
    return found


def rows_of(out: Path) -> dict[str, Any]:
    reader = Reader(out)
    return {f.name: reader.gather(f.name, np.arange(len(reader))) for f in reader.index.fields}


def test_masks_and_pictures_beside_the_image_are_fields_that_move_with_it(tmp_path: Path) -> None:
    tar(tmp_path / "raw/a.tar", samples(4))
    tar(tmp_path / "raw/b.tar", samples(3, 4))
    report = run(tmp_path / "raw", tmp_path / "out", Preprocess(crop=12, fields={"depth": {"mode": "gray"}}))
    assert report.fields == ("image", "depth", "seg")
    found = {f.name: (f.meaning, f.shape) for f in Reader(tmp_path / "out").index.fields}
    assert found == {"image": ("image", (3, 12, 12)), "depth": ("image", (1, 12, 12)), "seg": ("mask", (12, 12))}
    rows = rows_of(tmp_path / "out")
    for i in range(7):
        cut = ids(i)[2:14, 6:18]
        assert np.array_equal(rows["seg"][i], cut)
        assert np.array_equal(rows["image"][i], [cut] * 3)
        assert np.array_equal(rows["depth"][i, 0], cut // 2)
    assert verify(tmp_path / "out").ok


def test_bytes_do_not_depend_on_workers_and_a_second_build_does_nothing(tmp_path: Path) -> None:
    raw = tar(tmp_path / "a.tar", samples(6))
    asked = Preprocess(crop=12)
    run(raw, tmp_path / "one", asked, rows=2)
    run(raw, tmp_path / "two", asked, rows=2, workers=2)
    assert dataset(tmp_path / "one") == dataset(tmp_path / "two")
    again = run(raw, tmp_path / "one", asked, rows=2)
    assert (again.decoded, again.copied, again.kept) == (0, 0, 6)


def test_a_member_without_a_partner_is_named_with_both_places(tmp_path: Path) -> None:
    files = samples(3)
    raw = tar(tmp_path / "a.tar", [file for file in files if file[0] != "001.seg.png"])
    with pytest.raises(SourceError, match=r"001\.depth\.png \(byte [\d,]+\) has no seg beside it, and 000\.seg\.png \(byte "):
        source(raw).scan()
    assert source(raw, exclude=("*.seg.png",)).scan().parts == (("image", "image"), ("depth", "image"))
    raw = tar(tmp_path / "b.tar", [file for file in files if file[0] != "002.png"])
    with pytest.raises(SourceError, match=r"002\.depth\.png \(byte [\d,]+\) has no image beside it, and 000\.png \(byte 1,536\)"):
        source(raw).scan()


def test_what_is_asked_for_by_name_is_taken(tmp_path: Path) -> None:
    raw = tar(tmp_path / "a.tar", samples(2))
    assert source(raw, image_column="depth.png").scan().parts == (("image", "image"),)
    assert source(raw, image_column="depth.png", columns=("seg",)).scan().parts == (("image", "image"), ("seg", "mask"))
    assert source(raw, columns=("depth",)).scan().parts == (("image", "image"), ("depth", "image"))
    scan = source(raw, fields={"depth": {"kind": "mask"}}).scan()
    assert scan.parts == (("image", "image"), ("depth", "mask"), ("seg", "mask"))
    assert (scan.keys[0], scan.keys[0].beside) == (b"000.png", (b"000.depth.png", b"000.seg.png"))


def test_dotted_names_in_folders_of_classes_are_no_fields(tmp_path: Path) -> None:
    files = [(f"{name}/2020.{day}.png", png(ids(day))) for name in ("cat", "dog") for day in range(2)]
    scan = source(tar(tmp_path / "a.tar", files)).scan()
    assert (len(scan.keys), scan.classes, scan.parts) == (4, ("cat", "dog"), (("image", "image"),))


def test_a_bad_mask_is_a_reject_that_names_its_member(tmp_path: Path) -> None:
    files = [(name, b"nothing" if name == "001.seg.png" else data) for name, data in samples(3)]
    raw = tar(tmp_path / "a.tar", files)
    report = run(raw, tmp_path / "out", Preprocess(crop=12), max_rejects=1)
    assert (report.samples, report.rejects) == (2, 1)
    (line,) = load_rejects(tmp_path / "out", Reader(tmp_path / "out").index)
    assert (line.key, line.message.partition(":")[0]) == ("001.png", "seg (001.seg.png)")
