"""Pictures for the README, of the page as it is: `make screenshots`."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

from playwright.sync_api import expect

from tests.server.serving import child, request
from tests.web.browsing import LONG, browsing, visiting

FOLDER = Path(__file__).parents[2] / "docs" / "images"
SIZE = {"width": 1280, "height": 800}
LOAD = 6


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        child(Path(folder) / "log", "smollm2-135m") as server,
        browsing() as browser,
    ):
        origin = f"http://127.0.0.1:{server.port}"
        with visiting(browser, origin, viewport=SIZE, device_scale_factor=1.5) as visit:
            visit.open(max_tokens=160)
            visit.ask("Why do leaves change their colour in autumn?")
            visit.page.keyboard.press("Control+Shift+O")
            visit.ask("Write a Python function that checks whether a word is a palindrome.")
            visit.page.screenshot(path=FOLDER / "chat.png")

            visit.page.keyboard.press("Control+Shift+O")
            visit.ask("What is the capital of Japan?")
            visit.ask("What is it known for? Answer in two sentences.")
            visit.act(visit.questions.last, "Edit and ask again")
            visit.page.get_by_label("Your question").fill("How many people live there?")
            visit.page.keyboard.press("Control+Enter")
            visit.wait_for_answer()
            visit.act(visit.answers.last, "Another answer")
            expect(visit.answers.last.locator(".branches")).to_contain_text("2/2")
            visit.wait_for_answer()
            visit.page.screenshot(path=FOLDER / "branches.png")

        tall = {**SIZE, "height": 1000}
        with visiting(browser, origin, viewport=tall, device_scale_factor=1.5, color_scheme="dark") as visit:
            visit.page.goto(f"{origin}/engine")
            threads = [threading.Thread(target=_generate, args=(server.port, i)) for i in range(LOAD)]
            for thread in threads:
                visit.page.wait_for_timeout(700)
                thread.start()
            visit.page.wait_for_timeout(2500)
            visit.page.screenshot(path=FOLDER / "engine.png")
            for thread in threads:
                thread.join()
    print(f"pictures in {FOLDER}")


def _generate(port: int, number: int) -> None:
    """A conversation of a length of its own."""
    session = request(port, "POST", "/v1/sessions", {}).json()["id"]
    text = f"{number}. " + LONG * (1 + 7 * number)
    request(port, "POST", f"/v1/sessions/{session}/generate", {"input": text, "max_tokens": 220, "stream": False})


if __name__ == "__main__":
    main()
