"""What people see in a browser: a stuck rollout in the real Temporal UI, and the report page.

Needs Chromium and its driver: `apt-get install chromium chromium-driver` (or Chrome with
chromedriver on the path), and `pip install selenium`. Skipped, with these words, where they are not.
RECORD_PICTURES=1 writes docs/pictures again, but for report.png, which shows the demo's run.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import pytest
from temporalio.client import Client

from rollbook.report import page
from tests.short_run import RUN as TRAINED
from tests.short_run import ShortRun
from tests.stuck_run import RUN, StuckRun

pytestmark = [pytest.mark.ui, pytest.mark.timeout(400)]

T = TypeVar("T")

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
INSTALL = "apt-get install chromium chromium-driver, and pip install selenium"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if found is None or driver is None:
        pytest.skip(f"no Chromium with its driver is installed: {INSTALL}")
    webdriver = pytest.importorskip("selenium.webdriver", reason=INSTALL)
    options = webdriver.ChromeOptions()
    options.binary_location = found
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--window-size=1600,1000",
    ):
        options.add_argument(argument)
    service = webdriver.ChromeService(executable_path=driver)
    running = webdriver.Chrome(options=options, service=service)
    yield running
    running.quit()


def until(look: Callable[[], T], *, seconds: float = 60.0) -> T:
    end = time.monotonic() + seconds
    while not (seen := look()):
        if time.monotonic() > end:
            raise TimeoutError(f"it did not appear within {seconds:g} s")
        time.sleep(0.5)
    return seen


def text(browser: Any) -> str:
    return str(browser.execute_script("return document.body.innerText"))


def framed(browser: Any) -> str:
    """The text within the page's frames: the UI renders Markdown in one."""
    told = []
    for frame in browser.find_elements("tag name", "iframe"):
        browser.switch_to.frame(frame)
        told.append(text(browser))
        browser.switch_to.default_content()
    return "\n".join(told)


def picture(browser: Any, name: str) -> None:
    if os.environ.get("RECORD_PICTURES"):
        PICTURES.mkdir(exist_ok=True)
        browser.save_screenshot(str(PICTURES / f"{name}.png"))


async def test_one_query_finds_the_stuck_group_and_its_page_says_why(
    stuck_run: StuckRun, browser: Any
) -> None:
    query = f'RollbookRun="{RUN}" AND RollbookStage="stuck"'
    services = stuck_run.services
    client = await Client.connect(services.temporal_address, namespace=services.temporal_namespace)
    end = time.monotonic() + 90  # the steward sweeps every half minute
    while not (found := [each.id async for each in client.list_workflows(query)]):
        assert time.monotonic() < end, "no group is marked as stuck"
    listing = f"{services.temporal_ui}/namespaces/{services.temporal_namespace}/workflows"
    browser.get(f"{listing}?query={quote(query)}")
    until(lambda: any(each in text(browser) for each in found))
    picture(browser, "stuck-groups")
    links = browser.find_elements("css selector", f"a[href*='{quote('run/' + RUN, safe='')}']")
    assert links, "the list has no link to the stuck group"
    # .../workflows/ID/RUN_ID/history: the same workflow has a page for each of the following.
    workflow, _, _ = links[0].get_attribute("href").rpartition("/")
    browser.get(f"{workflow}/pending-activities")
    until(lambda: "verifier" in text(browser))  # by the attempt's heartbeat
    picture(browser, "stuck-attempt")
    browser.find_element("link text", "User Metadata").click()
    # By the workflow's own current details.
    until(lambda: "the reward function has not answered" in text(browser) + framed(browser))
    picture(browser, "stuck-group")


def test_the_report_shows_details_under_the_pointer(
    short_run: ShortRun, browser: Any, tmp_path: Path
) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    path = tmp_path / "report.html"
    path.write_text(short_run.ledger.call(page.render, TRAINED), encoding="utf-8")
    browser.set_window_size(1160, 1500)
    browser.get(path.as_uri())
    log = [entry["message"] for entry in browser.get_log("browser")]
    assert [message for message in log if path.name in message] == []
    bar = browser.find_element("css selector", "svg.timeline rect[data-tip*='trained in step']")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", bar)
    ActionChains(browser).move_to_element(bar).perform()
    tip = browser.find_element("id", "tip")
    assert tip.is_displayed()
    assert "trained in step" in tip.text
    picture(browser, "timeline")
