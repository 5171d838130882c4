"""What rows tell of their sources: a SHA-256 of each where it is asked for, and keys that show no name, whatever way a dataset was made."""

from __future__ import annotations

import csv
import hashlib
import hmac
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from mmcompile import cli
from mmcompile.compiler import task
from mmcompile.compiler.driver import BuildOptions, build
from mmcompile.compiler.repair import repair
from mmcompile.compiler.sources.choose import Raw
from mmcompile.errors import DecodeError, OptionError
from mmcompile.format.index import load_index
from mmcompile.format.rejects import load_rejects
from mmcompile.format.sampletable import samples_table
from mmcompile.format.verify import verify
from mmcompile.runtime.dataset import MMapShardDataset
from tests.compiler.builds import BROKEN, ROW_BYTES, SMALL, dataset, inline, make_raw, picture, snapshot, write
from tests.compiler.test_many_fields import make

SECRET = b"0123456789abcdef of a test"


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    inline(monkeypatch)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Class folders of files whose names occur nowhere else."""
    return write(make_raw(tmp_path / "raw"), {"cat/patient-jones.png": picture(77), "dog/patient-smith.png": BROKEN})


@pytest.fixture
def secret(tmp_path: Path) -> str:
    (tmp_path / "secret.key").write_bytes(SECRET)
    return f"hash:{tmp_path / 'secret.key'}"


def run(source: Any, out: Path, preprocess: Any = SMALL, **more: Any) -> Any:
    return build(source, out, preprocess=preprocess, max_rejects=9, options=BuildOptions(workers=1, shard_bytes=3 * ROW_BYTES, **more))


def rows(out: Path) -> list[dict[str, Any]]:
    return list(samples_table(out))


def plain(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def shows(out: Path, *words: bytes) -> list[str]:
    """The files of a dataset that hold one of these words."""
    return [name for name, data in dataset(out).items() if any(word in data for word in words)]


def forbid_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task.decode, "decode", lambda *a, **k: pytest.fail("decoded"))


# ------------------------------------------------------------------ a hash that shows tampering


def test_each_row_has_the_sha256_of_its_file(raw: Path, tmp_path: Path) -> None:
    run(raw, tmp_path / "out", sha256=True)
    told = rows(tmp_path / "out")
    assert [r["sha256"] for r in told] == [hashlib.sha256((raw / r["key"]).read_bytes()).hexdigest() for r in told]
    assert verify(tmp_path / "out").ok
    run(raw, tmp_path / "without")
    assert {r["sha256"] for r in rows(tmp_path / "without")} == {None}


def test_an_item_of_several_files_has_that_of_all_of_them(tmp_path: Path) -> None:
    source = make(tmp_path / "raw")
    run(source, tmp_path / "out", None, sha256=True)
    names = [row["key"] for row in rows(tmp_path / "out")]
    files = [[(tmp_path / "raw" / name).read_bytes() for name in (key, key.replace("images", "masks"))] for key in names]
    packed = [b"".join(len(data).to_bytes(8, "little") + data for data in pair) for pair in files]
    assert [r["sha256"] for r in rows(tmp_path / "out")] == [hashlib.sha256(data).hexdigest() for data in packed]


def test_a_dataset_gets_and_loses_it_without_decoding(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(raw, tmp_path / "plain")
    run(raw, tmp_path / "with", sha256=True)
    run(raw, tmp_path / "out")
    shutil.copytree(tmp_path / "with", tmp_path / "back")
    forbid_decoding(monkeypatch)
    report = run(raw, tmp_path / "out", sha256=True)
    assert (report.decoded, report.copied, report.rejects) == (0, 13, 1)
    assert dataset(tmp_path / "out") == dataset(tmp_path / "with")
    assert run(raw, tmp_path / "out", sha256=True).kept == 13
    run(raw, tmp_path / "back")
    assert dataset(tmp_path / "back") == dataset(tmp_path / "plain")


def test_a_copied_row_takes_over_the_hash(raw: Path, tmp_path: Path) -> None:
    run(raw, tmp_path / "out", sha256=True)
    os.rename(raw / "cat", raw / "lion")
    write(raw, {"dog/new.png": picture(500)})
    report = run(raw, tmp_path / "out", sha256=True)
    assert report.decoded == 1
    run(raw, tmp_path / "clean", sha256=True)
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")


def test_a_dataset_of_a_dataset_keeps_it_and_cannot_get_it(raw: Path, tmp_path: Path) -> None:
    run(raw, tmp_path / "one", sha256=True)
    run(str(tmp_path / "one"), tmp_path / "two", None)
    assert [r["sha256"] for r in rows(tmp_path / "two")] == [r["sha256"] for r in rows(tmp_path / "one")]
    run(raw, tmp_path / "bare")
    with pytest.raises(OptionError, match="sources are not read again"):
        run(str(tmp_path / "bare"), tmp_path / "three", None, sha256=True)
    run([str(tmp_path / "one"), str(tmp_path / "bare")], tmp_path / "both", None)
    assert {r["sha256"] for r in rows(tmp_path / "both")} == {None}


def test_a_dry_run_foresees_the_bytes(raw: Path, tmp_path: Path, secret: str) -> None:
    for more in ({"sha256": True}, {"sha256": True, "keys": "hash"}, {"keys": secret}):
        foreseen = build(raw, tmp_path / "out", preprocess=SMALL, max_rejects=9, dry_run=True, options=BuildOptions(workers=1, **more))
        report = build(raw, tmp_path / "out", preprocess=SMALL, max_rejects=9, options=BuildOptions(workers=1, **more))
        again = build(raw, tmp_path / "out", preprocess=SMALL, max_rejects=9, dry_run=True, options=BuildOptions(workers=1, **more))
        assert (foreseen.decoded, report.decoded, report.rejects, again.kept) == (14, 13, 1, 13)
        assert (again.bytes, again.write_bytes) == (report.bytes, 0)
        (raw / "dog/0.png").unlink()
        shrunk = build(raw, tmp_path / "out", preprocess=SMALL, max_rejects=9, dry_run=True, options=BuildOptions(workers=1, **more))
        assert (shrunk.decoded, shrunk.copied, shrunk.rejects) == (0, 12, 1)
        write(raw, {"dog/0.png": picture(1000)})
        shutil.rmtree(tmp_path / "out")


# ------------------------------------------------------------------ keys that show no name


@pytest.mark.parametrize("how", ["hash", "secret"])
def test_no_name_of_a_file_stands_in_a_dataset(raw: Path, tmp_path: Path, secret: str, how: str) -> None:
    run(raw, tmp_path / "plain")
    assert shows(tmp_path / "plain", b"patient", b".png")
    keys = "hash" if how == "hash" else secret
    run(raw, tmp_path / "out", keys=keys)
    assert not shows(tmp_path / "out", b"patient", b".png", b".jpg", b"deep")
    names = [r["key"] for r in rows(tmp_path / "plain")]
    made = plain if how == "hash" else lambda name: hmac.new(SECRET, name.encode(), "sha256").hexdigest()[:32]
    assert [r["key"] for r in rows(tmp_path / "out")] == [made(name) for name in names]
    index = load_index(tmp_path / "out")[0]
    assert [line.key for line in load_rejects(tmp_path / "out", index)] == [made("dog/patient-smith.png")]
    assert index.key_hash == ("sha256" if how == "hash" else "hmac-sha256")
    assert SECRET not in b"".join(dataset(tmp_path / "out").values())


def test_rows_and_cuts_do_not_depend_on_how_keys_are_made(raw: Path, tmp_path: Path, secret: str) -> None:
    for name, keys in (("plain", "plain"), ("hash", "hash"), ("secret", secret)):
        run(raw, tmp_path / name, keys=keys)
    files = [sorted(name for name in dataset(tmp_path / out) if "image-" in name or "label-" in name) for out in ("plain", "hash", "secret")]
    assert files[0] == files[1] == files[2]


def test_a_row_is_found_by_its_path_or_its_key(raw: Path, tmp_path: Path, secret: str) -> None:
    run(raw, tmp_path / "plain")
    run(raw, tmp_path / "hash", keys="hash")
    run(raw, tmp_path / "secret", keys=secret)
    at = MMapShardDataset(tmp_path / "plain").find("cat/patient-jones.png")
    hashed, hidden = MMapShardDataset(tmp_path / "hash"), MMapShardDataset(tmp_path / "secret")
    assert hashed.find("cat/patient-jones.png") == hashed.find(hashed.source(at)) == at
    assert hashed.source(at) == plain("cat/patient-jones.png")
    assert hidden.find("cat/patient-jones.png", secret=SECRET) == hidden.find(hidden.source(at)) == at
    with pytest.raises(KeyError):
        hashed.find("cat/nobody.png")
    with pytest.raises(ValueError, match="give secret="):
        hidden.find("cat/patient-jones.png")
    with pytest.raises(ValueError, match="another secret"):
        hidden.find("cat/patient-jones.png", secret=b"x" * 32)
    with pytest.raises(ValueError, match="without a secret"):
        hashed.find("cat/nobody.png", secret=SECRET)
    with pytest.raises(ValueError, match="names of sources"):
        MMapShardDataset(tmp_path / "plain").find("cat/patient-jones.png", secret=SECRET)


@pytest.mark.parametrize("before", ["plain", "hash", "secret"])
@pytest.mark.parametrize("after", ["plain", "hash", "secret"])
def test_a_rebuild_has_the_bytes_of_a_clean_build(
    raw: Path, tmp_path: Path, secret: str, before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"plain": "plain", "hash": "hash", "secret": secret}
    run(raw, tmp_path / "out", keys=words[before])
    write(raw, {"dog/more.png": BROKEN + b"more"})
    os.rename(raw / "cat/0.png", raw / "cat/zero.png")
    run(raw, tmp_path / "clean", keys=words[after])
    assert run(raw, tmp_path / "out", keys=words[after]).decoded == 0
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")
    forbid_decoding(monkeypatch)
    shard = snapshot(tmp_path / "out" / "shards")
    assert run(raw, tmp_path / "out", keys=words[after]).kept == 13
    assert snapshot(tmp_path / "out" / "shards") == shard


def test_an_interrupted_build_goes_on(raw: Path, tmp_path: Path, secret: str) -> None:
    with pytest.raises(DecodeError):
        build(raw, tmp_path / "out", preprocess=SMALL, options=BuildOptions(workers=1, shard_bytes=3 * ROW_BYTES, keys=secret, sha256=True))
    report = run(raw, tmp_path / "out", keys=secret, sha256=True)
    assert (report.decoded, report.kept) == (0, 13)
    run(raw, tmp_path / "clean", keys=secret, sha256=True)
    assert dataset(tmp_path / "out") == dataset(tmp_path / "clean")


def test_a_person_is_told_the_names_of_rejects_here(raw: Path, tmp_path: Path) -> None:
    with pytest.raises(DecodeError) as caught:
        build(raw, tmp_path / "out", preprocess=SMALL, options=BuildOptions(workers=1, keys="hash"))
    assert [name for name, _ in caught.value.details["examples"]] == ["dog/patient-smith.png"]
    assert b"patient-smith" in (tmp_path / "out/.build/rejects.jsonl").read_bytes()


def test_messages_show_neither_names_nor_values(tmp_path: Path) -> None:
    source = make(tmp_path / "raw")
    write(tmp_path / "raw", {"masks/3.png": BROKEN})
    source = type(source)(source.root, source.boxes, source.form, ((1, "boxes: Jane Doe, which is no box"),))
    run(source, tmp_path / "plain", None)
    assert shows(tmp_path / "plain", b"masks/3", b"Jane Doe")
    run(source, tmp_path / "out", None, keys="hash")
    assert not shows(tmp_path / "out", b"masks/3", b"images/", b"Jane Doe")
    messages = [line.message for line in load_rejects(tmp_path / "out", load_index(tmp_path / "out")[0])]
    assert [message.partition(":")[0] for message in messages] == ["boxes", "mask"]
    first = dataset(tmp_path / "out")
    assert run(source, tmp_path / "out", None, keys="hash").kept == 3
    assert dataset(tmp_path / "out") == first


def test_patterns_are_warned_of(raw: Path, tmp_path: Path) -> None:
    report = run(Raw(str(raw), exclude=("cat/patient-jones.png",)), tmp_path / "out", keys="hash")
    assert any("--exclude" in line for line in report.warnings)
    assert not any("--exclude" in line for line in run(raw, tmp_path / "other", keys="hash").warnings)


def test_a_dataset_of_a_dataset_keeps_hashed_keys(raw: Path, tmp_path: Path, secret: str) -> None:
    run(raw, tmp_path / "plain")
    for name, keys in (("hash", "hash"), ("secret", secret)):
        run(raw, tmp_path / name, keys=keys)
        run(str(tmp_path / name), tmp_path / f"{name}2", None)
        run(str(tmp_path / name), tmp_path / f"{name}3", None, keys=keys)
        assert dataset(tmp_path / f"{name}2") == dataset(tmp_path / f"{name}3")
        assert load_index(tmp_path / f"{name}2")[0].key_hash == load_index(tmp_path / name)[0].key_hash
        assert [r["key"] for r in rows(tmp_path / f"{name}2")] == [r["key"] for r in rows(tmp_path / name)]
    assert MMapShardDataset(tmp_path / "hash2").find("cat/patient-jones.png") >= 0
    with pytest.raises(OptionError, match="hashed already"):
        run(str(tmp_path / "hash"), tmp_path / "no", None, keys=secret)
    run(str(tmp_path / "plain"), tmp_path / "later", None, keys="hash")
    assert [r["key"] for r in rows(tmp_path / "later")] == [r["key"] for r in rows(tmp_path / "hash")]
    assert not shows(tmp_path / "later", b"patient")


def test_rows_whose_names_are_hidden_stay_what_they_were(tmp_path: Path) -> None:
    files = {"cat/a.tga": picture(1, "TGA"), "cat/b.png": picture(2, "JPEG"), "dog/c.jpg": picture(3, "JPEG"), "dog/d": picture(4)}
    raw = write(tmp_path / "raw", files)
    run(raw, tmp_path / "plain")
    run(raw, tmp_path / "hash", keys="hash")
    run(str(tmp_path / "plain"), tmp_path / "of-plain", None)
    run(str(tmp_path / "hash"), tmp_path / "of-hash", None)
    shutil.copytree(tmp_path / "hash", tmp_path / "copy")
    run([str(tmp_path / "hash"), str(tmp_path / "copy")], tmp_path / "twice", None)
    told = [[(row["flags"], row["format"]) for row in rows(tmp_path / name)] for name in ("of-plain", "of-hash")]
    assert told[0] == told[1] == [("", "TGA"), ("wrong-extension", "JPEG"), ("", "JPEG"), ("", "PNG")]
    assert [row["flags"] for row in rows(tmp_path / "twice")].count("wrong-extension") == 2


def test_parts_are_made_as_they_were_planned(raw: Path, tmp_path: Path, secret: str) -> None:
    for keys in ("hash", secret):
        shared = {"shard_bytes": 3 * ROW_BYTES, "workers": 1}
        out = tmp_path / f"parts{len(keys)}"
        build(raw, out, preprocess=SMALL, options=BuildOptions(**shared, keys=keys, sha256=True, order="shuffled:3", plan_only=True))
        given = {} if keys == "hash" else {"keys": keys}
        build(raw, out, options=BuildOptions(workers=1, part="1/2", **given))
        build(raw, out, options=BuildOptions(workers=1, part="2/2", **given))
        if given:
            with pytest.raises(OptionError, match="give it with each part"):
                build(raw, out, options=BuildOptions(workers=1, part="1/2"))
        last = BuildOptions(**shared, keys=keys, sha256=True, order="shuffled:3")
        report = build(raw, out, preprocess=SMALL, max_rejects=9, options=last)
        assert (report.decoded, report.kept) == (0, 13)
        build(raw, tmp_path / f"clean{len(keys)}", preprocess=SMALL, max_rejects=9, options=last)
        assert dataset(out) == dataset(tmp_path / f"clean{len(keys)}")


# ------------------------------------------------------------------ mending


@pytest.mark.parametrize("how", ["hash", "secret"])
@pytest.mark.parametrize("kind", ["image", "label", "samples", "keys", "table", "rejects"])
def test_a_bad_file_is_mended(raw: Path, tmp_path: Path, secret: str, how: str, kind: str) -> None:
    out = tmp_path / "out"
    run(raw, out, keys="hash" if how == "hash" else secret, sha256=True)
    first = dataset(out)
    path = min((out / "shards").glob(f"{kind}-*"))
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x5A
    path.chmod(0o644)
    path.write_bytes(data)
    assert not verify(out).ok
    report = repair(out, raw, workers=1)
    if how == "secret" and kind != "image":
        assert "hashed with a secret" in report.missing[0].reason
        run(raw, tmp_path / "new", keys=secret, sha256=True)
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "new", out)
    else:
        assert report.ok, report.missing
    assert dataset(out) == first


# ------------------------------------------------------------------ the table


def test_the_table_is_the_same_as_csv_and_as_parquet(raw: Path, tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    (raw / "list.csv").write_text("image,label,age,width,who\ncat/0.png,a,3.5,7,x\ncat/1.jpg,b,4.5,8,y\ncat/patient-jones.png,a,5.5,9,x\n")
    run(Raw(str(raw / "list.csv"), columns=("age", "width", "who")), tmp_path / "out", keys="hash", sha256=True)
    for name in ("a.csv", "a.parquet"):
        done = CliRunner().invoke(cli.program, ["info", str(tmp_path / "out"), "--samples", str(tmp_path / name)])
        assert done.exit_code == 0, done.output
    with open(tmp_path / "a.csv", newline="") as file:
        read = list(csv.DictReader(file))
    made = pq.read_table(tmp_path / "a.parquet").to_pylist()
    told = rows(tmp_path / "out")
    assert made == told
    assert read == [{name: "" if value is None else str(value) for name, value in row.items()} for row in told]
    assert [(r["age"], r["value_width"], r["who"], r["class"]) for r in told] == [
        (3.5, 7, "x", "a"),
        (4.5, 8, "y", "b"),
        (5.5, 9, "x", "a"),
    ]
    assert told[2]["key"] == plain("cat/patient-jones.png")
    assert [row["shard"] for row in told] == sorted(row["shard"] for row in told)


def test_a_parquet_file_is_never_replaced_and_says_what_is_missing(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(raw, tmp_path / "out")
    (tmp_path / "there.parquet").write_bytes(b"mine")
    done = CliRunner().invoke(cli.program, ["info", str(tmp_path / "out"), "--samples", str(tmp_path / "there.parquet")])
    assert (done.exit_code, (tmp_path / "there.parquet").read_bytes()) == (2, b"mine")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    done = CliRunner().invoke(cli.program, ["info", str(tmp_path / "out"), "--samples", str(tmp_path / "new.parquet")])
    assert done.exit_code == 2
    assert "mmcompile[parquet]" in done.output
    assert not (tmp_path / "new.parquet").exists()


def test_names_that_are_no_utf8_are_told_in_parquet(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    write(tmp_path / "raw", {os.fsdecode(b"cat/caf\xe9.png"): picture(1)})
    run(tmp_path / "raw", tmp_path / "out")
    CliRunner().invoke(cli.program, ["info", str(tmp_path / "out"), "--samples", str(tmp_path / "a.parquet")])
    assert pq.read_table(tmp_path / "a.parquet")["key"].to_pylist() == ["cat/caf\\xe9.png"]


# ------------------------------------------------------------------ options


def test_a_config_of_it_makes_the_same_bytes(raw: Path, tmp_path: Path, secret: str) -> None:
    words = ["build", str(raw), str(tmp_path / "out"), "--crop", "8", "--max-rejects", "9", "--sha256", "--keys", "hash"]
    assert CliRunner().invoke(cli.program, words).exit_code == 0
    printed = CliRunner().invoke(cli.program, ["info", str(tmp_path / "out"), "--config"]).stdout
    assert {"keys": "hash", "sha256": True}.items() <= json.loads(printed).items()
    (tmp_path / "config.json").write_text(printed)
    again = ["build", str(raw), str(tmp_path / "again"), "--config", str(tmp_path / "config.json"), "--max-rejects", "9"]
    assert CliRunner().invoke(cli.program, again).exit_code == 0
    assert dataset(tmp_path / "out") == dataset(tmp_path / "again")
    run(raw, tmp_path / "secret-out", keys=secret)
    refused = CliRunner().invoke(cli.program, ["info", str(tmp_path / "secret-out"), "--config"])
    assert (refused.exit_code, "hash of the secret" in refused.output) == (2, True)


def test_what_makes_no_sense_is_refused(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    short, none = f"hash:{tmp_path / 'short'}", f"hash:{tmp_path / 'none'}"
    for keys, said in (("md5", "plain, hash or hash:FILE"), (none, "cannot be read"), (short, "16 random")):
        with pytest.raises(OptionError, match=said):
            run(raw, tmp_path / "out", keys=keys)
    for more in ({"sha256": True}, {"keys": "hash"}):
        with pytest.raises(OptionError, match="arrays and tables"):
            build({"x": np.zeros((4, 2))}, tmp_path / "out", options=BuildOptions(workers=1, **more))
    assert not (tmp_path / "out").exists()
