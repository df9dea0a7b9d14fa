"""Headless Chromium, driven by selenium through the system's own chromedriver."""

import contextlib
import os
import shutil
import time

import pytest


def _find(*names):
    return next((path for path in map(shutil.which, names) if path), None)


@contextlib.contextmanager
def chromium():
    """A selenium driver. Skips the test where no browser is installed."""
    browser, driver = _find("chromium", "chromium-browser", "google-chrome"), _find("chromedriver")
    if not browser or not driver:
        missing = "no chromium" if not browser else "no chromedriver"
        pytest.skip(f"{missing} on this machine: the page cannot be opened (Debian: chromium, chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # chromium's sandbox refuses root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    page = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield page
    finally:
        page.quit()


def show(page, path, *, width, height=900, dark=False):
    """Open a file at a width in CSS pixels (below 500 as a phone), and wait until the charts are drawn."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    page.get(path.as_uri())
    wait_for(page, "return document.querySelectorAll('.main-svg').length >= 4")


def wait_for(page, script, seconds=20):
    """The script's value once it is true."""
    deadline = time.monotonic() + seconds
    while True:
        value = page.execute_script(script)
        if value:
            return value
        assert time.monotonic() < deadline, f"never true: {script}"
        time.sleep(0.05)
