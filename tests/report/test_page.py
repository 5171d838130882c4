"""Pages in a real browser, headless Chromium: nothing goes wrong, nothing is asked for, nothing sticks out.

Skipped where Playwright or a Chromium is not installed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcompile.report import write_report
from tests.compiler import builds
from tests.support import SCENE_FACTS, draw_scenes, make_dataset, make_scenes

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

RNG = np.random.default_rng(0)
#: What a page is asked: how far it reaches, how wide the window is, pictures, pictures that did not load, the background's first channel.
ASK = """() => ({
  wide: document.documentElement.scrollWidth, window: innerWidth, images: document.images.length,
  broken: [...document.images].filter(image => !image.naturalWidth).length,
  background: +getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0],
  sticking: [...document.querySelectorAll('main *')]
    .filter(e => !e.closest('.box, pre, svg') && e.getBoundingClientRect().right > innerWidth + 1).length,
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def photos(root: Path) -> None:
    raw = builds.make_raw(root / "raw", per_class=3, classes=("cat", "a class with a name that is far longer than any column of a page", "<b>dog"))
    builds.write(raw, {"cat/broken.png": builds.BROKEN, "cat/copy.png": (raw / "cat" / "0.png").read_bytes()})
    builds.run(raw, root / "out", max_rejects=1)


def scenes(root: Path) -> None:
    made = draw_scenes(4)
    facts = {"mask": {**SCENE_FACTS["mask"], "categories": ("sky", *(f"thing {k}" for k in range(1, 7)))}}
    make_scenes(root / "out", made, facts, splits={"train": 3, "val": 1})


def volumes(root: Path) -> None:
    make_dataset(root / "out", values={"scan": RNG.normal(0, 300, (3, 9, 16, 20)).astype(np.int16)}, facts={"scan": {"meaning": "volume"}})


def table(root: Path) -> None:
    columns = tuple(f"a column with a long name {k}" for k in range(12))
    make_dataset(root / "out", values={"x": RNG.normal(size=(40, 12)).astype(np.float32)}, facts={"x": {"columns": columns}}, keyed=False)


def series(root: Path) -> None:
    make_dataset(root / "out", values={"wave": RNG.normal(size=(3, 700)), "map": RNG.normal(size=(3, 30, 90)).astype(np.float32)})


def nothing(root: Path) -> None:
    make_dataset(root / "out", np.zeros((0, 3, 8, 8), np.uint8), [], classes=("a", "b"))


@pytest.mark.parametrize(
    ("make", "images"),
    [(photos, 9), (scenes, 8), (volumes, 9), (table, 0), (series, 3), (nothing, 0)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_page_opens_from_disk_without_a_fault(browser: Any, tmp_path: Path, make: Any, images: int) -> None:
    make(tmp_path)
    write_report(tmp_path / "out", tmp_path / "page.html", raw=tmp_path / "raw" if make is photos else None)
    backgrounds = {}
    for width, scheme in ((375, "light"), (375, "dark"), (1280, "light"), (1280, "dark")):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page = context.new_page()
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message, said=said: said.append(message.text))
        page.on("pageerror", lambda error, said=said: said.append(str(error)))
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.goto((tmp_path / "page.html").as_uri())
        for fold in page.query_selector_all("summary"):
            fold.click()
        found = page.evaluate(ASK)
        assert said == []
        assert [url for url in asked if not url.startswith("data:")] == [(tmp_path / "page.html").as_uri()]
        assert (found["images"], found["broken"], found["sticking"]) == (images, 0, 0)
        assert found["wide"] <= found["window"] == width
        backgrounds[scheme] = found["background"]
        context.close()
    assert backgrounds["light"] > 200
    assert backgrounds["dark"] < 60
