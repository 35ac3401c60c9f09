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
from tokenmill.server import page

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


@pytest.mark.req("R41")
def test_samples_of_harmful_markdown_are_inert(visit: Visit, tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    path.write_text(file_of(SAMPLES))
    visit.open()
    visit.page.locator("input[type=file]").set_input_files(path)
    expect(visit.answers).to_have_count(len(SAMPLES))
    for thoughts in visit.page.locator(".thoughts summary").all():
        thoughts.click()
    expect(visit.page.locator(".math[data-set]")).to_have_count(2)  # the formulas are set by now
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
