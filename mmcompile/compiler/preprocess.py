"""What a sample is made of: this module decides which options exist, which go together, and what each leaves on disk.

A `Preprocess` is frozen and checks itself; `resolved()` fills in what the presets decide; the settings dictionaries are what
fingerprints and the index are made of.  Nothing here looks at a pixel: that is `cast` (values to a stored row), `resample` (sizes) and
`decode` (bytes to pixels).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from mmcompile.compiler.cast import PIXEL_REVISION, channel_sums, store
from mmcompile.compiler.fieldoptions import OF_MASKS, FieldOptions, check_fill, fields_of, refuse_strange
from mmcompile.compiler.modes import channels_of
from mmcompile.compiler.normalize import IMAGENET, IMAGENET_UNIT, Normalize, check_channels, described, is_number
from mmcompile.compiler.sizes import MAX_SIDE, check_side, clash, flag, pair, typed
from mmcompile.compiler.views import Views, views_of
from mmcompile.errors import OptionError, spelled
from mmcompile.format.fields import PIXELS, Field

__all__ = ["IMAGENET", "PIXEL_REVISION", "TORCH_FILTERS", "Normalize", "Preprocess", "channel_sums", "store"]

#: Pillow's own error limit: twice the pixels of a quarter GiB of RGB.
MAX_PIXELS = 178_956_970
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "mode": ("rgb", "gray", "rgba", "keep"),
    "dtype": ("uint8", "uint16", "int16", "int32", "float16", "bfloat16", "float32", "float64"),
    "layout": ("chw", "hwc"),
    "scale": ("unit", "none"),
    "compat": (None, "torchvision"),
    "resampler": (None, "torch", "pillow"),
    "filter": ("bilinear", "bicubic", "lanczos", "box", "nearest"),
    "orientation": (None, "apply", "ignore"),
    "depth16": (None, "reject", "scale", "clip", "keep"),
    "icc": ("ignore", "srgb"),
    "frames": ("first", "error", "all"),
    "truncated": ("reject", "accept"),
    "axes": (None, "chw", "hwc"),
    "kind": ("image", "mask", "volume"),
}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
TORCH_FILTERS = ("bilinear", "bicubic")
_NEWER = frozenset({"axes", "jpeg_scaling", "transform", "transform_version", "transform_shape", "kind", "fill", "fields", "kept_channels", "views"})
_GEOMETRY = ("resize", "crop", "pad", "keep_size")
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_COLOUR = re.compile(r"#[0-9a-f]{6}")


@spelled
@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """The static part of an input pipeline; names and values are those of `mmcompile build`.

    Checked on construction: an OptionError names the options that clash, and what to do.  `None` where a preset decides (`resolved`).
    `jpeg_scaling=N` decodes large JPEGs at 1/2, 1/4 or 1/8 as long as N times the size that they are resized to remains.
    `transform="package.module:function"` is a step of your own between geometry and cast: an array (H, W, C) in, one of the same shape or of
    `transform_shape` (H, W, C) out; its code is not looked at, so change `transform_version` when it changes.
    `axes`: where `.npy` pictures with three axes have their channels, if the shape does not tell (`chw` or `hwc`).
    `fields` are settings of single fields by name, FieldOptions or dicts of them: further pictures, masks, boxes, and whatever else a sample holds.
    Pictures and masks without geometry of their own have that of the sample.
    `views=K` stores K variants of each sample, random resized crops of the whole picture to the size that `crop` says: a number, or Views.
    Volumes, which a source (or `--field image:kind=volume`, or `frames="all"` of TIFF) says they are, are cropped or padded, to N or (depth, height,
    width), and never resized: a `transform` with the shape (depth, height, width) may do that, and gets them whole where no geometry is asked for.
    `keep_size` (height, width; of volumes three sides), `kept_mode` and `kept_channels` (of volumes, 0: no such axis) are set by a build that
    looked at its sources, where they are not asked for, `kind` and `fill` by `of`.
    """

    resize: int | tuple[int, int] | None = None
    crop: int | tuple[int, ...] | None = None
    pad: int | tuple[int, int, int] | None = None
    mode: str = "rgb"
    dtype: str = "uint8"
    layout: str = "chw"
    normalize: str | Normalize | None = None
    scale: str = "unit"
    compat: str | None = None
    resampler: str | None = None
    filter: str = "bilinear"
    orientation: str | None = None
    alpha: str | None = None
    depth16: str | None = None
    range: tuple[float, float] | None = None
    icc: str = "ignore"
    frames: str = "first"
    truncated: str = "reject"
    max_pixels: int = MAX_PIXELS
    max_aspect: float | None = None
    jpeg_scaling: float | None = None
    axes: str | None = None
    kept_mode: str | None = None
    keep_size: tuple[int, ...] | None = None
    transform: str | None = None
    transform_version: str | None = None
    transform_shape: tuple[int, int, int] | None = None
    fields: Any = ()
    kind: str = "image"
    fill: int = 0
    kept_channels: int | None = None
    views: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", fields_of(self.fields))
        object.__setattr__(self, "views", views_of(self.views))
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed and not (value == "own" and self.kind == "mask" and name == "orientation"):
                words = ", ".join(str(a) for a in allowed if a is not None)
                raise OptionError(f"{flag(name)} must be one of {words}, found {value!r}", options=[name])
        self._check_geometry()
        self._check_values()
        self._check_transform()
        self._check_normalize()
        self._check_resampler()
        check_fill(self.fill, self.dtype)

    # ---------------------------------------------------------------- checks

    def _check_geometry(self) -> None:
        for name in _GEOMETRY:
            sizes = {"resize": (1, 2), "crop": (1, 2, 3), "pad": (1, 3), "keep_size": (2, 3)}[name]
            check_side(name, getattr(self, name), sizes)
        if self.kind == "volume" and self.resize is not None:
            raise OptionError(
                "--resize: volumes are cropped and padded, as their values are measurements: give --crop or --pad; a --transform may resample",
                options=["resize"],
            )
        if self.kind == "volume" and self.layout == "hwc":
            raise OptionError("--layout hwc: the axes of a volume are (D, H, W), with channels before them: leave it out", options=["layout"])
        if self.kind == "volume" and isinstance(self.crop, tuple) and len(self.crop) != 3:
            raise OptionError(f"--crop {typed(self.crop)}: volumes have three sides, as in --crop 64x128x128", options=["crop"])
        given = [n for n in ("resize", "crop", "pad", "keep_size") if getattr(self, n) is not None]
        if "pad" in given and len(given) > 1:
            clash("pad", given[0] if given[0] != "pad" else given[1], "pad already decides the size of a sample: leave one of them out")
        if "keep_size" in given and len(given) > 1:
            clash("keep_size", given[0], "the size of the sources is kept only where no geometry is asked for")
        if isinstance(self.resize, int) and self.crop is None:
            raise OptionError(
                f"--resize {self.resize} sets the short side only, so samples would differ in size: "
                f"add --crop {self.resize}, or write --resize {self.resize}x{self.resize}",
                options=["resize", "crop"],
            )
        if self.resize is not None and self.crop is not None:
            if isinstance(self.crop, tuple) and len(self.crop) == 3:
                clash("crop", "resize", "a crop of three sides is for volumes, which are not resized")
            rows, columns = pair(self.resize)
            crop_rows, crop_columns = pair(self.crop)
            if crop_rows > rows or crop_columns > columns:
                clash("crop", "resize", f"the crop {crop_rows}x{crop_columns} is larger than the resized picture ({typed(self.resize)})")
        if self.drawn is not None:
            self.drawn.check(self)

    def _check_values(self) -> None:
        if isinstance(self.max_pixels, bool) or not isinstance(self.max_pixels, int) or self.max_pixels < 1:
            raise OptionError(f"--max-pixels must be a whole number above 0, found {self.max_pixels!r}", options=["max_pixels"])
        if self.max_aspect is not None and (not is_number(self.max_aspect) or self.max_aspect < 1):
            raise OptionError(f"--max-aspect must be a number of at least 1, found {self.max_aspect!r}", options=["max_aspect"])
        if self.jpeg_scaling is not None:
            if not is_number(self.jpeg_scaling) or self.jpeg_scaling < 1:
                raise OptionError(f"--jpeg-scaling must be a number of at least 1, found {self.jpeg_scaling!r}", options=["jpeg_scaling"])
            object.__setattr__(self, "jpeg_scaling", float(self.jpeg_scaling))
        alpha_kept = self.mode in ("rgba", "keep")
        if self.alpha is not None and self.alpha not in ("white", "black", "drop", "keep") and not _COLOUR.fullmatch(self.alpha):
            raise OptionError(f"--alpha must be white, black, drop or #rrggbb in lower case, found {self.alpha!r}", options=["alpha"])
        if alpha_kept and self.alpha not in (None, "keep"):
            clash("alpha", "mode", f"--mode {self.mode} keeps transparency: leave --alpha out")
        if not alpha_kept and self.alpha == "keep":
            clash("alpha", "mode", "transparency is kept by --mode rgba")
        if self.kept_mode is not None and channels_of(self.kept_mode) is None:
            raise OptionError(f"--kept-mode must be one like RGB, I;16 or Fx5 (5 channels), found {self.kept_mode!r}", options=["kept_mode"])
        if self.kept_mode is not None and self.mode != "keep":
            clash("kept_mode", "mode", "a mode of the sources is kept only with --mode keep")
        if self.depth16 == "scale" and self.dtype != "uint8":
            clash("depth16", "dtype", f"scale makes 8 bits of 16, and {self.dtype} holds them all: leave --depth16 out")
        if self.depth16 == "keep" and self.dtype == "uint8":
            clash("depth16", "dtype", "16 bits do not fit in uint8: use --dtype uint16 or float32, or --depth16 scale")
        if self.range is not None:
            low_high = self.range
            if not isinstance(low_high, tuple) or len(low_high) != 2 or not all(map(is_number, low_high)) or low_high[0] >= low_high[1]:
                raise OptionError(f"--range must be two finite numbers LO:HI with LO below HI, found {low_high!r}", options=["range"])
            if self.dtype != "uint8" and self.dtype not in _FLOATS:
                clash("range", "dtype", f"--range maps values to 8 bit or to 0 to 1, and {self.dtype} keeps them: leave one of them out")
            object.__setattr__(self, "range", (float(low_high[0]), float(low_high[1])))

    def _check_transform(self) -> None:
        if self.transform is None:
            for name in ("transform_version", "transform_shape"):
                if getattr(self, name) is not None:
                    raise OptionError(f"{flag(name)} belongs to --transform: give it, too", options=[name])
            return
        if not _FUNCTION.fullmatch(self.transform):
            raise OptionError(f"--transform must be package.module:function, found {self.transform!r}", options=["transform"])
        shape = self.transform_shape
        if shape is not None and (len(shape) != 3 or not all(type(n) is int and 1 <= n <= MAX_SIDE for n in shape)):
            raise OptionError(
                f"--transform-shape must be height x width x channels (of volumes depth x height x width), found {shape!r}",
                options=["transform_shape"],
            )

    def _check_normalize(self) -> None:
        if self.normalize is None:
            return
        if isinstance(self.normalize, str) and self.normalize not in ("imagenet", "auto"):
            raise OptionError(f"--normalize must be imagenet or auto, or give --mean and --std; found {self.normalize!r}", options=["normalize"])
        if not isinstance(self.normalize, str | Normalize):
            raise OptionError(f"normalize must be a Normalize, 'imagenet' or 'auto', found {self.normalize!r}", options=["normalize"])
        if self.dtype in ("int16", "int32") and self.scale == "unit":
            clash("normalize", "dtype", f"{self.dtype} holds counts of no fixed depth: add --scale none, or store uint8, uint16 or a float")
        if self.normalize == "imagenet" and self.scale == "none":
            clash("normalize", "scale", IMAGENET_UNIT)
        if self.normalize == "auto":
            if self.dtype in _FLOATS:
                clash(
                    "normalize",
                    "dtype",
                    f"auto is known only after the build: store --dtype uint8 instead of {self.dtype}, or give --mean and --std",
                )
            return
        wanted = self._channels() if self.transform_shape is None or self.kind == "volume" else self.transform_shape[2]
        if wanted is not None and not (self.uses_volumes and self.kept_channels is None):  # whose channels are not known yet
            check_channels(_normalizer(self.normalize), wanted, "volumes have" if self.kind == "volume" else f"--mode {self.mode} has")

    def _check_resampler(self) -> None:
        if self.compat == "torchvision" and self.resampler == "torch":
            clash("compat", "resampler", "--compat torchvision is Pillow's arithmetic to the byte: leave --resampler out")
        if self.compat == "torchvision" and self.jpeg_scaling is not None:
            clash("compat", "jpeg_scaling", "torchvision decodes every picture whole: leave one of them out")
        if self.resampler == "torch":
            if self.filter not in TORCH_FILTERS:
                clash("resampler", "filter", f"the torch resampler has bilinear and bicubic: use --resampler pillow for {self.filter}")
            if self.keeps_alpha:
                clash("resampler", "mode", "kept transparency needs Pillow's premultiplied resize: use --resampler pillow")

    @property
    def keeps_alpha(self) -> bool:
        """Is transparency kept, as a channel?"""
        return self.mode == "rgba" or self.kept_mode in ("LA", "RGBA")

    # ---------------------------------------------------------------- presets

    def resolved(self) -> Preprocess:
        """These options with everything that a preset decides filled in; resolving twice changes nothing."""
        exact = self.compat == "torchvision"
        depth16 = self.depth16 or ("clip" if exact else "reject" if self.dtype == "uint8" else "keep")
        torch_can = self.filter in TORCH_FILTERS and not self.keeps_alpha and not exact
        alpha = self.alpha or ("keep" if self.mode in ("rgba", "keep") else "drop" if exact else "white")
        return replace(
            self,
            resampler=self.resampler or ("torch" if torch_can else "pillow"),
            orientation=self.orientation or ("ignore" if exact else "apply"),
            alpha=alpha,
            depth16=depth16,
            normalize=_normalizer(self.normalize) if self.normalize == "imagenet" else self.normalize,
        )

    def needs_size(self) -> bool:
        """True where no geometry was asked for, so that a build must choose it from its sources."""
        if self.kind == "volume" and self.transform_shape is not None:
            return False
        return self.resize is None and self.crop is None and self.pad is None and self.keep_size is None

    def needs_look(self) -> bool:
        """True where something is left open that a build must find out from its sources."""
        if self.kind == "volume":
            return self.needs_size() or self.kept_channels is None
        return self.needs_size() or (self.mode == "keep" and self.kept_mode is None)

    def uses_torch(self) -> bool:
        """True where pictures are resized by torch, or may be, as no geometry was asked for."""
        return (
            self.kind != "volume" and self.resolved().resampler == "torch" and (self.resize is not None or self.pad is not None or self.needs_size())
        )

    def with_size(self, *size: int) -> Preprocess:
        """These options with the sources' own size (height, width; of volumes three sides) kept: a picture of another size is a reject."""
        return replace(self, keep_size=size)

    # ---------------------------------------------------------------- fields

    def with_parts(self, parts: tuple[tuple[str, str], ...], others: Iterable[str] | None = None) -> Preprocess:
        """These options for samples of these pixel fields, (name, kind) each: what was said of the first is said of the sample.

        The kinds of the others stand in `fields`, so that settings tell them.  `others` are the names of all that samples hold beside them, where
        that is known: settings of a field that is not there are refused, never ignored.  Raises OptionError.
        """
        known = dict(self.options)
        if others is not None:
            refuse_strange(known, [*(name for name, _ in parts), *others])
        main = parts[0][0]
        for name, kind in parts:
            given = known.get(name, FieldOptions())
            kind = given.kind or ("volume" if kind == "image" and name == main and self.frames == "all" else kind)
            given.check(kind)
            if kind == "mask" and known[main].kind == "volume":  # ids as they are, for each place of the volume
                given = replace(given, kind=None, dtype=given.dtype or "uint8", fill=given.fill or 0)
                given, kind = replace(given, scale="none"), "volume"
            known[name] = replace(given, kind=kind)
        own = known.pop(main).given()
        made = replace(self, **self._replaced(own), fields=known)
        if made.kind != "volume" and not made.needs_size():
            made.output_hw()
        for name, _ in parts[1:]:
            made.of(name)
        return made

    def _replaced(self, given: dict[str, Any]) -> dict[str, Any]:
        """What `replace` makes of these options by those of a field: geometry as a whole, and no normalisation that was meant for other channels."""
        given = {name: value for name, value in given.items() if name != "missing"}
        geometry = dict.fromkeys(_GEOMETRY) if given.keys() & set(_GEOMETRY) else {}
        return {**geometry, **({"normalize": None, "kept_mode": None} if "mode" in given else {}), **given}

    def of(self, name: str) -> Preprocess:
        """The options of one of the pixel fields beside the first, resolved.  Raises OptionError, naming the field."""
        given = (options := dict(self.options)[name]).given()
        decided = ["depth16"] if "dtype" in given else []  # for the dtype of the sample
        shared: dict[str, Any] = {"fields": (), **dict.fromkeys(["transform", "transform_version", "transform_shape", *decided])}
        if options.kind == "mask":
            turned = self.resolved().orientation
            shared |= {**OF_MASKS, "orientation": "own" if given.pop("orientation", "") == "own" and turned == "apply" else turned}
        if options.kind == "volume":
            shared |= {"kept_channels": 0, "layout": "chw", "normalize": None, "range": None, "depth16": None, "fill": 0}
        try:
            return replace(self, **(shared | self._replaced(given))).resolved()
        except OptionError as error:
            raise OptionError(f"field {name}: {error}", options=error.details.get("options", [])) from None

    @property
    def options(self) -> tuple[tuple[str, FieldOptions], ...]:
        """`fields`, sorted by name."""
        return self.fields  # type: ignore[no-any-return]

    @property
    def uses_volumes(self) -> bool:
        """Is one of the pixel fields of volumes?"""
        return self.kind == "volume" or any(options.kind == "volume" for _, options in self.options)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the pixel fields beside the first, sorted."""
        return tuple(name for name, options in self.options if options.kind in PIXELS)

    def field(self, name: str) -> Field:
        """The pixel field that these options make, under this name."""
        views = None if self.drawn is None else self.drawn.count
        lead = () if views is None else (views,)
        if self.kind == "mask":
            return Field(name, self.dtype, (*lead, *self.output_hw()), "mask", views=views)
        normalize = self.read_normalize()
        constants = None if normalize is None else (normalize.mean, normalize.std)
        meaning, layout = ("volume", None) if self.kind == "volume" else ("image", self.layout)
        return Field(name, self.dtype, (*lead, *self.row_shape()), meaning, layout, self.read_scale(), constants, views=views)

    # ---------------------------------------------------------------- shapes

    @property
    def channels(self) -> int:
        """Channels of a picture before `transform`; OptionError while `mode="keep"` has no `kept_mode`."""
        count = self._channels()
        if count is None:
            raise OptionError("--mode keep: the mode of the sources is not known yet", options=["mode"])
        return count

    def _channels(self) -> int | None:
        if self.kind == "volume":
            return self.kept_channels or 1
        return {"rgb": 3, "gray": 1, "rgba": 4}.get(self.mode) or channels_of(self.kept_mode or "")

    def output_hw(self) -> tuple[int, int]:
        """(height, width) of every picture before `transform`; OptionError while `needs_size()`."""
        decided = self.crop or self.pad or self.keep_size or self.resize
        if decided is None:
            raise OptionError("no size yet: give --resize and --crop, or --pad", options=["resize", "crop", "pad"])
        return pair(decided)

    def volume_size(self) -> tuple[int, int, int] | None:
        """(D, H, W) of every volume before `transform`; None where that gets them whole.  OptionError while `needs_size()`."""
        decided = self.crop or self.pad or self.keep_size
        if decided is None:
            if self.transform_shape is not None:
                return None
            raise OptionError("no size yet: give --crop or --pad", options=["crop", "pad"])
        d, h, w = (decided,) * 3 if isinstance(decided, int) else decided
        return d, h, w

    def sample_shape(self) -> tuple[int, ...]:
        """(C, H, W) of a sample; of a volume (D, H, W), or (C, D, H, W) where the sources have channels."""
        if self.kind == "volume":
            several = (self.kept_channels,) if self.kept_channels else ()
            return self.transform_shape or (*several, *(self.volume_size() or ()))
        if self.transform_shape is not None:
            height, width, channels = self.transform_shape
            return channels, height, width
        return (self.channels, *self.output_hw())

    @property
    def drawn(self) -> Views | None:
        """`views`, checked."""
        return self.views  # type: ignore[no-any-return]

    def of_one_view(self) -> Preprocess:
        """What makes a variant of the part of a picture that it shows."""
        return replace(self, views=None, resize=self.output_hw(), crop=None)

    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row as it lies on disk: (C, H, W), or (H, W, C) for layout hwc; of a volume that of a sample."""
        if self.kind == "volume":
            return self.sample_shape()
        c, h, w = self.sample_shape()
        return (c, h, w) if self.layout == "chw" else (h, w, c)

    def stored_dtype(self) -> np.dtype[Any]:
        """The little-endian dtype of a row; bfloat16 lies on disk as the upper halves of float32, in uint16."""
        return np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype).newbyteorder("<")

    def read_scale(self) -> float:
        """What a reader divides stored values by to get floats: 255, 65535, or 1 where they are stored as they are."""
        return {"uint8": 255.0, "uint16": 65535.0}.get(self.dtype, 1.0) if self.scale == "unit" else 1.0

    def read_normalize(self) -> Normalize | None:
        """The normalisation that a reader applies; None where there is none, it is baked in, or the statistics decide (`auto`)."""
        return None if self.dtype in _FLOATS or self.normalize in (None, "auto") else _normalizer(self.normalize)

    def baked_normalize(self) -> Normalize | None:
        """The normalisation that stored values already have; None for integer dtypes."""
        return _normalizer(self.normalize) if self.dtype in _FLOATS and self.normalize is not None else None

    # ---------------------------------------------------------------- settings

    def settings(self) -> dict[str, Any]:
        """Every option, resolved, as values of canonical JSON; `from_settings` is the inverse.

        Options that are newer than format 1 stand there only where they are used, so that older settings mean the same.
        """
        made = self.resolved()
        return {f.name: _plain(v) for f in fields(made) if (v := getattr(made, f.name)) != f.default or f.name not in _NEWER}

    def pixel_settings(self) -> dict[str, Any]:
        """What decides a row's values before the cast; with the versions of the libraries this is the pixel fingerprint."""
        everything = self.settings()
        for name in ("dtype", "layout", "normalize", "scale", "compat", "fields"):
            everything.pop(name, None)
        if parts := {name: self.of(name).pixel_settings() for name in self.parts}:
            everything["fields"] = parts
        # Which wide sources are rejected depends on what a row can hold, not on its exact type.
        everything["holds"] = "bytes" if self.dtype == "uint8" else "floats" if self.dtype in _FLOATS else "counts"
        everything["pixel_revision"] = PIXEL_REVISION
        return everything

    def store_settings(self) -> dict[str, Any]:
        """What turns pixels into a stored row: the store fingerprint."""
        made = {"dtype": self.dtype, "layout": self.layout, "normalize": _plain(self.baked_normalize()), "scale": self.scale}
        parts = {name: self.of(name).store_settings() for name in self.parts}
        # What moves with a picture is stored as these say.
        moved = {name: _plain(options) for name, options in self.options if options.kind not in PIXELS}
        return {**made, **({"fields": {**moved, **parts}} if moved or parts else {})}

    @classmethod
    def from_settings(cls, d: Mapping[str, Any]) -> Preprocess:
        """The options that `settings()` was called on, resolved.  Raises OptionError on unknown names and bad values."""
        known = {f.name for f in fields(cls)}
        if strange := sorted(set(d) - known):
            raise OptionError(f"unknown settings: {', '.join(strange)}", options=strange)
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in d.items()}
        for given in (values, *(own for own in values.get("fields", {}).values() if isinstance(own, dict))):
            if isinstance(given.get("normalize"), Mapping):
                given["normalize"] = described(given["normalize"])
        return cls(**values)


def _normalizer(value: str | Normalize | None) -> Normalize:
    return value if isinstance(value, Normalize) else IMAGENET


def _plain(value: object) -> object:
    if isinstance(value, Normalize):
        return {"mean": list(value.mean), "std": list(value.std)}
    if isinstance(value, Views):
        return value.to_json()
    if isinstance(value, FieldOptions):
        return {name: _plain(own) for name, own in value.given().items()}
    if isinstance(value, tuple) and value and isinstance(value[-1], tuple) and isinstance(value[-1][-1], FieldOptions):
        return {name: _plain(own) for name, own in value}
    return list(value) if isinstance(value, tuple) else value
