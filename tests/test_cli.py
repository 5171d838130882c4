"""The command line: what it passes on, what it prints, how it ends."""

from __future__ import annotations

import builtins
import errno
import glob
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

import mmcompile.__main__
import mmcompile.compiler.driver
from mmcompile import cli, options, summary, terminal, text
from mmcompile.cli.building import HELP_GROUPS
from mmcompile.compiler.formats import TORCHVISION_EXTENSIONS
from mmcompile.compiler.outcome import BuildReport, Progress
from mmcompile.compiler.preprocess import Normalize, Preprocess
from mmcompile.compiler.sources.folder import FolderSource
from mmcompile.errors import BuildError, DecodeError, EngineError, OptionError, SourceError
from tests.support import make_dataset

SCHEMAS = Path(__file__).parents[1] / "schemas"
REPORT = json.loads((SCHEMAS / "report.schema.json").read_text())
CONFIG = json.loads((SCHEMAS / "build.schema.json").read_text())

#: A file name that would clear a terminal, break a line, and is no UTF-8.
EVIL = os.fsdecode(b"cats/\x1b[2J a\n\xff'b\\.png")

FULL = BuildReport(
    out="out",
    samples=90,
    rejects=3,
    shards=2,
    bytes=90 * 3 * 224 * 224,
    seconds=1.5,
    decoded=80,
    copied=7,
    kept=3,
    generation="0" * 32,
    classes=("cats", os.fsdecode(b"d\xffgs")),
    shape=(3, 224, 224),
    dtype="uint8",
    geometry="resize 256, crop 224, as asked",
    workers=2,
    left_out={"hidden": 4, "extension .txt": 2},
    counts={"more-frames": 1},
    reject_reasons={"not-an-image": 2, EVIL: 1},
    rejects_file="out/shards/rejects-0.jsonl",
    warnings=("class folders are numbers",),
    changed=("crop: 224, was 192",),
)


def checked(text: str) -> dict[str, Any]:
    """Exactly one JSON document, valid against the schema."""
    document = json.loads(text)
    jsonschema.Draft202012Validator(REPORT).validate(document)
    assert isinstance(document, dict)
    return document


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli.program, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def last_line(result: Result) -> str:
    return result.stderr.rstrip("\n").split("\n")[-1]


class Planted:
    """Stands in for the library's build(): keeps what it was called with, then reports or raises."""

    def __init__(self) -> None:
        self.outcome: BuildReport | BaseException = FULL
        self.moments: tuple[Progress, ...] = ()
        self.calls: list[dict[str, Any]] = []

    def __call__(self, source: Any, out: Any, **given: Any) -> BuildReport:
        self.calls.append({"source": source, "out": out, **given})
        for moment in self.moments:
            given["progress"](moment)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Planted:
    stand_in = Planted()
    monkeypatch.setattr(mmcompile.compiler.driver, "build", stand_in)
    return stand_in


# ---------------------------------------------------------------- help, start


def test_every_command_and_option_has_help() -> None:
    assert set(cli.program.commands) == {"build", "verify", "info", "prune", "report", "tune"}
    for command in (cli.program, *cli.program.commands.values()):
        assert command.help
        for parameter in command.params:
            assert not isinstance(parameter, click.Option) or parameter.help, parameter.name
        result = run(*([] if command is cli.program else [str(command.name)]), "--help")
        assert result.exit_code == 0
        assert "--help" in result.stdout
        assert not result.stderr


def test_every_command_shows_in_its_help_how_it_is_called() -> None:
    for name in cli.program.commands:
        lines = [line.strip() for line in run(name, "--help").stdout.splitlines()]
        assert any(line.startswith(f"mmcompile {name} ") for line in lines), name


#: What the shell asks after these words, and what it completes: a kind and a text, as click's script reads them.
COMPLETED = [
    (["mmcompile", "ver"], "plain,verify"),
    (["mmcompile", "build", "--dt"], "plain,--dtype"),
    (["mmcompile", "build", "--dtype", "bf"], "plain,bfloat16"),
    (["mmcompile", "build", "ra"], "file,ra"),
    (["mmcompile", "build", "raw", "out", "--config", "b"], "file,b"),
    (["mmcompile", "info", "o"], "file,o"),
]


@pytest.mark.parametrize(("words", "expected"), COMPLETED)
def test_a_shell_completes_commands_options_values_and_files(words: list[str], expected: str, tmp_path: Path) -> None:
    there = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1), "_MMCOMPILE_COMPLETE": "bash_complete"}
    env = {**os.environ, **there, "PYTHONPATH": str(Path(cli.__file__).resolve().parents[2])}
    code = "import sys\nsys.argv[0] = 'mmcompile'\nfrom mmcompile.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, [expected], "")


@pytest.mark.parametrize("words", [["--help"], ["build", "--help"], ["--version"], ["build", "x"], []])
def test_help_version_and_usage_errors_import_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\nfrom mmcompile.cli import program\n"
        "try: program.main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'PIL', 'numpy', 'tqdm', 'xxhash') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_no_command_prints_the_help_and_is_wrong_usage() -> None:
    result = run()
    assert result.exit_code == 2
    assert "verify" in result.stdout


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "mmcompile", "build", "raw"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "error: expected RAW and OUT, where the samples come from and the folder of the dataset: `mmcompile build raw/ out/`"
    )


# ---------------------------------------------------------------- what build passes on


def test_without_options_the_defaults_of_the_library_hold(planted: Planted) -> None:
    assert run("build", "raw", "out").exit_code == 0
    (call,) = planted.calls
    assert call["preprocess"] == Preprocess()
    assert call["options"] == mmcompile.compiler.driver.BuildOptions()
    assert (call["out"], call["max_rejects"], call["dry_run"]) == ("out", 0, False)
    assert call["source"] == FolderSource("raw")


def test_every_option_arrives(planted: Planted) -> None:
    words = (
        "--resize 240x320 --crop 224 --dtype float32 --layout hwc --mean .1,.2,.3 --std 1,2,3 --mode rgb --scale none --resampler pillow "
        "--filter box --orientation ignore --alpha #102030 --depth16 keep --icc srgb --frames error --truncated accept --max-pixels 1000 "
        "--max-aspect 7.5 --jpeg-scaling 2.5 "
        "--include *.png --include *.jpg --exclude a/b.png --hidden --workers 3 --shard-bytes 64M --max-rejects 2.5% "
        "--decode-timeout 7 --no-lock --checksum --redecode --dry-run --engine dask --address tcp://there:1"
    )
    result = run("build", "raw", "out", *words.split())
    assert result.exit_code == 0, result.stderr
    (call,) = planted.calls
    assert call["preprocess"] == Preprocess(
        resize=(240, 320),
        crop=224,
        dtype="float32",
        layout="hwc",
        normalize=Normalize((0.1, 0.2, 0.3), (1.0, 2.0, 3.0)),
        scale="none",
        resampler="pillow",
        filter="box",
        orientation="ignore",
        alpha="#102030",
        depth16="keep",
        icc="srgb",
        frames="error",
        truncated="accept",
        max_pixels=1000,
        max_aspect=7.5,
        jpeg_scaling=2.5,
    )
    made, source = call["options"], call["source"]
    assert (made.workers, made.shard_bytes, made.decode_timeout_s, made.lock) == (3, 64 << 20, 7.0, False)
    assert (made.checksum, made.redecode) == (True, True)
    assert (made.engine, made.address, made.part, made.plan_only) == ("dask", "tcp://there:1", None, False)
    assert (source.include, source.exclude, source.hidden) == (("*.png", "*.jpg"), ("a/b.png",), True)
    assert (call["max_rejects"], call["dry_run"]) == ("2.5%", True)


def test_pad_range_and_compat_arrive(planted: Planted) -> None:
    assert run("build", "raw", "out", "--pad", "64", "--range", "-1:2.5", "--compat", "torchvision").exit_code == 0
    (call,) = planted.calls
    assert call["preprocess"] == Preprocess(pad=64, range=(-1.0, 2.5), compat="torchvision")
    assert call["source"].hidden
    assert call["source"].extensions == TORCHVISION_EXTENSIONS


def test_the_choices_are_those_of_preprocess() -> None:
    for parameter in cli.build.params:
        if isinstance(parameter.type, click.Choice) and parameter.name not in ("normalize", "engine", None):
            with pytest.raises(OptionError) as caught:
                Preprocess(**{parameter.name: "nonsense"})  # type: ignore[arg-type]
            found = str(caught.value).split("must be one of ")[1].split(", found")[0].split(", ")
            choices = list(parameter.type.choices)
            assert found == (choices[: len(found)] if parameter.name == "dtype" else choices), parameter.name  # rows of numbers have more dtypes


def test_every_option_of_preprocess_can_be_typed() -> None:
    typed = {parameter.name for parameter in cli.build.params}
    assert set(Preprocess.__dataclass_fields__) - {"kept_mode", "kept_channels", "kind", "fill", "fields"} <= typed  # fields: as --field


WRONG = """--resize 0x|--resize 1x2x3|--resize -5|--crop ten|--pad 0|--mean 1,2|--mean 1,x,2 --std 1,1,1|--mean nan,0,0 --std 1,1,1|--range 5
--mean 0,0,0 --std 0,1,1|--mean 0,0,0 --std 1,1,1 --normalize imagenet|--range 2:1|--dtype float8|--workers 0|--shard-bytes 0|--shard-bytes 5MB
--max-rejects -1|--max-rejects 101%|--max-rejects nan%|--decode-timeout nan|--decode-timeout inf|--decode-timeout 0|--crop 300 --resize 256
--normalize auto --dtype float32|--max-aspect nan|--engine spark|--address tcp://there:1|--part 1/2 --plan-only
--config /nonexistent/file.json|--nonsense"""


@pytest.mark.parametrize("words", WRONG.replace("\n", "|").split("|"))
def test_wrong_usage_is_one_line_and_exit_code_2(planted: Planted, words: str) -> None:
    result = run("build", "raw", "out", *words.split())
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert result.stdout == ""
    assert not planted.calls
    document = checked(run("build", "raw", "out", *words.split(), "--json").stdout)
    assert document["command"] == "build"
    assert document["error"]["message"] in result.stderr


def test_an_empty_path_is_not_the_current_folder(planted: Planted) -> None:
    assert run("build", "", "out").exit_code == 2
    assert run("build", "raw", "").exit_code == 2
    assert run("verify", "").exit_code == 2
    assert not planted.calls


# ---------------------------------------------------------------- the config file


def test_a_config_file_gives_defaults_and_the_command_line_wins(planted: Planted, tmp_path: Path) -> None:
    document = {
        "resize": [240, 320],
        "crop": 200,
        "mean": [0.5, 0, 1],
        "std": "1,1,1",
        "dtype": "float16",
        "hidden": True,
        "no-lock": True,
        "exclude": ["a/*"],
        "include": ["*.png"],
        "workers": 3,
        "shard-bytes": "1M",
        "max-rejects": "5%",
        "decode-timeout": 2.5,
    }
    jsonschema.validate(document, CONFIG)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    words = ["--crop", "100", "--config", str(path), "--exclude", "b.png", "--include", "*.jpg", "--max-rejects", "7"]
    result = run("build", "raw", "out", *words)
    assert result.exit_code == 0, result.stderr
    (call,) = planted.calls
    assert call["preprocess"] == Preprocess(resize=(240, 320), crop=100, dtype="float16", normalize=Normalize((0.5, 0.0, 1.0), (1.0, 1.0, 1.0)))
    made, source = call["options"], call["source"]
    assert (made.workers, made.shard_bytes, made.decode_timeout_s, made.lock) == (3, 1 << 20, 2.5, False)
    assert (source.include, source.exclude, source.hidden) == (("*.jpg",), ("a/*", "b.png"), True)
    assert call["max_rejects"] == 7


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"crop": 1, "zzz": 2, "sise": 3}', "unknown keys sise (did you mean resize?), zzz; known are "),
        ('{"layuot": "chw", "keep_size": "8x8"}', "unknown keys keep_size (did you mean keep-size?), layuot (did you mean layout?)\n"),
        ('{"dry-run": true}', "unknown key dry-run"),
        ('{"crop": 1, "crop": 2}', "twice"),
        ("[1]", "not an object"),
        ("{", "expected JSON as in"),
        ("\ufeff\x00", "expected JSON as in"),
        ("[" * 100_000, "expected JSON as in"),
        ('{"crop": true}', "crop must be a whole number above 0, height x width as in 240x320, or depth x height x width, found true"),
        ('{"crop": "x"}', "crop: expected a whole number"),
        ('{"crop": [1, "2"]}', "crop must be"),
        ('{"hidden": "yes"}', "hidden must be true or false"),
        ('{"include": [1]}', "include must be a list of texts"),
        ('{"dtype": 8}', "dtype must be"),
        ('{"dtype": "float8"}', "dtype: "),
        ('{"workers": "2"}', "workers must be"),
        ('{"workers": 2.5}', "workers must be a whole number above 0, found 2.5"),
        ('{"max-aspect": null}', "max-aspect must be"),
        ('{"mean": []}', "mean must be"),
        ('{"mean": [NaN, 0, 0]}', "mean: expected numbers"),
    ],
)
def test_a_bad_config_file_is_one_error_that_names_file_and_key(planted: Planted, tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    result = run("build", "raw", "out", "--config", str(path))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: --config {path}: ")
    assert named in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not planted.calls


def test_a_config_may_be_toml(planted: Planted, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('resize = [240, 320]\ncrop = 200\nmean = [0.5, 0, 1]\nstd = "1,1,1"\nexclude = ["a/*"]\nmax-rejects = "5%"\n')
    assert run("build", "raw", "out", "--config", str(path)).exit_code == 0
    (call,) = planted.calls
    assert call["preprocess"] == Preprocess(resize=(240, 320), crop=200, normalize=Normalize((0.5, 0.0, 1.0), (1.0, 1.0, 1.0)))
    assert (call["source"].exclude, call["max_rejects"]) == (("a/*",), "5%")
    for bad, said in (
        ("crop = ", "expected TOML as in resize = 256"),
        ("crop = 1\ncrop = 2\n", "Cannot overwrite"),
        ("[crop]\na = 1\n", "crop must be"),
    ):
        path.write_text(bad)
        result = run("build", "raw", "out", "--config", str(path))
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: --config {path}: ")
        assert said in result.stderr


def test_help_shows_the_options_that_most_people_need_first_and_each_of_them_once() -> None:
    named = [name for names in HELP_GROUPS.values() for name in names.split()]
    assert len(next(iter(HELP_GROUPS.values())).split()) == 8
    assert sorted(named) == sorted({p.opts[-1].removeprefix("--") for p in cli.build.params if isinstance(p, click.Option)} | {"help"})


def test_config_schema_and_command_line_know_the_same_options() -> None:
    known = {p.opts[-1].removeprefix("--"): p for p in cli.build.params if isinstance(p, click.Option)}
    assert set(CONFIG["properties"]) == set(known) - {"config", "dry-run", "plan-only", "part", "json"}
    for name, rule in CONFIG["properties"].items():
        kind = known[name].type
        assert rule.get("enum") == (list(kind.choices) if isinstance(kind, click.Choice) else None)


@pytest.mark.parametrize(
    "value",
    [5, 0, -1, 2.0, 2.5, "5", "0", "05x1", "x", "100.5%", "7.25%", "5x6", "64M", "5%", "unit", "", True, None, [1, 2], [1, 2, 3], ["a"], [], {}],
)
def test_config_schema_and_code_accept_the_same_values(planted: Planted, tmp_path: Path, value: Any) -> None:
    path = tmp_path / "config.json"
    for name in CONFIG["properties"]:
        if name in ("alpha", "range", "mean", "std"):  # what these may say depends on other options: Preprocess checks it
            continue
        path.write_text(json.dumps({name: value}))
        result = run("build", "raw", "out", "--config", str(path))
        valid = jsonschema.Draft202012Validator(CONFIG).is_valid({name: value})
        assert ("--config" not in result.stderr) == valid, (name, value, result.stderr)


# ---------------------------------------------------------------- what is printed


def test_the_summary_says_what_was_made_and_what_to_type_next(planted: Planted) -> None:
    result = run("build", "raw", "out")
    assert (result.exit_code, result.stderr) == (0, "")
    for part in (
        "out: 90 samples in 2 classes",
        "12.9 MiB in 2 shards",
        "uint8 (3 x 224 x 224)",
        "80 decoded, 7 copied, 3 kept",
        "3: 2 not-an-image, 1 cats/\\x1b[2J",
        "out/shards/rejects-0.jsonl",
        "4 hidden, 2 extension .txt",
        "resize 256, crop 224, as asked",
        "1.5 s, 60 images/s with 2 workers",
        "warning    class folders are numbers",
    ):
        assert part in result.stdout
    assert "was 192" not in result.stdout  # it was told before the work began
    assert result.stdout.splitlines()[-3:] == ["  from mmcompile import MMapShardDataset", "  ds = MMapShardDataset('out')", "  image, label = ds[0]"]


def test_what_to_type_next_for_a_url_has_a_cache(planted: Planted) -> None:
    planted.outcome = BuildReport("s3://bucket/out", 5, 0, 1, 2 << 30, 0.0, shape=(3, 8, 8), dtype="uint8")
    last = run("build", "raw", "s3://bucket/out").stdout.splitlines()[-3:]
    assert last[0] == "  from mmcompile import Cache, MMapShardDataset"
    assert last[1].startswith("  ds = MMapShardDataset('s3://bucket/out', cache=Cache(")


def test_a_dry_run_says_what_would_be_built(planted: Planted) -> None:
    planted.outcome = BuildReport(
        "out", 5, 0, 1, 2 << 30, 0.0, shape=(3, 8, 8), dtype="uint8", dry_run=True, free_bytes=1 << 30, estimate_s=4000.0, workers=2
    )
    text = run("build", "raw", "out", "--dry-run").stdout
    for part in (
        "out: would hold up to 5 samples (no image was decoded); nothing was written",
        "1.0 GiB on that disk, NOT enough: 1.0 GiB are missing",
        "about 1 h 6 min",
    ):
        assert part in text
    assert "MMapShardDataset" not in text
    counts: dict[str, Any] = {"decoded": 3, "copied": 1, "kept": 1, "write_bytes": 1 << 20, "free_bytes": 1 << 30}
    planted.outcome = BuildReport("out", 5, 0, 1, 2 << 30, 0.0, shape=(3, 8, 8), dtype="uint8", dry_run=True, **counts)
    text = run("build", "raw", "out", "--dry-run").stdout
    for part in ("3 to decode, 1 to copy, 1 kept as they are", "writes     1.0 MiB", "1.0 GiB on that disk, enough"):
        assert part in text
    assert "time" not in text
    assert checked(run("build", "raw", "out", "--dry-run", "--json").stdout)["write_bytes"] == 1 << 20
    planted.outcome = BuildReport("out", 5, 0, 1, 9, 0.0, dry_run=True, part="1/3", estimate_s=0.04, workers=2, decoded=3, copied=2)
    text = run("build", "raw", "out", "--part", "1/3", "--dry-run").stdout
    for part in ("out: 5 samples in the 1 shard of part 1/3; nothing was written", "3 to decode, 2 to copy", "less than 1 s with 2 workers"):
        assert part in text
    assert "next" not in text


@pytest.mark.parametrize("report", [FULL, BuildReport("out", 0, 0, 0, 0, 0.0), BuildReport(EVIL, 1, 0, 1, 5, 0.1, dry_run=True, free_bytes=7)])
def test_build_prints_one_document_that_is_valid(planted: Planted, report: BuildReport) -> None:
    planted.outcome = report
    planted.moments = (Progress("decode", 1, 2, message="a line"),)
    result = run("build", "raw", "out", "--json")
    document = checked(result.stdout)
    assert (document["command"], document["samples"]) == ("build", report.samples)
    assert result.stderr == "a line\n"


def test_names_that_are_no_utf_8_survive_in_json(planted: Planted) -> None:
    assert checked(run("build", "raw", "out", "--json").stdout)["classes"] == ["cats", {"bytes": "d%FFgs"}]


def test_no_control_character_reaches_the_terminal(planted: Planted) -> None:
    report = BuildReport(EVIL, 1, 1, 1, 1, 1.0, classes=(EVIL,), warnings=(EVIL,), left_out={EVIL: 1}, reject_reasons={EVIL: 1}, changed=(EVIL,))
    planted.moments = (Progress(EVIL, 1, 2, message=EVIL),)
    results = []
    for outcome in (
        report,
        DecodeError(f"bad {EVIL}", rejects=1, allowed=0, report=EVIL, examples=[(EVIL, EVIL)]),
        SourceError(f"bad {EVIL}", keys=[EVIL]),
        OSError(5, EVIL, EVIL),
        KeyboardInterrupt(),
    ):
        planted.outcome = outcome
        results += [run("build", "raw", EVIL), run("build", EVIL, "out", "--json")]
        checked(results[-1].stdout)
    results += [run("build", "raw", "out", "--crop", EVIL), run("build", "raw", "out", EVIL), run(EVIL), run("info", EVIL)]
    for shown in [result.stdout for result in results] + [result.stderr for result in results]:
        assert all(c == "\n" or c.isprintable() for c in shown), ascii(shown)


def test_fields_are_told_with_what_they_are_and_without_the_axis_of_views() -> None:
    entry = {"name": "seg", "dtype": "uint8", "shape": [4, 6, 8], "meaning": "mask", "layout": None, "normalize": None}
    assert summary._field(entry) == "seg: mask, uint8 (4 x 6 x 8)"
    assert summary._field({**entry, "name": "mask", "views": 4}) == "mask: uint8 (6 x 8), 4 views"
    assert summary._field({**entry, "name": "note", "shape": [18], "meaning": "text"}) == "note: text, uint8 (18)"


def test_a_rate_below_one_a_second_is_left_out() -> None:
    assert summary.progress_line(Progress("build", 1, 4), 0.25) == "build: 1 of 4, 12.0 s left"


def test_plain_progress_lines_come_soon_and_then_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, stream = [0.0], io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    show = terminal.Show(stream, clock=lambda: now[0])
    for second in range(31):
        now[0] = float(second)
        show(Progress("decode", second * 100, 4000, rejects=second // 20))
    show.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == "decode: 300 of 4,000, 100 images/s, 37.0 s left"
    assert lines[-1] == "decode: 2,300 of 4,000, 100 images/s, 17.0 s left, 1 reject"


def test_a_terminal_gets_a_bar_with_the_rejects_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    show = terminal.Show(stream)
    show(Progress("scan"))
    show(Progress("decode", 10, 100))
    show(Progress("decode", 60, 100, rejects=2, message="hello"))
    show._bar.refresh()
    show.close()
    text = stream.getvalue()
    assert "decode:  60%" in text
    assert "2 rejects" in text
    assert "hello\n" in text
    assert show._bar is None


def test_a_terminal_that_does_not_know_its_size_gets_a_bar_too(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert os.get_terminal_size(follower).columns == 0
        show = terminal.Show(stream)
        show(Progress("build", 1, 4))
        text = os.read(leader, 4096).decode()
        show.close()
    os.close(leader)
    assert "25%" in text


# ---------------------------------------------------------------- errors and the command that goes on


def test_too_many_rejects_end_with_the_command_that_goes_on(planted: Planted) -> None:
    planted.outcome = DecodeError(
        "3 of 93 images are bad, 0 are allowed; see out/.build/rejects.jsonl",
        rejects=3,
        allowed=0,
        report="out/.build/rejects.jsonl",
        examples=[("cats/a.png", "truncated"), (EVIL, "not an image")],
    )
    result = run("build", "my raw", "out", "--max-rejects", "0", "--crop=9", "--max-rejects=1")
    assert (result.exit_code, result.stdout) == (1, "")
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: 3 of 93 images")
    assert lines[1] == "  cats/a.png: truncated"
    assert lines[-1] == "mmcompile build 'my raw' out --crop=9 --max-rejects 3"
    document = checked(run("build", "my raw", "out", "--json").stdout)
    assert document["next"] == ["mmcompile build 'my raw' out --json --max-rejects 3"]
    assert (document["error"]["type"], document["error"]["details"]["rejects"]) == ("DecodeError", 3)


def test_another_version_ends_with_the_command_that_goes_on(planted: Planted) -> None:
    about = {"count": 3, "versions": {"pillow": ["12.0", "13.0"]}, "pins": ["pillow==12.0"], "redecode": True}
    planted.outcome = BuildError("out: 3 images would be decoded again only because a version changed", **about)
    result = run("build", "raw", "out")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-2:] == ["to decode them again:", "mmcompile build raw out --redecode"]
    assert checked(run("build", "raw", "out", "--json").stdout)["error"]["details"] == about


def read_by_a_shell(line: str) -> list[str]:
    """The arguments as bash understands them."""
    script = f"for word in {line}; do printf '%s\\0' \"$word\"; done"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]


def test_unreadable_files_end_with_the_command_that_leaves_them_out(planted: Planted) -> None:
    planted.outcome = SourceError("2 files cannot be read", keys=["cats/a b.png", EVIL])
    result = run("build", "raw", "out")
    assert result.exit_code == 1
    words = read_by_a_shell(last_line(result))
    assert words == ["mmcompile", "build", "raw", "out", "--exclude", "cats/a b.png", "--exclude", glob.escape(EVIL)]
    planted.outcome = FULL
    assert run(*words[1:]).exit_code == 0
    assert planted.calls[-1]["source"].exclude == ("cats/a b.png", glob.escape(EVIL))


def test_of_many_unreadable_files_the_first_are_named(planted: Planted) -> None:
    planted.outcome = SourceError("57 files cannot be read", keys=[f"k{i}" for i in range(40)], count=57)
    result = run("build", "raw", "out")
    assert "the first 20 of 57 files" in result.stderr.splitlines()[-2]
    assert last_line(result).split().count("--exclude") == 20


def test_many_unreadable_files_are_left_out_by_the_list_that_the_build_wrote(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    planted.outcome = SourceError("57 files cannot be read", keys=[f"k{i}" for i in range(40)], count=57, exclude_file="out/.build/exclude.json")
    assert last_line(run("build", "raw", "out")) == "mmcompile build raw out --config out/.build/exclude.json"
    Path("own.json").write_text("{}", "utf-8")
    assert last_line(run("build", "raw", "out", "--config", "own.json")).split().count("--exclude") == 20  # one config file at a time


def test_a_source_error_without_keys_has_no_command_to_go_on(planted: Planted) -> None:
    planted.outcome = SourceError("raw: no such folder")
    assert run("build", "raw", "out").stderr == "error: raw: no such folder\n"
    assert checked(run("build", "raw", "out", "--json").stdout)["next"] == []


def test_a_rebuild_that_would_choose_another_size_ends_with_both_commands(planted: Planted) -> None:
    planted.outcome = OptionError("out: published with another size", before="--keep-size 28x28", now="--resize 256 --crop 256")
    result = run("build", "raw", "out")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-3:] == [
        "mmcompile build raw out --resize 256 --crop 256",
        "to go on as before:",
        "mmcompile build raw out --keep-size 28x28",
    ]
    planted.outcome = FULL
    assert run("build", "raw", "out", "--keep-size", "28x28").exit_code == 0
    assert planted.calls[-1]["preprocess"] == Preprocess(keep_size=(28, 28))


def test_ctrl_c_says_that_all_is_kept_and_which_command_goes_on(planted: Planted) -> None:
    planted.outcome = KeyboardInterrupt()
    result = run("build", "raw", "out", "--crop", "9")
    assert result.exit_code == 130
    assert "everything finished is kept" in result.stderr
    assert last_line(result) == "mmcompile build raw out --crop 9"
    assert checked(run("build", "raw", "out", "--json").stdout)["error"]["type"] == "KeyboardInterrupt"


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (OptionError("--crop and --pad clash"), 2, "--crop and --pad clash"),
        (BuildError("out: another run is at work"), 1, "another run"),
        (EngineError("workers were lost"), 1, "mmcompile build raw out"),
        (OSError(errno.ENOSPC, "No space left on device", "out/shards/x"), 1, "out/shards/x: No space left on device; free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), 1, "out: Permission denied"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 1, "worker"),
        (OSError("no number"), 1, "no number"),
    ],
)
def test_expected_errors_are_a_line_and_an_exit_code(planted: Planted, error: BaseException, code: int, part: str) -> None:
    planted.outcome = error
    result = run("build", "raw", "out")
    assert result.exit_code == code
    assert part in result.stderr
    assert "Traceback" not in result.stderr
    document = checked(run("build", "raw", "out", "--json").stdout)
    assert f"error: {document['error']['message']}" in result.stderr.splitlines()


def test_what_nobody_expected_keeps_its_traceback_and_json_still_has_a_document(planted: Planted) -> None:
    planted.outcome = ZeroDivisionError("oops")
    result = CliRunner().invoke(cli.program, ["build", "raw", "out", "--json"])
    assert isinstance(result.exception, ZeroDivisionError)
    assert checked(result.stdout)["error"]["type"] == "ZeroDivisionError"


# ---------------------------------------------------------------- text


@pytest.mark.parametrize(
    "words",
    [["plain", "a b", "", "$HOME", "`x`", "it's", "!"], ["a\nb", "tab\t'\\", os.fsdecode(b"\xff\xfe7"), "\u202eabc\u20289", "é ü", "\x1b[2J1"]],
)
def test_a_shell_reads_back_what_was_quoted(words: list[str]) -> None:
    line = text.quote(words)
    assert line.isprintable()
    assert read_by_a_shell(line) == words


def test_the_command_is_called_as_it_was() -> None:
    found = {"mmcompile": "/venv/bin/mmcompile", "python": "/venv/bin/python"}.get
    assert text.program_words("/venv/bin/mmcompile", "/venv/bin/python", found) == ["mmcompile"]
    assert text.program_words("/other/bin/mmcompile", "/other/bin/python", found) == ["/other/bin/mmcompile"]
    assert text.program_words("/x/mmcompile/__main__.py", "/venv/bin/python", found) == ["python", "-m", "mmcompile"]
    assert text.program_words("/x/mmcompile/__main__.py", "/other/bin/python", found) == ["/other/bin/python", "-m", "mmcompile"]
    assert text.program_words("/x/pytest/__main__.py", "/venv/bin/python", found) == ["mmcompile"]


def test_options_are_added_before_a_double_dash() -> None:
    assert text.add_options(["build", "--", "-raw", "out"], ["--exclude", "k"]) == ["build", "--exclude", "k", "--", "-raw", "out"]
    assert text.add_options(["build", "--x", "1", "--x=2", "r", "--x", "3"], ["--x", "4"], "--x") == ["build", "r", "--x", "4"]


def test_escape_changes_nothing_twice_and_keeps_what_can_be_read() -> None:
    assert text.escape("Grüße 日本\u3000.png") == "Grüße 日本\u3000.png"
    assert text.escape(EVIL) == "cats/\\x1b[2J a\\n\\xff'b\\.png"
    assert text.escape(text.escape(EVIL)) == text.escape(EVIL)
    assert text.escape("\u202e\x9b\U000e0001\ud800") == "\\u202e\\x9b\\U000e0001\\ud800"


def test_sizes_and_durations() -> None:
    assert [text.size(n) for n in (0, 1, 1023, 1024, 1 << 20, 3 << 40)] == ["0 bytes", "1 byte", "1023 bytes", "1.0 KiB", "1.0 MiB", "3.0 TiB"]
    assert text.size((1 << 20) - 1) == "1.0 MiB"
    assert [text.duration(s) for s in (0.04, 59.9, 59.96, 3599.9, 7261)] == ["0.0 s", "59.9 s", "1 min 0 s", "1 h 0 min", "2 h 1 min"]
    assert options.BYTES.parse("3k") == 3072
    assert options.BYTES.parse("1GiB") == 1 << 30


# ---------------------------------------------------------------- for real


def test_the_command_that_is_printed_publishes(tmp_path: Path) -> None:
    raw, out = tmp_path / "raw", tmp_path / "out"
    for name in ("cats/0.png", "cats/1.png", "dogs/2.png"):
        (raw / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (10, 20, 30)).save(raw / name)
    (raw / "cats" / "bad.png").write_bytes(b"no image")
    result = run("build", str(raw), str(out), "--workers", "1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert not (out / "index.json").exists()
    again = run(*read_by_a_shell(last_line(result))[1:], "--json")
    assert again.exit_code == 0, again.stderr
    document = checked(again.stdout)
    assert (document["samples"], document["rejects"], document["classes"]) == (3, 1, ["cats", "dogs"])
    assert (document["shape"], document["counts"]["folders"]) == ([3, 6, 8], 2)
    assert Path(document["rejects_file"]).is_file()
    dry = checked(run("build", str(raw), str(tmp_path / "new"), "--workers", "1", "--dry-run", "--json").stdout)
    assert (dry["dry_run"], dry["generation"]) == (True, None)
    assert not (tmp_path / "new").exists()


def test_ctrl_c_ends_a_running_process_with_130_and_no_traceback() -> None:
    code = (
        "import sys, time\nimport mmcompile.compiler.driver as driver\nfrom mmcompile.cli import main\n"
        "def build(*a, **k):\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "driver.build = build\nmain(['build', 'raw', 'out'])"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
    assert process.returncode == 130
    lines = [line for line in stderr.splitlines() if line]
    assert lines == ["error: stopped", "everything finished is kept; to go on:", "mmcompile build raw out"]


# ---------------------------------------------------------------- streams


def test_a_reader_that_leaves_is_no_error() -> None:
    """The pipe has no reader from the start."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "mmcompile", "--help"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "mmcompile", "--version"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: No space left on device")


@pytest.mark.parametrize(("option", "said"), [("--no-images", "error: No space left on device"), ("--split=no", "error: --split no: ")])
def test_a_document_that_a_full_disk_has_no_room_for_is_one_line(tmp_path: Path, option: str, said: str) -> None:
    make_dataset(tmp_path / "out", np.zeros((2, 3, 4, 4), np.uint8), [0, 0])
    words = ["report", str(tmp_path / "out"), "-o", str(tmp_path / "page.html"), "--json", option]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "mmcompile", *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2 if "--split" in said else 1, 1)
    assert done.stderr.startswith(said)


def test_an_ascii_terminal_shows_other_letters_escaped(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run([sys.executable, "-m", "mmcompile", "info", str(tmp_path / "é")], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "\\xe9" in done.stderr


def test_a_build_whose_standard_streams_are_closed_is_a_build(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    Image.new("RGB", (8, 8), (9, 8, 7)).save(tmp_path / "raw" / "a.png")
    script = 'exec "$0" -m mmcompile build raw out <&- >&- 2>&-'
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).resolve().parents[2])}
    assert subprocess.run(["bash", "-c", script, sys.executable], cwd=tmp_path, env=env, check=False).returncode == 0
    assert (tmp_path / "out" / "index.json").exists()


def test_sigterm_is_one_interrupt_and_is_as_before_afterwards() -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    caught = 0
    with terminal.Terminable() as term:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            caught += 1
        signal.raise_signal(signal.SIGTERM)
        assert (term.came, caught) == (True, 1)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_caller_who_ignores_sigterm_or_handles_it_is_left_to_it() -> None:
    heard: list[int] = []
    for theirs in (signal.SIG_IGN, lambda number, _: heard.append(number)):
        before = signal.signal(signal.SIGTERM, theirs)
        try:
            with terminal.Terminable() as term:
                signal.raise_signal(signal.SIGTERM)
            assert (term.came, signal.getsignal(signal.SIGTERM)) == (False, theirs)
        finally:
            signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_ctrl_c_while_the_command_loads_ends_as_it_does_later(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load = builtins.__import__

    def interrupted(name: str, *arguments: Any, **more: Any) -> Any:
        if arguments and arguments[2] and "cli" in arguments[2]:
            raise KeyboardInterrupt
        return load(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as end:
        mmcompile.__main__.main()
    assert end.value.code == 130
    assert capsys.readouterr() == ("", "error: stopped\n")


def test_a_build_says_what_a_sample_holds() -> None:
    report = replace(FULL, fields=("image", "label", "score"))
    assert "  image, label, score = ds[0]" in summary.build_lines(report)
    assert any(line.split() == ["fields", "image,", "label,", "score"] for line in summary.build_lines(report))
    rows = replace(FULL, fields=("x", "ts"), columns={"x": ("open", "close")}, unit="row", classes=None)
    assert any(line.split() == ["fields", "x", "(open,", "close),", "ts"] for line in summary.build_lines(rows))


@pytest.mark.parametrize(
    ("count", "what", "line"),
    [
        (1, "folders", "1 folder"),
        (1, "classes in column a", "1 class in column a"),
        (1, "links to folders", "1 link to folders"),
        (1, "extension .cls", "1 extension .cls"),
        (1, "excluded", "1 excluded"),
        (1, "class", "1 class"),
        (1, "boxes by column b", "1 box by column b"),
        (0, "folders", "0 folders"),
        (2000, "rows of a.csv", "2,000 rows of a.csv"),
    ],
)
def test_counts_agree_with_their_nouns(count: int, what: str, line: str) -> None:
    assert text.counted(count, what) == line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("build raw out --worker 2", "no such option --worker; did you mean --workers? (see `mmcompile build --help`)"),
        ("build raw out --zzz", "no such option --zzz (see `mmcompile build --help`)"),
        ("inf out", "no such command inf: expected one of build, info, prune, report, tune, verify; did you mean info? (see `mmcompile --help`)"),
        ("info", "missing argument OUT (see `mmcompile info --help`)"),
        ("build raw out --crop", "option --crop requires an argument (see `mmcompile build --help`)"),
        ("build raw out --mode rbg", "--mode: expected one of rgb, gray, rgba, keep, found 'rbg'; did you mean rgb? (see `mmcompile build --help`)"),
        (
            "build raw out --dtype float",
            "--dtype: expected one of uint8, uint16, int16, int32, float16, bfloat16, float32, float64, bool, int8, int64, uint32, uint64, "
            "found 'float'; did you mean float64 or float32 or float16? (see `mmcompile build --help`)",
        ),
        ("prune out --keep x", "--keep: expected a whole number above 0, found 'x' (see `mmcompile prune --help`)"),
        (
            "build raw out --source foldr",
            "--source must be one of dataset, manifest, coco, pairs, volumes, npy, npz, idx, npy-folder, table, raw, tar, zip, folder, "
            "found 'foldr'; did you mean folder?",
        ),
    ],
)
def test_a_mistyped_word_is_named_with_what_was_meant(words: str, said: str) -> None:
    result = run(*words.split())
    assert (result.exit_code, result.stderr) == (2, f"error: {said}\n")


@pytest.mark.parametrize(("here", "typed"), [("photos", "photo"), ("digits.npy", "digit.npy"), ("sales.csv", "sale.csv"), ("a.tar", "b.tar")])
def test_raw_that_is_not_there_is_named_with_what_lies_beside_it(tmp_path: Path, here: str, typed: str) -> None:
    (tmp_path / here).touch()
    result = run("build", str(tmp_path / typed), str(tmp_path / "out"))
    said = f"error: cannot read RAW {tmp_path / typed}: No such file or directory; did you mean {tmp_path / here}?\n"
    assert (result.exit_code, result.stderr) == (1, said)
    assert "did you mean" not in run("build", str(tmp_path / "nowhere" / typed), str(tmp_path / "out")).stderr


def test_what_is_one_image_or_no_folder_of_a_split_is_told_with_what_to_give(tmp_path: Path) -> None:
    for name in ("a/x.png", "b/y.png"):
        (tmp_path / "raw" / name).parent.mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / "raw" / name)
    out, one = str(tmp_path / "out"), tmp_path / "raw" / "a" / "x.png"
    assert run("build", str(one), out).stderr == f"error: {one} is one image: give the folder that it lies in, or a list of images\n"
    lost = run("build", str(tmp_path / "raw"), out, "--split", "train=nope", "--crop", "8")
    assert lost.stderr == f"error: no images in {tmp_path / 'raw' / 'nope'}: there is no such folder, or it is left out\n"
    strange = run("build", str(tmp_path / "raw"), out, "--field", "image:kidn=mask", "--crop", "8")
    assert strange.stderr.startswith("error: field image: unknown kidn; did you mean kind? (known are alpha, ")
