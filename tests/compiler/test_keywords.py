"""What `build` says of options that are given as in the command, or as things that they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmcompile
from mmcompile.errors import OptionError, SourceError
from tests.compiler.builds import make_raw


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"resize": 4}, r"build\(\) takes no resize=: give it as preprocess=mmcompile.Preprocess\(resize=4\)$"),
        ({"dtype": "float16"}, r"mmcompile.Preprocess\(dtype='float16'\) or preprocess=mmcompile.RowPreprocess\(dtype='float16'\) \(of arrays and"),
        ({"engine": "ray"}, r"give it as options=mmcompile.BuildOptions\(engine='ray'\)$"),
        ({"nonsense": 1}, "takes no nonsense=: there are dry_run, .*what is made of samples stands in preprocess="),
    ],
)
def test_options_that_are_no_keywords_say_where_they_stand(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        mmcompile.build(np.zeros((4, 3)), tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"preprocess": {"resize": 4}}, r"preprocess must be a mmcompile.Preprocess or a mmcompile.RowPreprocess, found {'resize': 4}"),
        ({"preprocess": "imagenet"}, "preprocess must be a mmcompile.Preprocess"),
        ({"options": {"workers": 2}}, "options must be a mmcompile.BuildOptions"),
        ({"workers": "2"}, "workers must be a number, at least 1, found '2'"),
        ({"preprocess": mmcompile.Preprocess(crop=4)}, "--crop: for pictures, and this source has arrays"),
    ],
)
def test_what_is_given_in_place_of_options_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        mmcompile.build(np.zeros((4, 3)), tmp_path / "out", **given)


def test_settings_of_rows_do_not_go_with_files_of_images(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=": a source of images, and a RowPreprocess is for arrays, tables and datasets in Python: give a Preprocess"
    ):
        mmcompile.build(make_raw(tmp_path / "raw"), tmp_path / "out", preprocess=mmcompile.RowPreprocess())


def test_a_note_says_what_an_option_is_called_in_python() -> None:
    for error in (OptionError("give --decode-timeout 2, or --crop 4"), SourceError("--crop 4 and --decode-timeout")):
        assert set(error.__notes__[0].split("; ")) == {
            "--decode-timeout in Python: BuildOptions(decode_timeout_s=)",
            "--crop in Python: Preprocess(crop=)",
        }
        assert "crop=" not in str(error)
    assert OptionError("another --dtype").__notes__ == ["--dtype in Python: Preprocess(dtype=) or RowPreprocess(dtype=)"]
    assert not hasattr(OptionError("run it with --repair RAW -- now"), "__notes__")
