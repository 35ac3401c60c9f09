"""What a model says is text. Nothing in it runs, and nothing is fetched because of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.server.serving import KEY, Child, request
from tests.server.wire import until
from tests.web.browsing import Visit
from tokenmill.server import web as page

SAMPLES = [
    "<script>window.hurt = 1</script>",
    "<img src=x onerror='window.hurt = 1'>",
    "<img src='http://example.com/track.png'>",
    "<svg onload='window.hurt = 1'></svg>",
    "<svg><script>window.hurt = 1</script></svg>",
    "<iframe src='javascript:window.parent.hurt = 1'></iframe>",
    "<a href='javascript:window.hurt = 1' id='bait'>bait</a>",
    "[bait](javascript:window.hurt=1)",
    "[bait](JaVaScRiPt:window.hurt=1)",
    "[bait](data:text/html,<script>window.hurt=1</script>)",
    "[bait](vbscript:hurt)",
    "![picture](http://example.com/track.png)",
    '![picture](x" onerror="window.hurt=1)',
    "<style>body { display: none }</style>",
    "<form action='http://example.com'><input name=a><button>bait</button></form>",
    "<math><mtext></mtext><mglyph><style><img src=x onerror=window.hurt=1></style></mglyph></math>",
    "<details open ontoggle='window.hurt = 1'>x</details>",
    "```html\n<script>window.hurt = 1</script>\n```",
    '```"><img src=x onerror=window.hurt=1>\ncode\n```',
    "`<img src=x onerror=window.hurt=1>`",
    "| a |\n| --- |\n| <img src=x onerror=window.hurt=1> |",
    '<p title="</noscript><img src=x onerror=window.hurt=1>">x</p>',
    "$\\href{javascript:window.hurt=1}{x}$ and $$\\htmlClass{a}{x} \\includegraphics{http://example.com/track.png}$$",
    "<think><img src=x onerror=window.hurt=1></think>done",
    "[x]: javascript:window.hurt=1\n\n[bait][x]",
    "<object data='javascript:window.hurt=1'></object><embed src='http://example.com/x'>",
    "<base href='http://example.com/'>",
    "<meta http-equiv='refresh' content='0; url=http://example.com'>",
    "<button data-copy='code' onclick='window.hurt=1'>bait</button>",
    'x[^"onclick=window.hurt=1]\n\n[^"onclick=window.hurt=1]: <script>window.hurt=1</script>',
    "x[^<img/src=x/onerror=window.hurt=1>]\n\n[^<img/src=x/onerror=window.hurt=1>]: [bait](javascript:window.hurt=1)",
    "so $$\\href{javascript:window.hurt=1}{x}$$ it is, <think>`<img src=x onerror=window.hurt=1>`",
]


def file_of(contents: list[str]) -> str:
    """A conversation in which a model has said all this."""
    messages, parent = {}, None
    for i, content in enumerate(contents):
        for role, text in (("user", f"sample {i}"), ("assistant", content)):
            messages[f"{role}-{i}"] = {"role": role, "content": text, "parent": parent}
            parent = f"{role}-{i}"
    conversation = {"title": "<img src=x onerror=window.hurt=1>", "messages": messages, "leaf": parent}
    return json.dumps({"format": "tokenmill.conversations", "version": 1, "conversations": [conversation]})


@pytest.mark.fault("S06")
@pytest.mark.req("R41")
def test_samples_of_harmful_markdown_are_inert(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    path.write_text(file_of(SAMPLES))
    visit.open()
    visit.page.locator("input[type=file]").set_input_files(path)
    expect(visit.answers).to_have_count(len(SAMPLES))
    for thoughts in visit.page.locator(".thoughts summary").all():
        thoughts.click()
    expect(visit.page.locator(".math[data-set]")).to_have_count(3)  # the formulas are set by now
    for bait in visit.page.locator("article.assistant a, article.assistant button:has-text('bait')").all():
        assert (bait.get_attribute("href") or "").startswith("http://example.com/"), bait.inner_html()
    inside = "article.assistant .prose"
    forbidden = "script, img, svg, iframe, object, embed, form, style, base, meta, link, video, audio"
    assert visit.page.locator(inside).locator(forbidden).count() == 0
    handlers = """root => [...root.querySelectorAll("*")].flatMap((one) => [...one.attributes])
        .filter(({ name, value }) => name.startsWith("on") || /javascript:/i.test(value)).map(({ name }) => name)"""
    assert visit.page.locator(".messages").evaluate(handlers) == []
    assert visit.page.evaluate("() => window.hurt") is None
    expect(visit.answers.first).to_contain_text("<script>window.hurt = 1</script>")


@pytest.mark.fault("S06")
def test_the_browser_itself_would_refuse(visit: Visit) -> None:
    """The second wall: even a page that is fooled may run nothing inline and fetch nothing from elsewhere."""
    visit.open()
    visit.watched.expected = ("",)  # the browser says that it refuses
    script = """async () => {
        const failures = [];
        try { document.body.insertAdjacentHTML("beforeend", "<b>x</b>"); } catch { failures.push("html"); }
        try { document.createElement("script").text = "1"; } catch { failures.push("script"); }
        try { await fetch("http://127.0.0.1:9/"); } catch { failures.push("fetch"); }
        return failures;
    }"""
    assert visit.page.evaluate(script) == ["html", "script", "fetch"]
    visit.watched.problems.clear()


@pytest.mark.fault("S12")
@pytest.mark.req("R41", "R37")
def test_files_of_the_page_and_nothing_else(server: Child) -> None:
    for path, asset in page.assets().items():
        reply = request(server.port, "GET", path, key=None)
        assert (reply.status, reply.body) == (200, asset.content), path
        assert "script-src 'self';" in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        again = request(server.port, "GET", path, key=None, headers={"If-None-Match": reply.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
        packed = request(server.port, "GET", path, key=None, headers={"Accept-Encoding": "gzip"})
        assert packed.headers["content-encoding"] == "gzip"
    for path in (
        "/web/",
        "/web/../page.py",
        "/web/%2e%2e/page.py",
        "/web/vendor/MANIFEST.json",
        "/web/js",
        "/index.html",
    ):
        assert request(server.port, "GET", path, key=KEY).status == 404, path


def test_a_link_is_the_one_that_its_own_text_names(visit: Visit) -> None:
    """The same words with other definitions, and a definition that comes later."""
    visit.open()
    script = """async () => {
        const { blocks } = await import("/web/js/chat/markdown.js");
        const link = (text) => /href="([^"]*)"/.exec(blocks(text).join(""))?.[1] ?? null;
        const at = (address) => link(`see [docs][1]\\n\\n[1]: ${address}`);
        return [link("see [docs][1]"), at("https://a.example/"), at("https://b.example/")];
    }"""
    assert visit.page.evaluate(script) == [None, "https://a.example/", "https://b.example/"]


def test_libraries_are_what_the_manifest_says() -> None:
    folder = page.FOLDER / "vendor"
    libraries = json.loads((folder / "MANIFEST.json").read_text())
    assert {one["file"] for one in libraries} == {path.name for path in folder.glob("*.js")}
    for one in libraries:
        assert hashlib.sha256((folder / one["file"]).read_bytes()).hexdigest() == one["sha256"], one["file"]
        assert (folder / f"{one['file']}.LICENSE").read_text().strip()
        assert one["version"]
        assert one["licence"]


def shown(visit: Visit, tmp_path: Path, *contents: str) -> None:
    """The page, with a conversation in which a model has said all this."""
    path = tmp_path / "sample.json"
    path.write_text(file_of(list(contents)))
    visit.open()
    visit.page.locator("input[type=file]").set_input_files(path)
    expect(visit.answers).to_have_count(len(contents))


def test_21_10_formulas_within_a_line_are_set(visit: Visit, tmp_path: Path) -> None:
    shown(
        visit,
        tmp_path,
        "The sum $$\\sum_{i=1}^n i = \\frac{n(n+1)}{2}$$ is known, and $$ E = mc^2 $$, too.\n\n- in a list: $$a^2$$\n\n"
        "Some lines $$x\n= y$$ long.\n\n| a |\n| --- |\n| $$z$$ |\n\nBy \\[ w \\] itself.",
        "$$\n\\int_0^1 x\\,dx\n$$\n\nBefore\n$$y$$\nafter.",
        "A price of $5, or $$ alone, `$$code$$`, $$5 and $6.\n\n```\n$$code$$\n```",
    )
    within, alone, prices = visit.answers.all()
    expect(within.locator("math[display=block]")).to_have_count(6)
    expect(within).not_to_contain_text("$")
    expect(alone.locator("math[display=block]")).to_have_count(2)
    expect(alone.locator("p")).to_have_text(["Before", "after."])
    expect(prices.locator("math")).to_have_count(0)
    expect(prices).to_contain_text("A price of $5, or $$ alone, $$code$$, $$5 and $6.")


def test_21_10_footnotes_lead_to_their_notes_and_back(visit: Visit, tmp_path: Path) -> None:
    text = (
        "Water boils[^heat], freezes[^2] and boils again[^heat]. Nobody knows[^why].\n\n"
        "[^2]: At 0 °C.\n[^heat]: At **100 °C**,\n    at sea level.\n\n    If it is pure.\n"
        "[^extra]: Referred to by nothing.\n# After the notes\n\n```\n[^heat]: code\n```"
    )
    shown(visit, tmp_path, text, "Another[^heat].\n\n[^heat]: A note of its own.")
    first, second = visit.answers.all()
    expect(first.locator("sup")).to_have_text(["1", "2", "1"])
    expect(first).to_contain_text("Nobody knows[^why].")
    notes = first.locator(".footnotes li")
    expect(notes).to_have_count(3)
    expect(notes.nth(0)).to_contain_text("At 100 °C, at sea level.")
    expect(notes.nth(0)).to_contain_text("If it is pure.")
    expect(notes.nth(1)).to_contain_text("At 0 °C.")
    expect(notes.nth(2)).to_have_text("Referred to by nothing.")
    expect(first.locator("h1")).to_have_text("After the notes")
    expect(first.locator("pre")).to_have_text("[^heat]: code")
    url = visit.page.url
    first.get_by_role("button", name="Footnote 1").last.click()
    expect(notes.nth(0)).to_be_focused()
    notes.nth(0).get_by_role("button", name="Back to the text").click()
    expect(first.get_by_role("button", name="Footnote 1").first).to_be_focused()
    second.get_by_role("button", name="Footnote 1").click()
    expect(second.locator(".footnotes li")).to_be_focused()
    expect(second.locator(".footnotes li")).to_contain_text("A note of its own.")
    assert visit.page.url == url, "the address is the conversation's"


THINKING = {
    "<think>\nIt is *Tokyo*.\n</think>\n\nTokyo.": ["It is Tokyo."],
    "The template has opened it.\n</think>\n\nTokyo.": ["The template has opened it."],
    "<think>first</think>One.\n\n<think>second\n```\nopen</think>\nTokyo.": ["first", "second"],
    "<think>\n\n</think>\n\nTokyo.": [],
    "Write `</think>` and\n```\n<think>\n```\nTokyo.": [],
    "<think>cut short": ["cut short"],
}


def test_21_10_thoughts_are_folded(visit: Visit, tmp_path: Path) -> None:
    shown(visit, tmp_path, *THINKING)
    for answer, thoughts in zip(visit.answers.all(), THINKING.values(), strict=True):
        folds = answer.locator(".thoughts")
        expect(folds).to_have_count(len(thoughts))
        for fold, thought in zip(folds.all(), thoughts, strict=True):
            expect(fold.locator("summary")).to_have_text("Thoughts")
            expect(fold.get_by_text(thought, exact=True)).to_be_hidden()
            fold.locator("summary").click()
            expect(fold).to_contain_text(thought)
            expect(fold.get_by_text(thought, exact=True)).to_be_visible()
    for answer in visit.answers.all()[:5]:
        expect(answer.locator("> .prose").last).to_contain_text("Tokyo.")
    expect(visit.answers.nth(2).locator("> .prose").first).to_have_text("One.")
    expect(visit.answers.nth(4)).to_contain_text("Write </think> and")


def test_21_10_thoughts_are_folded_from_their_first_letter(visit: Visit) -> None:
    """As an answer grows: no tag and no thought is seen before it is known to be one."""
    visit.open()
    script = """async (text) => {
        const { partsOf } = await import("/web/js/chat/thoughts.js");
        return Array.from({ length: text.length + 1 }, (_, end) => partsOf(text.slice(0, end), true)
            .filter(({ isThought }) => !isThought).map(({ content }) => content).join("").trim());
    }"""
    assert set(visit.page.evaluate(script, "<think>deep")) == {""}
    seen = visit.page.evaluate(script, "a < b\n<think>deep</think>done")
    assert not any("<think" in one or "deep" in one for one in seen)
    assert (seen[3], seen[-1]) == ("a <", "a < b\ndone")


def test_a_table_code_and_formulas_are_shown(visit: Visit, browser: Browser, tmp_path: Path) -> None:
    text = (
        "# Head\n\n| a | b |\n| :-- | --: |\n| 1 | 2<br>3 |\n\n- [x] done\n\n```python\nprint('<hi>')\n```\n\n"
        "Euler: $e^{i\\pi} = -1$, a price of $5 and $6.\n\n$$\\frac{1}{2}$$\n\n~~no~~ **yes** <b>not bold</b>"
    )
    path = tmp_path / "sample.json"
    path.write_text(file_of([text]))
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit.open()
    visit.page.locator("input[type=file]").set_input_files(path)
    answer = visit.answers.first
    expect(answer.locator("td").nth(1)).to_have_text("2\n3", use_inner_text=True)
    expect(answer.locator(".hljs-string")).to_have_text("'<hi>'")
    expect(answer.locator("math")).to_have_count(2)
    expect(answer).to_contain_text("a price of $5 and $6.")
    expect(answer).to_contain_text("<b>not bold</b>")
    answer.get_by_role("button", name="Copy", exact=True).first.click()
    until(lambda: visit.page.evaluate("() => navigator.clipboard.readText()") == "print('<hi>')")
