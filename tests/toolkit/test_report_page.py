"""report.html: whole, self-contained, and not to be broken by names."""

from __future__ import annotations

import html.parser

from asp_toolkit import report as reports
from asp_toolkit.report.page import render
from tests.toolkit.made_reports import HOSTILE, facts, hostile_report, layer


class Page(html.parser.HTMLParser):
    """Tags with their attributes, and whether they nest."""

    VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_page_is_whole_self_contained_and_without_scripts() -> None:
    page = Page(render(hostile_report()))
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in page.tags:
        assert not any(key.startswith("on") for key in attributes), tag
        for key in ("src", "href", "xlink:href"):
            assert (attributes.get(key) or "#").startswith("#"), (tag, key)
        assert "url(" not in (attributes.get("style") or "")
    assert HOSTILE in page.words


def test_ids_are_unique_and_every_reference_is_there() -> None:
    text = render(reports.build(**facts()))
    page = Page(text)
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        target = attributes.get("xlink:href") or attributes.get("clip-path") or ""
        if target:
            assert target.removeprefix("url(").removeprefix("#").removesuffix(")") in ids


def test_plots_use_the_pages_colours_and_have_a_size() -> None:
    text = render(reports.build(**facts()))
    boxes = [attributes["viewbox"] for tag, attributes in Page(text).tags if tag == "svg"]
    assert len(boxes) == 5
    assert all(box is not None and float(box.split()[2]) > 100 for box in boxes)
    drawn = "".join(piece.split("</svg>")[0] for piece in text.split("<svg")[1:])
    assert "var(--dense)" in drawn
    assert "#0" not in drawn.replace('"#', "").replace("url(#", "")
    assert "prefers-color-scheme: dark" in text


def test_a_schedule_is_drawn_where_the_density_moved_and_only_there() -> None:
    given = facts()
    for row in given["history"][41:]:
        row["density"] = 0.5
    still = render(reports.build(**given))
    assert "Kept of the pruned matrices" not in still
    assert "the dense training with the masks held" in Page(still).words
    for row in given["history"][41:60]:
        row["density"] = 0.75
    given["recipe"]["prune"]["schedule"] = {"name": "gradual"}
    moved = render(reports.build(**given))
    assert "Kept of the pruned matrices" in moved
    assert "while masks change by the schedule gradual" in Page(moved).words


def test_two_pages_of_one_report_are_the_same() -> None:
    built = reports.build(**facts())
    assert render(built) == render(built)


def test_page_without_training_speed_exports_or_pruned_layers() -> None:
    given = facts(history=[], speed=[], exports=[], layers=[], recipe={}, sizes={})
    given["phases"]["dense"] = {"loss": 0.5, "accuracy": None, "samples": 0}
    built = reports.build(**given)
    page = Page(render(built))
    assert page.open == []
    for words in (page.words, reports.as_text(built)):
        assert "Accuracy cannot be compared" in words
        assert "not measured" in words
        assert "not exported" in words


def test_a_long_model_lists_every_layer_in_a_box() -> None:
    many = [layer(f"encoder.layer.{index}.dense.weight", [16, 16], "2:4", 0.5) for index in range(150)]
    text = render(reports.build(**facts(layers=many)))
    assert all(row["name"] in text for row in many)
    assert 'class="box"' in text
    assert len(text) < 400_000
