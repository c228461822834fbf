"""Measure the playground in a real browser: its start, the first token, and streaming.

    python -m tools.page_speed --out_dir=out-shakespeare-char

It compares with sample.py, alternating, while the browser is open. It needs playwright and an
installed Chromium.
"""

import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from folio import process
from folio.errors import UserError
from folio.fields import setting
from folio.settings import ROOT, load, parse_arguments

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--no-sandbox",  # Chromium's sandbox does not start as root
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Seconds from the click to the first token of the continuation, and to the last of COUNT.
WATCH = """
() => new Promise(resolve => {
    const tokens = () => document.querySelectorAll(".tokens .token[title$='%']").length;
    const before = tokens(), clicked = performance.now();
    let first = null;
    const observer = new MutationObserver(() => {
        const seconds = (performance.now() - clicked) / 1000;
        if (first === null && tokens() > 0 && tokens() != before) first = seconds;
        if (first === null || tokens() < COUNT) return;
        observer.disconnect();
        resolve([first, seconds]);
    });
    observer.observe(document.body, {childList: true, subtree: true});
    document.querySelector("button.primary").click();
})
"""


@dataclass(frozen=True)
class PageSpeedConfig:
    """Time the playground's start, its first token, and its streaming."""

    out_dir: str = setting("out", "folder of the run", scope="files")
    tokens: int = setting(500, "tokens per text", "[2, inf)")
    repeats: int = setting(5, "repetitions", "[1, inf)")
    port: int = setting(7999, "port of the playground", "[1, 65535]")


if __name__ == "__main__":
    process.start(parse_arguments, PageSpeedConfig)


def main(argv=None):
    settings = load(PageSpeedConfig, argv)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise UserError("this needs playwright: pip install playwright") from error
    if not BROWSER:
        raise UserError("this needs an installed Chromium or Chrome")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        starts = [start_seconds(chromium, settings) for _ in range(settings.repeats)]
        rates = compared_rates(chromium, settings)
        chromium.close()
    imports, ready = zip(*starts, strict=True)
    print(f"import torch {median(imports):.2f} s; page ready {median(ready):.2f} s after the start")
    firsts, pages, samples = zip(*rates, strict=True)
    print(f"first token {median(firsts):.2f} s after the click, at most {max(firsts):.2f} s")
    print(
        f"page {median(pages):,.0f} tokens/s, sample.py --stream {median(samples):,.0f}; "
        f"median ratio {median(p / s for p, s in zip(pages, samples, strict=True)):.2f}"
    )
    for row in (imports, ready, firsts, pages, samples):
        print("  ".join(f"{value:.3g}" for value in row))


def start_seconds(chromium, settings):
    """Returns the seconds to import torch, and those until the playground's page is usable."""
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    imported = time.monotonic() - begin
    page, begin = chromium.new_page(), time.monotonic()
    with playground(settings), opened(page, settings):
        return imported, time.monotonic() - begin


def compared_rates(chromium, settings):
    """Returns (seconds to the first token, tokens/s of the page, of sample.py) of each repetition.

    The page's speed is measured from the click to the last token. The first text is not counted.
    """
    page, found = chromium.new_page(), []
    with playground(settings), opened(page, settings):
        page.get_by_label("max_new_tokens").fill(str(settings.tokens))
        for seed in range(settings.repeats + 1):
            page.get_by_label("seed", exact=True).fill(str(seed))
            page.wait_for_timeout(1000)
            first, last = page.evaluate(WATCH.replace("COUNT", str(settings.tokens)))
            found.append((first, settings.tokens / last, sample_rate(settings, seed)))
    return found[1:]


def sample_rate(settings, seed):
    """Returns the tokens per second that sample.py reports."""
    flags = (f"--max_new_tokens={settings.tokens}", f"--seed={seed}", "--num_samples=1", "--stream")
    command = [sys.executable, ROOT / "sample.py", f"--out_dir={settings.out_dir}", *flags]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(re.search(r"([\d,]+) tokens/s", done.stderr)[1].replace(",", ""))


@contextmanager
def playground(settings):
    """Runs the playground in another process."""
    flags = (f"--out_dir={settings.out_dir}", f"--port={settings.port}")
    command = [sys.executable, "-m", "tools.playground", *flags]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if "open http" not in server.stdout.readline():
            raise UserError("the playground did not start")
        yield
    finally:
        server.terminate()
        server.wait()


@contextmanager
def opened(page, settings):
    """Opens the page and waits until its button is visible."""
    page.goto(f"http://127.0.0.1:{settings.port}/")
    page.get_by_role("button", name="Generate", exact=True).wait_for()
    try:
        yield
    finally:
        page.close()


if __name__ == "__main__":
    process.run(main)
