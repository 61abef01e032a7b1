"""Takes a picture of a report: python tools/screenshot.py REPORT.html PICTURE.png [HEIGHT]."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main() -> None:
    page_file, picture, *rest = sys.argv[1:]
    height = int(rest[0]) if rest else 1400
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": height})
        page.goto(Path(page_file).resolve().as_uri())
        page.wait_for_function("document.querySelectorAll('.main-svg').length > 0")
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main()
