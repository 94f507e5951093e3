"""The page in a real browser, where there is one."""

import os
import shutil
import signal
import threading
from importlib.util import find_spec

import pytest

from jaxblt.inference.engine import Engine
from jaxblt.inference.server import Service, run_server
from tests.inference.server.conftest import CONFIG, LIMITS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None, reason="there is no Chromium, or no Playwright"
)


def use(address, bytes_asked):
    """Ask twice, with a wrong key and the right one; return what the page shows."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.set_default_timeout(120_000)
        page.goto(address)
        page.wait_for_function("document.querySelector('#error').textContent.includes('key')")
        page.fill("#key", "secret")
        page.fill("#prompt", "é")
        page.fill("#max_tokens", str(bytes_asked))
        page.click("#go")
        page.wait_for_function("document.querySelector('#told').textContent")
        shown = {
            "error": page.text_content("#error"),
            "model": page.text_content("#model"),
            "prompt": page.locator(".byte.prompt").all_text_contents(),
            "drawn": page.locator(".byte:not(.prompt)").count(),
            "bars": page.locator(".bar").count(),
        }
        browser.close()
    return shown


@needs_browser
def test_the_page_shows_bytes_as_they_come(run):
    shown, wrong = {}, []

    def started(address):
        def work():
            try:
                shown.update(use(address, 40))
            except BaseException as error:
                wrong.append(error)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=work).start()

    engine = Engine(run, CONFIG)
    with engine:
        service = Service(run, engine, "tiny", key="secret", limits=LIMITS)
        run_server(service, host="127.0.0.1", port=0, drain_s=60, started=started)
    if wrong:
        raise wrong[0]
    drawn = shown.pop("drawn")
    assert shown == {"error": "", "model": "tiny", "prompt": ["é", "·"], "bars": drawn}
    assert 0 < drawn <= 40
