"""Opens every page of the site in a headless Chromium: `make docs-check`.

Checked are links and their anchors, requests to a network, errors of the
console, pages that are wider than a phone (400 pixels) or a screen (1,400),
that every public name has a page, and that the search finds names.
"""

import os
import pathlib
import sys
import urllib.parse

os.environ.setdefault("KERAS_BACKEND", "jax")

from docs import examples, reference
from tests.callbacks import browser

SITE = pathlib.Path(__file__).parent.parent / "site"
WIDTHS = (400, 1400)
# All links of a page and the targets of links to it.
READ = """({
    links: [...document.querySelectorAll("a[href]")].map(a => a.href),
    images: [...document.images].map(i => [i.src, i.naturalWidth]),
    ids: [...document.querySelectorAll("[id]")].map(e => e.id),
    width: document.documentElement.scrollWidth,
})"""
WIDEST = """[...document.querySelectorAll("main *")]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1)
    .slice(0, 3).map(e => e.outerHTML.slice(0, 120))"""
FOUND = """[...document.querySelectorAll("#search-results li a")]
    .map(a => a.textContent)"""


def pages(site):
    return sorted(site.rglob("*.html"))


def check_page(tab, page, problems):
    """Opens a page in all widths; returns its links and anchors."""
    tab.open(page, has="article", pause=0)
    for width in WIDTHS:
        tab.resize(width)
        found = tab.run(READ)
        if found["width"] > width:
            problems.append(
                f"{page.name} is {found['width']} pixels wide at {width}: "
                f"{tab.run(WIDEST)}"
            )
    for source, natural in found["images"]:
        if not natural:
            problems.append(f"{page.name}: no image {source}")
    return found


def check_links(found, problems):
    """Checks all links between the pages, with their anchors."""
    for page, content in found.items():
        for link in set(content["links"]):
            address = urllib.parse.urlparse(link)
            if address.scheme in ("http", "https", "mailto"):
                continue
            path = pathlib.Path(urllib.parse.unquote(address.path))
            anchor = urllib.parse.unquote(address.fragment)
            if not path.exists():
                problems.append(f"{page}: dead link {link}")
            elif anchor and path in found:
                if anchor not in found[path]["ids"]:
                    problems.append(f"{page}: no anchor {link}")


def check_search(tab, site, name, problems):
    """Checks that the search finds the page of a name."""
    tab.open(site / "search.html", query=f"?q={name}", has="article")
    try:
        tab.wait(f"{FOUND}.length")
    except AssertionError:
        problems.append(f"The search does not find {name}")


def check(site, problems):
    for name in examples.public_names():
        page = site / "reference" / f"{reference.page_of(name)}.html"
        if not page.exists():
            problems.append(f"{name} has no page")
        elif f'id="{name}"' not in page.read_text(encoding="utf-8"):
            problems.append(f"{page.name} does not describe {name}")
    tab = browser.Browser()
    try:
        found = {page: check_page(tab, page, problems) for page in pages(site)}
        check_links(found, problems)
        for name in ("GRPOTask", "dpo_loss", "packing"):
            check_search(tab, site, name, problems)
        problems += [f"console: {error}" for error in set(tab.errors)]
        problems += [
            f"a request to a network: {url}"
            for url in set(tab.requests)
            if not url.startswith(("file:", "data:"))
        ]
    finally:
        tab.close()
    return len(found)


def main():
    problems = []
    count = check(SITE, problems)
    print("\n".join(problems))
    print(f"{count} pages, {len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
