"""The report's page as a document: whole in itself, escaped everywhere, with the data that it says it has."""

import base64
import csv
import hashlib
import io
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from made_sets import CLAIM, HOSTILE, hostile, made, run

from thinpipe.harness import condense
from thinpipe.harness.errors import UserError
from thinpipe.harness.report import markup, page, pictures, report, svg

LINE = '<path d="M 0 0"/>'
SVG = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 100 50">{}</svg>'
VOID = {"meta", "link", "input", "br", "img"}
CARRYING = {"src", "href", "action", "data", "srcset", "poster", "formaction", "background"}


class Read(HTMLParser):
    """Elements, ids, texts by element, attributes that point somewhere, and tags that were not closed in order."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.ids, self.pointing, self.handlers, self.misplaced = [], [], [], [], []
        self.scripts, self._open, self.texts = {}, [], []
        self.feed(text)
        self.close()
        self.misplaced += self._open

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        assert len(found) == len(attrs), f"an attribute twice in <{tag}>"
        self.tags.append((tag, found))
        self.ids += [found["id"]] if "id" in found else []
        self.pointing += [value for name, value in attrs if name in CARRYING]
        self.handlers += [name for name in found if name.startswith("on")]
        if tag not in VOID:
            self._open.append(tag)
        self._script = found.get("id") if tag == "script" else None

    def handle_endtag(self, tag):
        if not self._open or self._open.pop() != tag:
            self.misplaced.append(tag)

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
        else:
            self.texts.append(data)


def shown(found):
    picture = pictures.Picture(HOSTILE, HOSTILE, svg.inline(SVG.format(LINE), "e0g0"))
    return page.Shown(found, [picture], {HOSTILE: HOSTILE})


@pytest.fixture(scope="module")
def text():
    return page.html_of([shown(hostile()), shown(replace(hostile(), name="other"))], HOSTILE)


@pytest.fixture(scope="module")
def read(text):
    return Read(text)


def test_no_text_can_leave_its_place(read):
    tags = [tag for tag, _ in read.tags]
    assert read.misplaced == []
    assert read.handlers == []
    assert not {"img", "iframe", "object", "embed", "base", "link", "form"} & set(tags)
    own = 1 + 1 + sum(len(shown(hostile()).found.tables) + 2 for _ in "ab")
    assert tags.count("script") == own, "the index, page.js, and of each set its tables, one figure and its settings"
    assert any(HOSTILE in text for text in read.texts)


def test_every_id_is_one_elements_and_every_jump_arrives(read):
    assert len(read.ids) == len(set(read.ids))
    jumps = [target[1:] for target in read.pointing if target.startswith("#")]
    assert set(jumps) <= set(read.ids)
    assert len(jumps) > 6


def test_it_points_nowhere_else(read):
    assert [target for target in read.pointing if not target.startswith("#")] == []
    policy = next(attrs["content"] for tag, attrs in read.tags if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none';")


def test_the_policy_allows_exactly_the_pages_own_script(read):
    policy = next(attrs["content"] for tag, attrs in read.tags if attrs.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(read.scripts[None].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_the_page_holds_every_table_as_it_is(read):
    for name, frame in condense.tables(hostile().tables).items():
        packed = markup.unpacked(read.scripts[f"e0-{name}"])
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([packed["columns"], *zip(*packed["cells"], strict=True)])
        assert out.getvalue() == condense.to_csv(frame, name)


def test_the_page_holds_what_a_run_was(read):
    detail = markup.unpacked(read.scripts["e0-detail"])
    assert detail["shared"]["task.corpus"] == HOSTILE
    first = hostile().tables["runs"]["run_id"][0]
    assert detail["own"][first] == {"seed": 0}
    assert detail["provenance"]["links"][0][1]["reason"] == HOSTILE
    assert json.loads(read.scripts["index"])["defaults"]["train.batch_size"] > 0


def test_claims_are_shown_with_their_state_in_words():
    text = page.html_of([shown(made([run(1)], claims=[{**CLAIM, "state": "fails", "needs": 7}]))], "")
    words = " ".join(Read(text).texts)
    for part in ("✗ fails", "A is faster than B.", "< 0.9", "0.4 to 0.6", "n = 7 to be decided", "median time"):
        assert part in words, part


def test_a_report_of_nothing_says_what_to_give(tmp_path):
    with pytest.raises(UserError, match="holds no results"):
        report([tmp_path], tmp_path / "page.html")


# --- figures ---


def test_an_svg_is_left_nothing_that_acts():
    content = SVG.format(
        "<script>1</script><style>*{fill:red}</style><foreignObject/><a><path d='M 0 0'/></a>"
        '<image href="https://example.org/x.png"/><use xlink:href="https://example.org/#x"/>'
        '<path d="M 1 1" onload="x()" style="fill: url(https://example.org/); stroke: #000; position: fixed"/>'
    )
    made_ = svg.inline(content, "a")
    for word in ("script", "<style", "foreign", "example", "onload", "position", "<a"):
        assert word not in made_, word
    assert 'style="stroke:#000"' in made_


def test_ids_of_an_svg_are_its_own():
    content = SVG.format('<defs><path id="p" d="M 0 0"/></defs><use xlink:href="#p"/><g clip-path="url(#p)" id="q">'
                         "<rect/></g>")  # fmt: skip
    one, other = svg.inline(content, "a"), svg.inline(content, "b")
    assert 'id="a-0"' in one
    assert 'href="#a-0"' in one
    assert 'clip-path="url(#a-0)"' in one
    assert "a-0" not in other
    assert 'id="q"' not in one, "nothing refers to it"


def test_outlined_words_become_text_of_the_same_width():
    uses = "".join(f'<use xlink:href="#g" transform="translate({60 * n} 0)"/>' for n in range(4))
    group = f'<g transform="translate(5.123 6) scale(0.08 -0.08)"><defs><path id="g" d="M 0 0"/></defs>{uses}</g>'
    made_ = svg.inline(SVG.format(f"<g id='text_1'><!-- a&<b --> {group}</g>"), "a")
    assert '<text transform="translate(5.12 6)" font-size="8" textLength="19.2">a&amp;&lt;b</text>' in made_
    assert "<use" not in made_
    spaced = svg.inline(SVG.format(f"<g><!--  bc  -->{group}</g>"), "a")
    assert 'textLength="14.4">\u00a0bc</text>' in spaced, "a space at the end has no width"
    kept = svg.inline(SVG.format(f"<g><!-- $10^1$ -->{group}</g>"), "a")
    assert kept.count("<use") == 4
    both = svg.inline(SVG.format(f"<g><!-- ab -->{group}</g><g><!-- $x$ --><g>{uses}</g></g>"), "a")
    assert both.count("<use") == 4
    assert '<path id="a-0"' in both, "an outline that is still used stays"


@pytest.mark.parametrize("content", ["", "<p/>", "<svg", SVG.format("<g>")])
def test_what_is_no_svg_is_refused(content):
    with pytest.raises(UserError, match="no SVG"):
        svg.inline(content, "a")


def test_figures_are_taken_from_a_folder_or_drawn(tmp_path):
    (tmp_path / "throughput_vs_bandwidth.svg").write_text(SVG.format('<path d="M 0 0"/>'))
    (tmp_path / "old.svg").write_text(SVG.format(""))
    rows = [run(n, seed=n % 2, cell=str(n // 2), rate_mbit=10.0 + n // 2, samples_per_s=5.0 + n) for n in range(4)]
    found = replace(made(rows), figures=("throughput_vs_bandwidth",))
    (taken,), absent = pictures.of(replace(found, figures_folder=tmp_path), "a")
    assert (taken.stem, absent) == ("throughput_vs_bandwidth", {})
    assert "throughput" in taken.about
    (drawn,), absent = pictures.of(found, "a")
    assert "link rate set" in drawn.content
    none, absent = pictures.of(replace(found, figures=("loss_vs_step",)), "a")
    assert none == []
    assert "loss_vs_step" in absent
    both = replace(found, figures_folder=tmp_path, figures=("throughput_vs_bandwidth", "pareto"))
    (_,), absent = pictures.of(both, "a")
    assert "thinpipe plot" in absent["pareto"]


# --- markup ---


def test_markup_escapes_what_is_not_markup():
    assert markup.el("p", "<b>", title='"') == '<p title="&quot;">&lt;b&gt;</p>'
    assert markup.el("p", markup.el("b", "\x00\ud800"), None, ["x", ["y"]]) == "<p><b>\ufffd?</b>xy</p>"
    assert markup.el("input", checked=True, value=None, disabled=False) == "<input checked>"


def test_packed_data_is_the_same_each_time_and_comes_back():
    data = {"a": ["</script>", "\u2028", 1.5, None]}
    assert markup.unpacked(markup.packed(data)) == data
    assert markup.packed(data) == markup.packed(data)
    assert "<" not in markup.packed(data)
