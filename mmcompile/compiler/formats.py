"""The fixed list of formats: this module decides which names and which first bytes belong to it.

With a fixed list nothing depends on what a process opened before.  Nothing here knows a decoder.  The list leaves out what runs
other programs (EPS) and what has no place in a dataset of photographs.
"""

from __future__ import annotations

import os.path

__all__ = ["ARRAY_EXTENSIONS", "EXTENSIONS", "TORCHVISION_EXTENSIONS", "VOLUME_EXTENSIONS", "belongs", "extension", "may_be_tga", "sniff"]

_BY_EXTENSION = {
    ext: family
    for family, extensions in {
        "JPEG": ".jpg .jpeg .jpe .jfif .mpo",
        "PNG": ".png .apng",
        "WEBP": ".webp",
        "GIF": ".gif",
        "BMP": ".bmp",
        "TIFF": ".tif .tiff",
        "PPM": ".ppm .pgm .pbm .pnm .pfm",
        "AVIF": ".avif .avifs",
        "HEIF": ".heic .heif .heics .heifs .hif",
        "JPEG2000": ".jp2 .j2k .jpc .jpf .jpx .j2c",
        "TGA": ".tga .icb .vda .vst",
        "ICO": ".ico",
        "PSD": ".psd",
    }.items()
    for ext in extensions.split()
}

#: Extensions of the list, lower case, with the dot.
EXTENSIONS = frozenset(_BY_EXTENSION)
#: What holds a picture only where somebody says so: beside pictures such files are most often something else.
ARRAY_EXTENSIONS = frozenset({".npy"})
_OF_VOLUMES = {".npy": "NPY", ".nii": "NIFTI", ".nii.gz": "NIFTI", ".dcm": "DICOM", ".dicom": "DICOM", ".tif": "TIFF", ".tiff": "TIFF"}
#: What holds a volume, or (DICOM) a piece of one.
VOLUME_EXTENSIONS = frozenset(_OF_VOLUMES)
#: The extensions that torchvision's ImageFolder takes.
TORCHVISION_EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})

#: A file of another family that opens as this one: MPO is a JPEG with more pictures behind the first.
_FAMILY = {"MPO": "JPEG"}
_TIFF = (b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+")
_AVIF_BRANDS = (b"avif", b"avis")
#: Containers that hold AVIF, HEIC and others: AVIF only if a brand behind says so.
_CONTAINER_BRANDS = (b"mif1", b"msf1")
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"hevm", b"hevs")
#: Two endings that are one.
_DOUBLE = (".nii.gz",)


def extension(name: str) -> str:
    """The extension of a name, lower case, with its dot; empty where there is none; `.nii.gz` is one."""
    lower = name.lower()
    if (double := next((end for end in _DOUBLE if lower.endswith(end)), None)) is not None:
        return double
    return os.path.splitext(lower)[1]


def may_be_tga(name: str) -> bool:
    """True for names that TGA files have: the format has no signature, so the name has to say it."""
    return _BY_EXTENSION.get(extension(name)) == "TGA"


def belongs(name: str, format: str) -> bool:
    """False where a listed extension promises another format than the content has."""
    promised = _BY_EXTENSION.get(extension(name)) or _OF_VOLUMES.get(extension(name))
    return promised is None or promised == _FAMILY.get(format, format)


def sniff(head: bytes) -> str | None:
    """The listed format whose signature the first 32 bytes have; None for none, and for TGA, which has no signature."""
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "WEBP"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if head.startswith(_TIFF):
        return "TIFF"
    if head.startswith((b"\xff\x4f\xff\x51", b"\0\0\0\x0cjP  \r\n\x87\n")):
        return "JPEG2000"
    if head[4:8] == b"ftyp":
        return _in_container(head)
    if head.startswith(b"\0\0\1\0"):
        return "ICO"
    if head.startswith(b"8BPS"):
        return "PSD"
    if _is_bmp(head):
        return "BMP"
    if len(head) > 2 and head[0:1] == b"P" and head[1:2] in b"123456Ff" and head[2:3].isspace():
        return "PPM"
    return None


def _in_container(head: bytes) -> str | None:
    behind = [head[at : at + 4] for at in range(16, 32, 4)] if head[8:12] in _CONTAINER_BRANDS else [head[8:12]]
    if any(brand in _AVIF_BRANDS for brand in behind):
        return "AVIF"
    return "HEIF" if any(brand in _HEIF_BRANDS for brand in behind) else None


def _is_bmp(head: bytes) -> bool:
    # Two letters say little: the header behind must have one of the sizes that readers know.
    return head.startswith(b"BM") and int.from_bytes(head[14:18], "little") in (12, 16, 40, 52, 56, 64, 108, 124)
