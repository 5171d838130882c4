"""TIFF beyond what Pillow's modes hold: this module decides how pages of any number type and any number of channels become arrays.

The structure is read here, and what is compressed is unpacked by Pillow's libtiff: it gets the same strips or tiles under a header that calls their
bytes grey, so that no second TIFF library decides about pixels.  Every offset and size is checked against the file before it is used.
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmcompile.compiler.decode.stored import Stored, check_bytes
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

__all__ = ["Page", "declared", "is_tiff", "pages", "pixels", "stored"]

_Pixels = npt.NDArray[Any]

_SIGNATURES = {b"II*\0": ("<", False), b"MM\0*": (">", False), b"II+\0": ("<", True), b"MM\0+": (">", True)}
#: struct letters of the field types of whole numbers, and their bytes.
_TYPES = {1: ("B", 1), 3: ("H", 2), 4: ("I", 4), 13: ("I", 4), 16: ("Q", 8), 18: ("Q", 8), 7: ("B", 1)}
_KINDS = {1: "u", 2: "i", 3: "f", 4: "u"}
_SUBFILE, _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER = 254, 256, 257, 258, 259, 262, 266
_OFFSETS, _ORIENTATION, _SAMPLES, _ROWS, _COUNTS, _PLANAR, _PREDICTOR = 273, 274, 277, 278, 279, 284, 317
_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_COUNTS, _EXTRA, _FORMAT, _TABLES, _SUBSAMPLING = 322, 323, 324, 325, 338, 339, 347, 530
_NEEDED = {_SUBFILE, _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER, _OFFSETS, _ORIENTATION, _SAMPLES, _ROWS, _COUNTS, _PLANAR}
_NEEDED |= {_PREDICTOR, _TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_COUNTS, _EXTRA, _FORMAT, _TABLES, _SUBSAMPLING}
_JPEG = 7
#: What a reject calls a compression.
_NAMES = {
    **dict.fromkeys((2, 3, 4), "CCITT"),
    5: "LZW",
    6: "old JPEG",
    7: "JPEG",
    **dict.fromkeys((8, 32946), "deflate"),
    32773: "PackBits",
    33003: "JPEG 2000",
    33005: "JPEG 2000",
    34712: "JPEG 2000",
    34887: "LERC",
    34925: "LZMA",
    50000: "Zstandard",
    50001: "WebP",
    50002: "JPEG XL",
    52546: "JPEG XL",
}
_ICC = 34675
#: What the channel behind the colours is: transparency that they have been multiplied by, or not.
_MULTIPLIED, _APART = 1, 2
#: A reduced version of another page.
_REDUCED = 1
_MAX_TAGS = 4096
#: A tile may be larger than its picture, but not if it is larger than this, too.
_TILE_BYTES = 1 << 26


@dataclass(frozen=True)
class Page:
    """A page: its size, `channels` of `dtype` (the file's byte order), and where its strips or tiles lie."""

    width: int
    height: int
    channels: int
    dtype: np.dtype[Any]
    photometric: int
    extra: tuple[int, ...]
    orientation: int
    planar: bool
    compression: int
    predictor: int
    #: (rows, columns) of a strip or tile.
    block: tuple[int, int]
    tiled: bool
    offsets: tuple[int, ...]
    counts: tuple[int, ...]
    tags: dict[int, tuple[int, ...]] = field(repr=False)


def is_tiff(data: bytes) -> bool:
    return data[:4] in _SIGNATURES


def declared(image: Image.Image) -> tuple[int, int, int]:
    """(bits of a value, channels, photometric) that an opened TIFF declares; (0, 0, 0) where it is too odd to tell."""
    try:
        tags: Any = image.tag_v2  # type: ignore[attr-defined]
        bits, channels, photometric = max(tags.get(_BITS, (1,))), int(tags.get(_SAMPLES, 1)), int(tags.get(_PHOTOMETRIC, 1))
    except MemoryError:
        raise
    except Exception:
        return 0, 0, 0
    return int(bits), channels, photometric


def pages(data: bytes) -> Iterator[Page]:
    """The pages in file order, without reduced versions of others.  Raises DecodeError where the structure is damaged or no kind that is read."""
    order, big = _SIGNATURES[data[:4]]
    at = _unpack(data, order + ("Q" if big else "I"), 8 if big else 4)
    seen = set()
    while at:
        if at in seen:
            raise DecodeError("a damaged TIFF: its list of pages comes back to one that was before", stage="open", code="corrupt")
        seen.add(at)
        tags, at = _directory(data, at, order, big)
        if not _one(tags, _SUBFILE, 0) & _REDUCED:
            yield _page(tags, order, len(data))


def _unpack(data: bytes, code: str, at: int) -> int:
    try:
        return int(struct.unpack_from(code, data, at)[0])
    except struct.error as error:
        raise DecodeError("the file ends before the TIFF header does", stage="open", code="truncated", error="error") from error


def _directory(data: bytes, at: int, order: str, big: bool) -> tuple[dict[int, tuple[int, ...]], int]:
    """(the tags that matter, where the next directory is or 0)."""
    count = _unpack(data, order + ("Q" if big else "H"), at)
    at, size, inline = at + (8 if big else 2), 20 if big else 12, 8 if big else 4
    if count > _MAX_TAGS:
        raise DecodeError(f"a damaged TIFF: a directory of {count} entries, at most {_MAX_TAGS} are read", stage="open", code="corrupt")
    tags: dict[int, tuple[int, ...]] = {}
    for entry in range(at, at + count * size, size):
        tag, kind = _unpack(data, order + "H", entry), _unpack(data, order + "H", entry + 2)
        number = _unpack(data, order + ("Q" if big else "I"), entry + 4)
        if tag == _ICC:
            tags[tag] = (number,)
        if tag not in _NEEDED or kind not in _TYPES:
            continue
        letter, width = _TYPES[kind]
        where = entry + 4 + inline
        if number * width > inline:
            where = _unpack(data, order + ("Q" if big else "I"), where)
        if where + number * width > len(data):
            raise DecodeError("the file ends before the TIFF header does", stage="open", code="truncated")
        tags[tag] = struct.unpack_from(f"{order}{number}{letter}", data, where)
    return tags, _unpack(data, order + ("Q" if big else "I"), at + count * size)


def _one(tags: dict[int, tuple[int, ...]], tag: int, default: int) -> int:
    return (tags.get(tag) or (default,))[0]


def _page(tags: dict[int, tuple[int, ...]], order: str, nbytes: int) -> Page:
    width, height, channels = _one(tags, _WIDTH, 0), _one(tags, _HEIGHT, 0), _one(tags, _SAMPLES, 1)
    bits, formats = set(tags.get(_BITS, (1,))), set(tags.get(_FORMAT, (1,)))
    if width < 1 or height < 1 or channels < 1:
        raise DecodeError(f"a picture of {width}x{height} with {channels} channels has no pixels", stage="open", code="not-an-image")
    if len(bits) != 1 or len(formats) != 1:
        raise DecodeError("a TIFF whose channels differ in type, which is not read: save all channels with one", stage="open", code="unsupported")
    (depth,), (kind,) = bits, formats
    if depth not in (8, 16, 32, 64) or kind not in _KINDS or (kind == 3 and depth == 8):
        raise DecodeError(f"a TIFF of {depth}-bit values (sample format {kind}), a kind that is not read", stage="open", code="unsupported")
    photometric = _one(tags, _PHOTOMETRIC, 1)
    compression = _one(tags, _COMPRESSION, 1)
    if photometric == 6 and compression != _JPEG:
        raise DecodeError("a TIFF of YCbCr values outside JPEG, a kind that is not read", stage="open", code="unsupported")
    tiled = _TILE_OFFSETS in tags
    rows = _one(tags, _TILE_HEIGHT, 0) if tiled else min(_one(tags, _ROWS, height), height)
    columns = _one(tags, _TILE_WIDTH, 0) if tiled else width
    offsets, counts = tags.get(_TILE_OFFSETS if tiled else _OFFSETS, ()), tags.get(_TILE_COUNTS if tiled else _COUNTS, ())
    planar = _one(tags, _PLANAR, 1) == 2 and channels > 1
    if rows < 1 or columns < 1 or (tiled and (rows > 2 * height + 4096 or columns > 2 * width + 4096)):
        raise DecodeError(
            f"a damaged TIFF: its strips or tiles are said to be of {columns}x{rows} pixels, the picture is {width}x{height}",
            stage="open",
            code="corrupt",
        )
    if tiled and rows * columns * channels * depth // 8 > max(_TILE_BYTES, 2 * width * height * channels * depth // 8):
        raise DecodeError(
            f"a damaged TIFF: its tiles are said to be of {columns}x{rows} pixels, the picture is {width}x{height}", stage="open", code="corrupt"
        )
    blocks = -(-height // rows) * -(-width // columns) * (channels if planar else 1)
    if len(offsets) == 1 and not counts and compression == 1:
        counts = (width * height * channels * depth // 8,)
    if len(offsets) != blocks or len(counts) != blocks:
        raise DecodeError(
            f"a damaged TIFF: expected the places and sizes of {blocks} strips or tiles, found {len(offsets)} places and {len(counts)} sizes",
            stage="open",
            code="corrupt",
        )
    if any(o + c > nbytes or not c for o, c in zip(offsets, counts, strict=True)):
        raise DecodeError("the file ends before the TIFF data does", stage="load", code="truncated")
    orientation = _one(tags, _ORIENTATION, 1)
    return Page(
        width=width,
        height=height,
        channels=channels,
        dtype=np.dtype(f"{order}{_KINDS[kind]}{depth // 8}"),
        photometric=photometric,
        extra=tags.get(_EXTRA, ()),
        orientation=orientation if 1 <= orientation <= 8 else 1,
        planar=planar,
        compression=compression,
        predictor=_one(tags, _PREDICTOR, 1) if compression not in (1, _JPEG) else 1,
        block=(rows, columns),
        tiled=tiled,
        offsets=offsets,
        counts=counts,
        tags=tags,
    )


def stored(data: bytes, options: Preprocess) -> Stored:
    """The first page of a TIFF as it holds its values.  Raises DecodeError."""
    several = pages(data)
    page = next(several, None)
    if page is None:
        raise DecodeError("a TIFF without a page", stage="open", code="not-an-image")
    check_bytes(page.width * page.height * page.channels, page.dtype.itemsize, options)
    colours = {0: 1, 1: 1, 2: 3, 6: 3}.get(page.photometric, 0)
    behind, clear = page.channels - colours, page.extra[:1] in ((_MULTIPLIED,), (_APART,))
    if behind < 0 or (colours == 1 and behind and not clear):
        colours = 0  # many greys
    alpha = bool(colours) and behind > 0 and clear
    codes = {"icc-ignored"} if _ICC in page.tags else set()
    with contextlib.suppress(DecodeError):  # a damaged page behind the first is no business of ours
        if next(several, None) is not None:
            codes.add("more-frames")

    def load() -> _Pixels:
        made = pixels(data, page)
        return _divided(made, colours) if alpha and page.extra[0] == _MULTIPLIED else made

    return Stored(
        format="TIFF",
        width=page.width,
        height=page.height,
        channels=page.channels,
        dtype=page.dtype.newbyteorder("="),
        colours=colours,
        alpha=alpha,
        load=load,
        orientation=page.orientation,
        turns=True,
        codes=frozenset(codes),
    )


def _divided(values: _Pixels, colours: int) -> _Pixels:
    """(H, W, C) whose colours were multiplied by the transparency behind them, as if they had not been."""
    full = 1.0 if values.dtype.kind == "f" else float(np.iinfo(values.dtype).max)
    alpha = values[:, :, colours, None].astype(np.float64)
    made = np.divide(values[:, :, :colours] * full, alpha, out=np.zeros((*values.shape[:2], colours)), where=alpha > 0)
    apart = made if full == 1.0 else np.clip(np.rint(made), np.iinfo(values.dtype).min, full)
    return np.concatenate([apart.astype(values.dtype), values[:, :, colours:]], axis=2)


def pixels(data: bytes, page: Page) -> _Pixels:
    """(H, W, C) of a page, in its own byte order; black is 0 where 8 bits say that white is.  Raises DecodeError."""
    planes = page.channels if page.planar else 1
    inside = page.channels // planes
    each = len(page.offsets) // planes
    made = [_plane(data, page, slice(k * each, (k + 1) * each), inside) for k in range(planes)]
    whole = made[0] if planes == 1 else np.concatenate(made, axis=2)
    # Deeper greys stay as they are stored, as Pillow leaves those that it reads.
    return 255 - whole if page.photometric == 0 and page.dtype == np.uint8 else whole


def _plane(data: bytes, page: Page, which: slice, channels: int) -> _Pixels:
    """(H, W, channels) of some of the pieces."""
    (rows, columns), width = page.block, page.dtype.itemsize * channels
    across, down = -(-page.width // columns), -(-page.height // rows)
    if page.compression == _JPEG:
        return _jpeg(data, page, which, channels)
    if page.compression == 1:
        if page.tiled and min(page.counts[which]) < rows * columns * width:  # before there is memory for what tiles promise
            raise DecodeError("the file ends before the TIFF data does", stage="load", code="truncated")
        flat = np.zeros((down * rows if page.tiled else page.height, across * columns * width), np.uint8)
        for k, (at, count) in enumerate(zip(page.offsets[which], page.counts[which], strict=True)):
            top, left = k // across * rows, k % across * columns * width
            part = flat[top : top + rows, left : left + columns * width]
            if count < part.size:
                raise DecodeError("the file ends before the TIFF data does", stage="load", code="truncated")
            part[...] = np.frombuffer(data, np.uint8, part.size, at).reshape(part.shape)
    else:
        flat = _unpacked(data, page, which, (page.height, across * columns * width))
    values = _undone(flat, page, channels)
    return values[: page.height, : page.width]


def _undone(flat: npt.NDArray[np.uint8], page: Page, channels: int) -> _Pixels:
    """(H, W padded to pieces, channels) of rows of bytes, with the differences of the predictor added up."""
    rows, columns = len(flat), page.block[1]
    if page.predictor == 1:
        return flat.view(page.dtype).reshape(rows, -1, channels)
    if page.predictor == 2:
        whole = flat.view(np.dtype(f"{page.dtype.byteorder}u{page.dtype.itemsize}"))
        sums = np.cumsum(whole.reshape(rows, -1, columns, channels), axis=2, dtype=whole.dtype.newbyteorder("="))
        made: _Pixels = sums.reshape(rows, -1, channels).view(page.dtype.newbyteorder("="))
        return made
    if page.predictor == 3 and page.dtype.kind == "f":
        size = page.dtype.itemsize
        sums = np.cumsum(flat.reshape(rows, -1, columns * size, channels), axis=2, dtype=np.uint8).reshape(rows, -1, size, columns * channels)
        # The highest bytes of a row lie together in front.
        together = np.ascontiguousarray(sums.swapaxes(2, 3)).view(f">f{size}")
        return together.reshape(rows, -1, channels)
    raise DecodeError(f"a TIFF with predictor {page.predictor}, which is not read", stage="load", code="unsupported")


def _unpacked(data: bytes, page: Page, which: slice, shape: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Rows of bytes (H, bytes of a row)."""
    height, row = shape
    tags = {_WIDTH: row, _HEIGHT: height, _BITS: 8, _COMPRESSION: page.compression, _PHOTOMETRIC: 1, _SAMPLES: 1}
    tags |= {_FILL_ORDER: _one(page.tags, _FILL_ORDER, 1)}
    bytes_of = page.dtype.itemsize * (1 if page.planar else page.channels)
    tags |= {_TILE_WIDTH: page.block[1] * bytes_of, _TILE_HEIGHT: page.block[0]} if page.tiled else {_ROWS: page.block[0]}
    return _by_libtiff(data, page, which, tags, b"").reshape(shape)


def _jpeg(data: bytes, page: Page, which: slice, channels: int) -> _Pixels:
    if page.dtype != np.uint8 or channels not in (1, 3):
        raise DecodeError(f"JPEG data of {channels} channels of {page.dtype.name} in a TIFF, which is not read", stage="load", code="unsupported")
    tags = {_WIDTH: page.width, _HEIGHT: page.height, _BITS: 8, _COMPRESSION: _JPEG, _SAMPLES: channels}
    tags |= {_TILE_WIDTH: page.block[1], _TILE_HEIGHT: page.block[0]} if page.tiled else {_ROWS: page.block[0]}
    tags[_PHOTOMETRIC] = page.photometric if channels == 3 else 1
    if channels == 3 and (sampling := page.tags.get(_SUBSAMPLING)) is not None and len(sampling) == 2:
        tags[_SUBSAMPLING] = sampling[0] | sampling[1] << 16  # two shorts in one field
    made = _by_libtiff(data, page, which, tags, bytes(page.tags.get(_TABLES, ())))
    return made.reshape(page.height, page.width, channels)


def _by_libtiff(data: bytes, page: Page, which: slice, tags: dict[int, int], tables: bytes) -> npt.NDArray[np.uint8]:
    """What Pillow makes of these pieces of the file under a header of ours with these tags; `tables` of JPEG data."""
    file = _with_header(data, page, which, tags, tables)
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None  # it counts bytes as pixels here; ours were counted
    try:
        with Image.open(io.BytesIO(file), formats=["TIFF"]) as image:
            return np.array(image)
    except MemoryError:
        raise
    except Exception as error:
        name = _NAMES.get(page.compression, str(page.compression))
        what = f"{name} data in a TIFF that Pillow's libtiff cannot decode: damaged, or a kind that it was built without"
        raise DecodeError(what, stage="load", code="corrupt") from error
    finally:
        Image.MAX_IMAGE_PIXELS = before


def _with_header(data: bytes, page: Page, which: slice, tags: dict[int, int], tables: bytes) -> bytes:
    offsets, counts = page.offsets[which], page.counts[which]
    n = len(offsets)
    entries = len(tags) + 2 + bool(tables)
    start = 8 + 2 + 12 * entries + 4
    lists = start + 8 * n
    head = lists + len(tables)
    names = (_TILE_OFFSETS, _TILE_COUNTS) if page.tiled else (_OFFSETS, _COUNTS)
    fields = [(tag, 4, 1, struct.pack("<I", value)) for tag, value in tags.items() if tag != _SUBSAMPLING]
    fields += [(_SUBSAMPLING, 3, 2, struct.pack("<I", tags[_SUBSAMPLING]))] if _SUBSAMPLING in tags else []
    if tables:
        fields.append((_TABLES, 7, len(tables), struct.pack("<I", lists) if len(tables) > 4 else tables.ljust(4, b"\0")))
    lowest, highest = min(offsets), max(o + c for o, c in zip(offsets, counts, strict=True))
    if highest - lowest + head > 0xFFFFFFFF:
        raise DecodeError("more than 4 GiB of compressed data in a TIFF, which is not read", stage="load", code="unsupported")
    moved = struct.pack(f"<{n}I", *(o - lowest + head for o in offsets))
    sizes = struct.pack(f"<{n}I", *counts)
    for tag, at, packed in ((names[0], start, moved), (names[1], start + 4 * n, sizes)):
        fields.append((tag, 4, n, packed if n == 1 else struct.pack("<I", at)))
    made = b"".join(struct.pack("<HHI", tag, kind, count) + value for tag, kind, count, value in sorted(fields))
    return b"".join((b"II*\0", struct.pack("<IH", 8, entries), made, bytes(4), moved, sizes, tables, memoryview(data)[lowest:highest]))
