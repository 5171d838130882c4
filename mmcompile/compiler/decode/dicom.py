"""DICOM series: this module decides which files are one volume, in which order its planes stand, and in which units.

Planes are ordered by their position along the normal of the first, else by instance number.  Values are the modality's (Hounsfield units in a CT):
stored value times slope plus intercept, of each frame; MONOCHROME1 is turned before that, so that more is brighter.  Nothing is resampled.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.compiler.decode import opening
from mmcompile.compiler.decode.scaling import scaled, scaled_dtype
from mmcompile.compiler.decode.stack import Stack, check_frames
from mmcompile.compiler.preprocess import Preprocess
from mmcompile.errors import DecodeError

__all__ = ["is_dicom", "stack"]

_Pixels = npt.NDArray[Any]

_GREYS, _COLOURS = ("MONOCHROME1", "MONOCHROME2"), ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_PARTIAL_420", "YBR_ICT", "YBR_RCT")
_VALUES = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")
#: The whole file behind the header is compressed, to any size.
_DEFLATED = b"1.2.840.10008.1.2.1.99"
_META_BYTES = 4096
#: Millimetres between two planes that are one, and how far the axes of parallel planes may differ.
_SAME_MM, _PARALLEL = 1e-3, 1e-2
_PLUGINS = "pip install pylibjpeg pylibjpeg-libjpeg pylibjpeg-openjpeg (or python-gdcm)"


@dataclass(frozen=True)
class _Frame:
    """One plane: a file, the number of the frame in it (None: it has one), and what it says of its place and its units."""

    dataset: Any
    index: int | None
    position: tuple[float, ...] | None
    axes: tuple[float, ...] | None
    number: int | None
    slope: float
    intercept: float


def is_dicom(data: bytes) -> bool:
    return data[128:132] == b"DICM"


def stack(parts: Sequence[bytes], options: Preprocess) -> Stack:
    """The volume that the files of one series are.  Raises DecodeError."""
    pydicom = opening.extra("pydicom", "medical", "DICOM")
    datasets = [_read(pydicom, part, f"file {k + 1} of {len(parts)}") for k, part in enumerate(parts)]
    with opening.stage("open", "DICOM header"):
        series = Counter(str(d.get("SeriesInstanceUID", "")) for d in datasets)
        if len(series) > 1:
            counts = ", ".join(str(n) for n in sorted(series.values(), reverse=True)[:5])
            raise DecodeError(f"files of {len(series)} series ({counts}), and a sample is one: a folder for each", stage="open", code="series")
        dtype = _one([_dtype(d) for d in datasets], "types of values")
        height, width = _one([(int(d.Rows), int(d.Columns)) for d in datasets], "sizes (height, width)")
        kind = _one([str(d.get("PhotometricInterpretation", "MONOCHROME2")) for d in datasets], "kinds of colours")
        channels = _channels(datasets[0], kind)
        check_frames((sum(_count(d) for d in datasets), height, width), channels, dtype.itemsize, options)
        frames = _ordered([frame for d in datasets for frame in _frames(d)])
        made = np.result_type(*{scaled_dtype(dtype, f.slope, f.intercept) for f in frames})
        flip = _ends(datasets[0], dtype) if kind == "MONOCHROME1" else None
    shape = (len(frames), height, width)

    def planes(start: int, stop: int) -> _Pixels:
        out = np.empty((stop - start, height, width, *([channels] * bool(channels))), made)
        for k in range(start, stop):
            values = _pixels(pydicom, frames[k])
            if values.shape != out.shape[1:]:
                raise DecodeError(f"a DICOM frame of {values.shape} where its header says {out.shape[1:]}", stage="load", code="corrupt")
            out[k - start] = scaled(values if flip is None else flip - values, frames[k].slope, frames[k].intercept)
        return out

    return Stack("DICOM", shape, channels, made, planes)


def _read(pydicom: Any, part: bytes, which: str) -> Any:
    if not is_dicom(part):
        raise DecodeError(f"{which} is no DICOM file", stage="open", code="not-an-image")
    if _DEFLATED in part[:_META_BYTES]:
        raise DecodeError(f"{which} is deflated as a whole, which is not read: convert it", stage="open", code="unsupported")
    with opening.stage("open", "DICOM header"):
        dataset = pydicom.dcmread(io.BytesIO(part))
        if not any(name in dataset for name in _VALUES):
            raise DecodeError(f"{which} holds no pixels, or ends before them", stage="open", code="not-an-image")
        if "ModalityLUTSequence" in dataset:
            raise DecodeError(f"{which} has a table in place of a slope (Modality LUT), which is not read", stage="open", code="unsupported")
    return dataset


def _one(found: list[Any], what: str) -> Any:
    if len(kinds := sorted({str(f) for f in found})) > 1:
        raise DecodeError(f"slices of several {what} ({', '.join(kinds[:3])}), and a volume has one: a folder for each", stage="open", code="series")
    return found[0]


def _dtype(dataset: Any) -> np.dtype[Any]:
    bits = int(dataset.BitsAllocated)
    if "PixelData" not in dataset:
        return np.dtype(f"f{bits // 8}")
    if bits not in (8, 16, 32):
        raise DecodeError(f"a DICOM file of {bits}-bit values, which is not read", stage="open", code="unsupported")
    return np.dtype(f"{'i' if int(dataset.PixelRepresentation) else 'u'}{bits // 8}")


def _channels(dataset: Any, kind: str) -> int:
    """0 for greys, 3 for colours."""
    if (samples := int(dataset.get("SamplesPerPixel", 1))) == 1 and kind in _GREYS:
        return 0
    if samples == 3 and kind in _COLOURS:
        return 3
    raise DecodeError(f"a DICOM file of {samples} samples a pixel that are {kind[:20]}, which is not read", stage="open", code="unsupported")


def _count(dataset: Any) -> int:
    count = int(dataset.get("NumberOfFrames") or 1)
    if count < 1:
        raise DecodeError(f"a DICOM file of {count} frames, expected at least 1", stage="open", code="not-an-image")
    return count


def _frames(dataset: Any) -> list[_Frame]:
    count, made = _count(dataset), []
    for k in range(count):
        position = _said(dataset, k, "PlanePositionSequence", "ImagePositionPatient")
        axes = _said(dataset, k, "PlaneOrientationSequence", "ImageOrientationPatient")
        slope = _said(dataset, k, "PixelValueTransformationSequence", "RescaleSlope")
        intercept = _said(dataset, k, "PixelValueTransformationSequence", "RescaleIntercept")
        number = dataset.get("InstanceNumber")
        made.append(
            _Frame(
                dataset,
                k if count > 1 else None,
                None if position is None or (count > 1 and "PerFrameFunctionalGroupsSequence" not in dataset) else _floats(position, 3),
                None if axes is None else _floats(axes, 6),
                None if number is None else int(number),
                1.0 if slope is None else _floats([slope], 1)[0],
                0.0 if intercept is None else _floats([intercept], 1)[0],
            )
        )
    return made


def _said(dataset: Any, frame: int, sequence: str, name: str) -> Any:
    """What a file says of one of its frames: in the groups of that frame, in those of all, or at the top."""
    groups = dataset.get("PerFrameFunctionalGroupsSequence") or []
    for group in (*groups[frame : frame + 1], *(dataset.get("SharedFunctionalGroupsSequence") or [])):
        for item in group.get(sequence) or []:
            if (value := item.get(name)) is not None:
                return value
    return dataset.get(name)


def _floats(values: Any, count: int) -> tuple[float, ...]:
    made = tuple(float(v) for v in values)
    if len(made) != count or not np.isfinite(made).all():
        raise DecodeError(f"a DICOM header with {len(made)} numbers, or infinite ones, where it needs {count}", stage="open", code="corrupt")
    return made


def _ordered(frames: list[_Frame]) -> list[_Frame]:
    if len(frames) == 1:
        return frames
    if all(f.position is not None and f.axes is not None for f in frames):
        first = np.array(frames[0].axes)
        if any(np.abs(np.array(f.axes) - first).max() > _PARALLEL for f in frames):
            raise DecodeError("slices that are not parallel: a localiser among them?", stage="open", code="series")
        along = np.array([f.position for f in frames]) @ np.cross(first[:3], first[3:])
        order = np.argsort(along, kind="stable")
        if np.diff(along[order]).min() < _SAME_MM:
            raise DecodeError("two slices at one position: several times, echoes or copies in one folder", stage="open", code="series")
        return [frames[k] for k in order.tolist()]
    if all(f.dataset is frames[0].dataset for f in frames):
        return frames
    numbers = [f.number for f in frames]
    if None in numbers or len(set(numbers)) < len(numbers):
        raise DecodeError("slices without positions, whose instance numbers are missing or the same", stage="open", code="series")
    return sorted(frames, key=lambda f: f.number or 0)


def _ends(dataset: Any, dtype: np.dtype[Any]) -> Any:
    """The sum of the least and the largest stored value: what is turned is this minus the value."""
    bits = int(dataset.get("BitsStored") or 8 * dtype.itemsize)
    return dtype.type(-1 if dtype.kind == "i" else (1 << min(bits, 8 * dtype.itemsize)) - 1)


def _pixels(pydicom: Any, frame: _Frame) -> _Pixels:
    with opening.stage("load", "DICOM header", accepts=False):
        syntax = frame.dataset.file_meta.TransferSyntaxUID
        is_packed = syntax.is_compressed
    packed = f"data ({syntax.name}, damaged or for a plug-in: {_PLUGINS})" if is_packed else "data"
    with opening.stage("load", f"DICOM {packed}", accepts=False):
        if is_packed:
            decoder = pydicom.pixels.get_decoder(syntax)
            if not decoder.is_available:
                raise DecodeError(f"compressed as {syntax.name}, for which pydicom needs a plug-in: {_PLUGINS}", stage="load", code="needs-extra")
        values: _Pixels = pydicom.pixels.pixel_array(frame.dataset, index=frame.index)
    return values
