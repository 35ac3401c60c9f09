"""The model menu: an admin loads a downloaded model from the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.clients.checkpoint import make_checkpoint
from tests.hub import place
from tests.server.serving import Child, child
from tests.web.browsing import visiting

KEYS = ("--api-key", "user", "--admin-key", "admin")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two models; the files of one are damaged."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENMILL_HOME", str(tmp_path / "home"))
    make_checkpoint(tmp_path / "tiny")
    place(tmp_path / "cache", "org/tiny", tmp_path / "tiny")
    weights = place(tmp_path / "cache", "org/broken", tmp_path / "tiny") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    return tmp_path / "cache"


@pytest.fixture
def keyed(cached: Path, tmp_path: Path) -> Iterator[Child]:
    with child(tmp_path / "log", "fake", *KEYS) as one:
        yield one


def test_an_admin_loads_a_downloaded_model_from_the_menu(browser: Browser, keyed: Child) -> None:
    with visiting(browser, f"http://127.0.0.1:{keyed.port}") as visit:
        visit.context.add_init_script("sessionStorage['tokenmill.key'] = 'admin'")
        menu = visit.open().page.get_by_label("Model", exact=True)
        expect(menu.locator("optgroup[label=Downloaded] option")).to_have_text(["org/broken (1 MB)", "org/tiny (1 MB)"])
        menu.select_option("org/broken")
        expect(visit.page.get_by_role("status").filter(has_text="org/broken: ")).to_contain_text("failed to load")
        expect(menu).to_have_value("fake")
        menu.select_option("org/tiny")
        expect(menu.locator("optgroup[label=Downloaded] option")).to_have_text(["org/broken (1 MB)"])
        expect(menu).to_have_value("org/tiny")
        expect(menu).to_be_enabled()
        visit.ask("Which one?")
        assert visit.watched.bodies("/v1/sessions")[-1]["model"] == "org/tiny"


def test_others_are_not_offered_any(browser: Browser, keyed: Child) -> None:
    with visiting(browser, f"http://127.0.0.1:{keyed.port}") as visit:
        visit.context.add_init_script("sessionStorage['tokenmill.key'] = 'user'")
        visit.open()
        expect(visit.page.get_by_label("Model", exact=True)).to_have_value("fake")
        visit.ask("Which one?")
        assert visit.page.get_by_label("Model", exact=True).locator("optgroup").count() == 0
