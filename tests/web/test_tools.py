"""Thinking, calls of tools and JSON answers on the page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.server.serving import Running, request, running
from tests.server.test_tools import THINKS
from tests.text.tool_templates import use_template
from tests.web.browsing import Visit, visiting
from tests.web.test_reach import faults
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel, FaultKind
from tokenmill.config import EngineConfig
from tokenmill.server.config import ServerConfig

MARKUP = "<img src=x onerror=alert(1)>"
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}, "note": {"enum": [MARKUP]}},
        "required": ["city", "note"],
    },
}
CALL = f'{{\n  "city": "Rome",\n  "note": "{MARKUP}"\n}}'
FORCED = {"tool_choice": "required", "parallel_tool_calls": False, "thinking_token_budget": 4}
"""The fake model says anything that it may."""


@pytest.fixture(scope="module")
def thinking() -> Iterator[Running]:
    """A server whose model thinks, and calls tools."""
    model = FakeModel(FakeConfig(vocab_size=258, max_context=4096))
    llm = AsyncLLM(model, config=EngineConfig(), kv_cache_tokens=16_384)
    use_template(llm, THINKS)
    with running(llm, ServerConfig()) as one:
        yield one


@pytest.fixture
def visit(browser: Browser, thinking: Running) -> Iterator[Visit]:
    with visiting(browser, f"http://127.0.0.1:{thinking.port}") as one:
        yield one.open(max_tokens=200, seed=3)


def answer_with(visit: Visit, **changes: Any) -> None:
    """Change what the page asks for from now on, so that the fake model's answers are of one kind."""

    def changed(route: Any) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, **changes}))

    visit.page.unroute("**/generate")
    visit.page.route("**/generate", changed)


def configure(visit: Visit, label: str, value: str) -> None:
    visit.page.get_by_role("button", name="Settings").click()
    visit.page.get_by_role("dialog").get_by_label(label).fill(value)
    visit.page.get_by_role("button", name="Save").click()


@pytest.mark.req("R41")
def test_thinking_is_folded_and_counted_while_it_streams(visit: Visit, thinking: Running) -> None:
    answer_with(visit, thinking_token_budget=20, max_tokens=200)
    stalled = thinking.inject(FaultKind.STALL, after=10)
    visit.send("hi")
    fold = visit.answers.last.locator("details.thoughts")
    summary = fold.locator("summary")
    expect(summary).to_have_text(re.compile(r"^Thinking… \(\d+ tokens\)$"))
    expect(fold).not_to_have_attribute("open", "")
    stalled.release.set()
    visit.wait_for_answer()
    expect(summary).to_have_text(re.compile(r"^Thoughts \(\d+ tokens, [\d.]+ (ms|s)\)$"))
    message = visit.leaf()
    assert message["reasoning"]
    assert "think>" not in message["content"] + message["reasoning"]
    assert f"({message['thinking']['tokens']} tokens," in str(summary.text_content())
    assert 20 <= message["thinking"]["tokens"] < message["stats"]["completion"]
    expect(fold.locator(".prose")).to_be_hidden()
    summary.focus()
    visit.page.keyboard.press("Enter")
    expect(fold.locator(".prose")).to_be_visible()


@pytest.mark.req("R41")
def test_a_call_is_answered_in_its_card_and_the_answer_goes_on(visit: Visit, thinking: Running, tmp_path: Path) -> None:
    page = visit.page
    page.get_by_role("button", name="Settings").click()
    field = page.get_by_role("dialog").get_by_label("Tools")
    field.fill("[{")
    page.get_by_role("button", name="Save").click()
    assert "a JSON array of functions" in field.evaluate("(field) => field.validationMessage")
    field.fill(json.dumps(WEATHER))
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("dialog")).to_have_count(0)

    answer_with(visit, **FORCED)
    visit.ask("What is the weather in Rome?")
    card = visit.answers.last.get_by_role("region", name="Call of get_weather")
    expect(card.locator("pre")).to_have_text(CALL)
    expect(card.locator("img")).to_have_count(0)
    assert visit.watched.bodies("/v1/sessions")[-1]["tools"] == [WEATHER]
    (call,) = visit.leaf()["calls"]

    result = card.get_by_label("Result of get_weather")
    page.keyboard.press("Shift+Tab")  # the composer has the focus; all of this is done with keys
    while not result.evaluate("(field) => field === document.activeElement"):
        page.keyboard.press("Shift+Tab")
    page.keyboard.type('{"sky": "<b>clear</b>"}')
    with visit.answered():
        page.keyboard.press("Control+Enter")
    returned = {"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "<b>clear</b>"}'}
    assert visit.watched.bodies("/generate")[-1]["input"] == [returned]
    shown = page.locator("article.message.tool").get_by_role("region", name="Result of get_weather")
    expect(shown.locator("pre")).to_have_text('{\n  "sky": "<b>clear</b>"\n}')
    expect(card.locator("textarea")).to_have_count(1)  # the second call waits now
    assert visit.last_stats()["cached"] > 0

    # The server loses the session: it is made again, with the calls and what they have returned.
    (session,) = visit.current()["sessions"]
    request(thinking.port, "DELETE", f"/v1/sessions/{session}", key=None)
    answer_with(visit, tool_choice="none", thinking_token_budget=4, max_tokens=30)
    visit.answers.last.get_by_label("Result of get_weather").fill("rain")
    with visit.answered():
        page.get_by_role("button", name="Send the result").click()
    past = visit.watched.bodies("/v1/sessions")[-1]["messages"]
    assert [message["role"] for message in past] == ["user", "assistant", "tool", "assistant"]
    assert past[1]["tool_calls"][0]["id"] == past[2]["tool_call_id"] == call["id"]
    assert visit.leaf()["content"]
    expect(page.get_by_role("alert")).to_have_count(0)

    page.reload()
    expect(visit.messages).to_have_count(6)
    expect(page.get_by_role("button", name="Send the result")).to_have_count(0)
    again = """async () => {
        const { load } = await import("/web/js/chat/storage.js");
        const { fromJson, toJson } = await import("/web/js/chat/transfer.js");
        const one = await load(location.hash.slice(1));
        const [other] = fromJson(toJson([one]));
        const partsOf = ({ calls, results, reasoning }) => [calls, results, reasoning];
        const all = ({ messages, tools }) => JSON.stringify([tools, Object.values(messages).map(partsOf)]);
        return all(one) === all(other);
    }"""
    assert page.evaluate(again), "a file of the conversation has the calls and their results"
    (session,) = visit.current()["sessions"]
    file = tmp_path / "saved.session"
    file.write_bytes(request(thinking.port, "POST", f"/v1/sessions/{session}/save", {}, key=None).body)
    page.locator("input[type=file]").set_input_files(file)
    expect(visit.conversations).to_have_count(2)
    expect(visit.messages).to_have_count(6)
    expect(shown).to_have_count(2)
    expect(page.get_by_role("region", name="Call of get_weather")).to_have_count(2)
    assert visit.current()["tools"][0]["function"] == WEATHER


@pytest.mark.req("R41")
def test_no_serious_fault_of_accessibility_in_calls(browser: Browser, thinking: Running) -> None:
    with visiting(browser, f"http://127.0.0.1:{thinking.port}", bypass_csp=True, color_scheme="dark") as visit:
        visit.open(max_tokens=200)
        configure(visit, "Tools", json.dumps([WEATHER]))
        answer_with(visit, **FORCED)
        visit.ask("What is the weather in Rome?")
        expect(visit.page.get_by_role("form", name="Tool results")).to_be_visible()
        assert faults(visit.page) == []


@pytest.mark.req("R41")
def test_an_answer_to_a_schema_is_shown_as_formatted_json(visit: Visit) -> None:
    schema = {"type": "object", "properties": {"text": {"enum": [MARKUP]}, "list": {"enum": [[1, {}]]}}}
    configure(visit, "Response schema", json.dumps({**schema, "required": ["text", "list"]}))
    answer_with(visit, thinking_token_budget=4)
    visit.ask("hi")
    sent = visit.watched.bodies("/generate")[-1]["response_format"]
    assert sent["json_schema"]["schema"]["properties"] == schema["properties"]
    code = visit.answers.last.locator("figure.code code")
    expect(code).to_have_text(f'{{\n  "text": "{MARKUP}",\n  "list": [\n    1,\n    {{}}\n  ]\n}}')
    expect(visit.answers.last.locator("img")).to_have_count(0)


def test_indented_json_is_the_same_json_at_any_length(visit: Visit) -> None:
    text = '{"n":12345678901234567890.10,"s":"a\\"]}{,: \\u00e9","e":[[],{},[1,-2e5,null]],"t":{"deep":[true]}}'
    script = """async (text) => {
        const { indented, jsonIn } = await import("/web/js/chat/json.js");
        const token = /"(?:[^"\\\\]|\\\\.)*"?|\\s+/g;
        const bare = (json) => json.replace(token, (part) => (part.startsWith('"') ? part : ""));
        const cuts = Array.from(text, (_, end) => text.slice(0, end));
        const wrong = cuts.filter((cut) => bare(indented(cut)) !== bare(cut));
        const live = [jsonIn('{"a', true), jsonIn("[link](x)", true)];
        const others = [jsonIn("[1] is a list"), jsonIn("{x"), ...live, indented("}]")];
        return [indented(text), wrong, others];
    }"""
    whole, wrong, others = visit.page.evaluate(script, text)
    assert wrong == []
    assert json.loads(whole) == json.loads(text)
    assert "12345678901234567890.10" in whole
    assert others == [None, None, '{\n  "a', None, "\n}\n]"]
