"""Every file of the corpus against its reference value (see the corpus' README): MMCOMPILE_CORPUS names its folder."""

import csv
import importlib.util
import multiprocessing
import os
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from urllib.parse import unquote_to_bytes

import numpy as np
import PIL
import pytest
import xxhash

from mmcompile.compiler import resample
from mmcompile.compiler.decode import EXTENSIONS, Decoded, decode, initialise, probe, sniff
from mmcompile.compiler.formats import extension
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

CORPUS = os.environ.get("MMCOMPILE_CORPUS")
if not CORPUS:
    pytest.skip("MMCOMPILE_CORPUS does not name an assembled corpus", allow_module_level=True)
TABLE = Path(os.environ.get("MMCOMPILE_CORPUS_TABLE") or Path(CORPUS) / "reference.csv")

SIZE = {"resize": 256, "crop": 224}
PILLOW = {**SIZE, "resampler": "pillow"}
PRESETS = {
    "faithful": Preprocess(**PILLOW),
    "compat": Preprocess(**SIZE, compat="torchvision"),
    "torch": Preprocess(**SIZE),
    "black": Preprocess(**PILLOW, alpha="black"),
    "drop": Preprocess(**PILLOW, alpha="drop"),
    "icc": Preprocess(**PILLOW, alpha="drop", icc="srgb"),
    "clip": Preprocess(**PILLOW, depth16="clip"),
    "scale": Preprocess(**PILLOW, depth16="scale"),
}
#: What is recorded of sources of 16 bits a channel that Pillow opens in a mode of 8.
DEEP = {"LA": ("I;16x2",), "RGB": ("I;16x3",), "RGBA": ("I;16x4",), "RGBX": ("I;16x4",), "CMYK": ("I;16x4",)}
#: A limit of ours is the right answer to a picture that would become huge.
LIMITS = {"pixel-limit", "aspect-limit"}


def expected(row):
    """(preset, column) of every value that this row has."""
    deep = row["mode"] in ("I", "F") or row["mode"].startswith("I;16")
    compat = ("compat", "out_noexif" if row["out_noexif"] else "out")
    if deep:
        return [("clip", "out_white" if row["out_white"] else "out"), compat, *([("scale", "out_16")] if row["out_16"] else [])]
    pairs = [("faithful", "out_white" if row["out_white"] else "out"), compat]
    for preset, column in (("black", "out_black"), ("icc", "out_icc")):
        if row[column]:
            pairs.append((preset, column))
    if row["out_white"]:
        pairs.append(("drop", "out"))
    return pairs


class Examined:
    """One file: facts that were checked, and those that are not as the reference says."""

    def __init__(self, row):
        self.row = row
        raw = unquote_to_bytes(row["path"])
        self.name = os.fsdecode(raw)
        self.data = Path(os.fsdecode(os.path.join(os.fsencode(CORPUS), raw))).read_bytes()
        self.checked = Counter()
        self.wrong = []

    def check(self, fact, is_so, *found):
        self.checked[fact] += 1
        if not is_so:
            self.wrong.append((fact, self.row["path"], self.row["format"], self.row["mode"], *map(str, found)))

    def decoded(self, preset):
        try:
            found = decode(self.data, self.name, PRESETS[preset])
        except DecodeError as error:
            found = error
        if isinstance(found, DecodeError):
            self.check("rejects are in our words", {"stage", "code"} <= set(found.details) and self.row["path"] not in str(found), found)
        return found

    def all(self):
        self.check("the bytes are those of the table", xxhash.xxh64(self.data).hexdigest() == self.row["src_xxh64"])
        ext = extension(self.name)
        if ext not in EXTENSIONS and not (ext == "" and sniff(self.data[:32])):
            self.check("left out", True)
        elif self.row["outcome"] == "refused":
            self.refused()
        elif self.row["outcome"] in ("ok", "huge"):
            self.values()
        return self.checked, self.wrong

    def heif(self):
        found = self.decoded("faithful")
        code = found.details["code"] if isinstance(found, DecodeError) else None
        self.check("heif", (code == "needs-extra") == (importlib.util.find_spec("pillow_heif") is None), code)

    def refused(self):
        if sniff(self.data[:32]) == "HEIF":  # Pillow, whose word the table has, reads none
            self.heif()
            return
        for preset in ("faithful", "compat"):
            found = self.decoded(preset)
            self.check("refused", isinstance(found, DecodeError))
            if isinstance(found, DecodeError) and found.details.get("error"):
                self.check("refused where and by what", (found.details["stage"], found.details["error"]) == (self.row["stage"], self.row["error"]))

    def values(self):
        for preset, column in expected(self.row):
            found = self.decoded(preset)
            if isinstance(found, DecodeError):
                self.check(preset, self.row["outcome"] == "huge" and found.details["code"] in LIMITS, found, found.details)
                continue
            value = xxhash.xxh64(np.ascontiguousarray(found.pixels).tobytes()).hexdigest()
            self.check(preset, value == self.row[column], column, found.warnings)
            if preset == "faithful":
                self.provenance(found)
        found = self.decoded("torch")
        if self.row["mode"] in ("I", "F") or self.row["mode"].startswith("I;16"):
            self.check("deep", isinstance(found, DecodeError) and found.details["code"] in ("depth-16", "depth-32"), found)
        elif isinstance(found, DecodeError):
            self.check("torch", self.row["outcome"] == "huge" and found.details["code"] in LIMITS, found, found.details)
        elif self.row["grid"] and not self.row["out_white"]:
            self.grid(found)

    def grid(self, found: Decoded):
        means = found.pixels.reshape(4, 56, 4, 56, 3).astype(np.float64).mean(axis=(1, 3))
        wanted = np.frombuffer(bytes.fromhex(self.row["grid"]), np.uint8).reshape(4, 4, 3)
        tolerance = 2 if self.row["format"] in ("JPEG", "MPO") else 1
        self.check("torch", np.abs(means - wanted).max() <= tolerance, np.abs(means - wanted).max())

    def provenance(self, found: Decoded):
        row = self.row
        # The record says so where Pillow, whose mode the table has, drops the lower bits.
        mode = row["mode"] if found.mode in DEEP.get(row["mode"], ()) else found.mode
        self.check("format", (found.format, mode) == (row["format"], row["mode"]), found.format, found.mode)
        self.check("frames", ("more-frames" in found.warnings) == (int(row["frames"]) > 1), found.warnings)
        self.check("profile", ("icc-ignored" in found.warnings) == ("icc" in row["flags"].split(";")), found.warnings)
        orientation = int(row["orientation"]) if row["orientation"] in tuple("12345678") else 1
        size = (found.width, found.height)
        # Pillow turns TIFF itself: the table has the size after that and no orientation.
        if found.format == "TIFF":
            size = size if found.orientation < 5 else size[::-1]
        else:
            self.check("orientation", found.orientation == orientation, found.orientation)
        self.check("size", size == (int(row["width"]), int(row["height"])), size)
        turned = (found.height, found.width) if found.orientation >= 5 else (found.width, found.height)
        self.check("probe", probe(self.data, self.name, PRESETS["faithful"])[:2] == turned, turned)


def examine(row):
    return Examined(row).all()


def start():
    initialise()
    resample.initialise()


@pytest.fixture(scope="module")
def outcome():
    """(facts and how often each was checked, deviations by fact) over all files, by two processes."""
    if PIL.__version__.split(".")[0] != "13":
        pytest.skip(f"the reference values are Pillow 13's, here is {PIL.__version__}")
    with TABLE.open(newline="", encoding="utf-8") as table:
        rows = [row for row in csv.DictReader(table) if row["outcome"] != "env"]
    checked, wrong = Counter(), defaultdict(list)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"), initializer=start) as pool:
        for counted, deviations in pool.map(examine, rows, chunksize=8):
            checked.update(counted)
            for deviation in deviations:
                wrong[deviation[0]].append(deviation)
    return checked, wrong


FACTS = {
    "the bytes are those of the table": 1300,
    "faithful": 900,
    "compat": 900,
    "torch": 500,
    "black": 400,
    "drop": 400,
    "icc": 60,
    "clip": 20,
    "scale": 15,
    "deep": 20,
    "refused": 200,
    "heif": 10,
    "refused where and by what": 200,
    "rejects are in our words": 200,
    "format": 900,
    "frames": 900,
    "profile": 900,
    "orientation": 900,
    "size": 900,
    "probe": 900,
}


@pytest.mark.parametrize("fact", FACTS)
def test_the_corpus_is_as_the_reference_says(outcome, fact):
    checked, wrong = outcome
    assert wrong[fact] == []
    assert checked[fact] >= FACTS[fact]
