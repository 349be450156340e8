"""The board of a run in a browser: what people see, of a job whose workers are killed, and of logs made for it."""

import contextlib
import re
import shutil
import subprocess
import sys

import pytest
from tests.dist.conftest import JOBS
from tests.ports import free_port
from tests.unit.cli.test_metrics import TOKEN, Job
from tests.waiting import LIMIT_S, until

from holdfast.telemetry.events import (
    Agreed,
    Detected,
    Installed,
    JobEnded,
    Notice,
    Rebuilt,
    StepOps,
    WorkerReady,
)

pytestmark = pytest.mark.dist

CHROMIUM = shutil.which("chromium")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
MARKUP = '<img src="http://192.0.2.1/x" onerror="document.title = 1"><script>document.title = 2</script>'


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("a browser is needed: Debian's package chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        found = play.chromium.launch(
            executable_path=CHROMIUM, args=[*QUIET, "--disable-component-update", "--disable-sync"]
        )
        yield found
        found.close()


class Tab:
    """A page in the browser; what went wrong in it, and what it asked of other machines."""

    def __init__(self, context, address):
        self.page = context.new_page()
        self.page.set_default_timeout(1000 * LIMIT_S)
        self.wrong, self.foreign = [], []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self._note(request.url, address))
        self.page.goto(address)

    def _note(self, url, address):
        if not url.startswith((address, "blob:")):
            self.foreign.append(url)

    def text(self, selector):
        return self.page.inner_text(selector)

    def shows(self, selector, pattern):
        """Waits until an element says something; returns the match."""
        until(lambda: re.search(pattern, self.text(selector)))
        return re.search(pattern, self.text(selector))


@pytest.fixture
def opened(browser):
    """Opens a page; what was wrong in any is an error of the test."""
    tabs, contexts = [], []

    def see(address, *, width=1280, theme="light"):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme))
        tabs.append(Tab(contexts[-1], address))
        return tabs[-1]

    yield see
    for context in contexts:
        context.close()
    for tab in tabs:
        assert (tab.wrong, tab.foreign) == ([], [])


@pytest.fixture
def boards():
    """Serves the board of a run directory; returns the address, and the process."""
    with contextlib.ExitStack() as stack:

        def serve(run_dir, *words, port=0):
            line = [sys.executable, "-m", "holdfast", "board", str(run_dir), "--listen", f"127.0.0.1:{port}", *words]
            process = stack.enter_context(subprocess.Popen(line, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return re.search(r"at (http\S+)", process.stdout.readline())[1], process

        yield serve


@pytest.fixture
def job(tmp_path):
    with contextlib.closing(Job(tmp_path)) as made:
        yield made


def test_a_job_that_loses_a_worker_is_seen_from_its_beginning_to_its_end(runs, boards, opened, tmp_path):
    """It is watched before it begins; a worker is killed in it, and comes back."""
    run_dir = tmp_path / "run"
    tab = opened(boards(run_dir)[0])
    tab.shows("#state", "yet to begin")
    overrides = ("train.steps=12", "checkpoint.every=6", "control.hang_s=200")
    run = runs.train("gpt", "kill:1.2@4:backward", overrides=overrides, run_dir=run_dir)
    assert run.unfired == ()
    tab.shows("#state", "^done$")
    steps = tab.shows("#how-far", r"^(\d+) of (\d+) steps done in 0:")
    assert steps.groups() == ("12", "12")
    cells = tab.page.locator("#workers button")
    assert cells.count() == 12
    assert tab.page.locator("#workers .row").count() == 3
    recovery = tab.shows("#recoveries", r"1\.2 lost in step 4: .* to the next step")
    assert recovery
    parts = tab.page.locator("#recoveries .part").all_inner_texts()
    assert [part.split()[0] for part in parts] == ["found", "agreed", "connected", "next"]
    tab.shows("#lines", "worker 1.2 is lost: process ended: signal 9")
    tab.shows("#figures", r"newest checkpoint\s+step 12")
    tab.shows("#survives", "any 1 worker, up to 7")
    assert tab.page.locator("#layers .weak").count() >= 1
    assert cells.nth(6).get_attribute("class") == "lost"
    for chart in ("loss", "rate"):
        assert tab.page.locator(f"#{chart} canvas").count() == 1
    tab.page.click("#schedule summary")
    tab.shows("#measured-about", r"step 11, as it was run; workers wait [\d.]+ %")
    tab.shows("#planned-about", r"plan of generation 2.*; workers wait [\d.]+ %")
    tab.page.select_option("#which", "interrupted")
    tab.shows("#measured-about", "step 4, as it was run")
    until(lambda: tab.page.evaluate("document.querySelector('#measured').naturalWidth") > 0)
    assert JOBS["gpt"]["grid"] == {"pipelines": 3, "stages": 4, "microbatches": 3, "microbatch_size": 2}


def test_what_happens_is_seen_within_seconds(job, boards, opened):
    job.begin()
    job.steps(3)
    tab = opened(boards(job.run_dir)[0])
    tab.shows("#state", "^running$")
    cell = tab.page.locator("#workers button[data-worker='1.0']")
    assert cell.get_attribute("class") == "member"
    job.write(Detected(worker="1.0", how="process ended: signal 9", generation=1))
    tab.shows("#state", "^recovering$")
    assert cell.get_attribute("class") == "lost"
    tab.shows("#recoveries", "1.0 lost in step 3: under way")
    job.write(Installed(generation=2, workers=("0.0",), strategy="adaptive", owners=1))
    job.write(Agreed(generation=2, step=3, recomputed_microbatches=7), Rebuilt(generation=2))
    job.write(StepOps(worker="0.0", generation=2, step=3, loss=1.5, omitted=False, ops=(), knows_loss=True))
    tab.shows("#state", "^running$")
    tab.shows("#recoveries", r"7 \(layer, micro-batch\) pairs run again, by adaptive")
    tab.shows("#figures", r"loss\s+1\.5")
    tab.shows("#figures", r"workers\s+1 of 2")
    assert tab.page.title().startswith('a "j" · 4/10')


def test_another_attempt_is_shown_instead_of_the_one_before(job, boards, opened):
    job.begin()
    job.steps(3)
    job.write(JobEnded(outcome="lost", step=3))
    tab = opened(boards(job.run_dir)[0])
    tab.shows("#state", "^ended: lost$")
    (job.run_dir / "events.jsonl").rename(job.run_dir / "before.jsonl")
    job.step = 0
    job.begin()
    tab.shows("#state", "^starting$")
    tab.shows("#how-far", "^0 of 10 steps done")
    assert "ended" not in tab.text("#lines")
    assert tab.page.locator("#loss canvas").count() == 0


def test_what_a_run_says_is_text_and_nothing_else(job, boards, opened):
    job.begin()
    job.write(WorkerReady(worker=MARKUP, pid=1, node=MARKUP), Notice(worker=MARKUP, text=MARKUP))
    job.write(Detected(worker="1.0", how=MARKUP, generation=1))
    tab = opened(boards(job.run_dir)[0])
    tab.shows("#lines", re.escape(MARKUP))
    tab.shows("#recoveries", "1.0 lost")
    tab.page.locator("#workers button").last.focus()
    tab.shows("#about", "img src")
    assert tab.page.locator("main img:visible, main script").count() == 0
    assert tab.page.title().startswith('a "j"')


def test_it_is_used_by_the_keyboard(job, boards, opened):
    job.begin()
    grid = tuple(f"{pipeline}.{stage}" for pipeline in range(2) for stage in range(3))
    job.write(Installed(generation=2, workers=grid, strategy="boundary", owners=2))
    tab = opened(boards(job.run_dir)[0])
    until(lambda: tab.page.locator("#workers button").count() == 6)
    for _ in range(20):
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate("document.activeElement.dataset.worker"):
            break
    for key, name in (("ArrowRight", "0.1"), ("ArrowDown", "1.1"), ("End", "1.2"), ("ArrowUp", "0.2"), ("Home", "0.0")):
        tab.page.keyboard.press(key)
        assert tab.page.evaluate("document.activeElement.dataset.worker") == name
        tab.shows("#about", f"^Worker {name}: ")
    tab.page.keyboard.press("Tab")
    assert not tab.page.evaluate("document.activeElement.dataset.worker"), "one stop for all workers"
    job.write(Detected(worker="0.0", how="h", generation=2))
    tab.shows("#about", "^Worker 0.0: lost")
    tab.page.focus("#schedule summary")
    tab.page.keyboard.press("Enter")
    tab.shows("#measured-about", "Measured: ")


def test_it_fits_a_telephone_in_light_and_in_dark(job, boards, opened):
    job.begin()
    job.write(Notice(worker="agent", text="a-word-without-an-end" * 20))
    job.steps(3)
    address, _ = boards(job.run_dir)
    grounds = set()
    for theme in ("light", "dark"):
        tab = opened(address, width=400, theme=theme)
        tab.shows("#state", "^running$")
        until(lambda tab=tab: tab.page.locator("#loss canvas").count() == 1)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 400
        grounds.add(tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        tab.page.click("#theme")
        grounds.add(tab.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert tab.page.locator("#loss canvas").count() == 1
    assert len(grounds) == 2


def ended(process):
    """Kills it, and waits until its port is free."""
    process.kill()
    process.wait(LIMIT_S)


def test_a_board_that_comes_back_is_gone_on_with(job, boards, opened):
    job.begin()
    job.steps(2)
    port = free_port()
    address, process = boards(job.run_dir, port=port)
    tab = opened(address)
    tab.shows("#how-far", "^2 of 10")
    ended(process)
    tab.shows("#trouble", "cannot be reached")
    assert tab.text("#how-far").startswith("2 of 10")
    assert tab.text("#state") == "no word"
    job.steps(1)
    job.write(Notice(worker="agent", text="told while nobody listened"))
    boards(job.run_dir, port=port)
    tab.shows("#how-far", "^3 of 10")
    until(lambda: not tab.page.is_visible("#trouble"))
    assert tab.page.locator("#workers button").count() == 2
    tab.shows("#lines", "told while nobody listened")
    assert tab.page.evaluate("curve.steps.join()") == "0,1,2"
    assert tab.page.locator("#lines li").count() == 3


def test_a_board_of_another_run_at_the_same_address_is_not_mixed_with_the_one_before(job, boards, opened, tmp_path):
    job.begin()
    job.steps(3)
    port = free_port()
    address, process = boards(job.run_dir, port=port)
    tab = opened(address)
    tab.shows("#how-far", "^3 of 10")
    (tmp_path / "other").mkdir()
    with contextlib.closing(Job(tmp_path / "other")) as other:
        other.begin()
        other.steps(2)
        ended(process)
        boards(other.run_dir, port=port)
        tab.shows("#how-far", "^2 of 10")
    assert tab.page.evaluate("curve.steps.join()") == "0,1"
    assert tab.page.locator("#lines li").count() == 2


def test_a_token_is_asked_for_and_kept_for_the_session(job, boards, opened, tmp_path):
    job.begin()
    job.steps(2)
    (tmp_path / "token").write_text(TOKEN)
    tab = opened(boards(job.run_dir, "--token-file", str(tmp_path / "token"))[0])
    tab.shows("#trouble", "token of this board is needed")
    assert tab.text("#name") == "Holdfast"
    for wrong in ("wrong", "\N{CYRILLIC SMALL LETTER A}"):
        tab.page.fill("#token", wrong)
        tab.page.press("#token", "Enter")
        tab.shows("#trouble", "That is not the token")
        assert tab.page.is_visible("#login")
    tab.page.fill("#token", TOKEN)
    tab.page.press("#token", "Enter")
    tab.shows("#how-far", "^2 of 10")
    tab.page.reload()
    tab.shows("#how-far", "^2 of 10")
    assert not tab.page.is_visible("#login")
    assert TOKEN not in tab.page.url


def test_a_thousand_workers_are_shown(job, boards, opened):
    job.begin()
    grid = tuple(f"{pipeline}.{stage}" for pipeline in range(125) for stage in range(8))
    job.write(Installed(generation=2, workers=grid, strategy="boundary", owners=125))
    tab = opened(boards(job.run_dir)[0])
    until(lambda: tab.page.locator("#workers button").count() == 1000)
    job.write(*(Detected(worker=f"7.{stage}", how="its node n7 is gone", generation=2) for stage in range(8)))
    until(lambda: tab.page.locator("#workers .lost").count() == 8)
    tab.shows("#modes", "lost: 8")
