"""Builds the documentation site: `make docs`, or `python -m docs.build`.

1. Runs the guides, and makes notebooks of them (`guides.py`).
2. Runs the examples of all docstrings (`examples.py`).
3. Writes a page for each public name (`reference.py`).
4. Copies the pages of the repository, and runs Sphinx.

Nothing is read from a network. What ran is kept in `docs/build/`, until what
it depends on changes; `--fresh` runs everything again.
"""

import argparse
import hashlib
import json
import os
import pathlib
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

os.environ.setdefault("KERAS_BACKEND", "jax")

from docs import examples, guides, reference

ROOT = pathlib.Path(__file__).parent.parent
BUILD = ROOT / "docs" / "build"
# Files of the repository, and their pages.
PAGES = {
    "README.md": "index",
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changelog",
    "LICENSE": "license",
    "tests/README.md": "promises",
    "benchmarks/README.md": "benchmarks/index",
    "upstream/README.md": "upstream",
}
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def pages():
    """`{file of the repository: its page}`."""
    found = dict(PAGES)
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        name = path.relative_to(ROOT).as_posix()
        found[name] = f"benchmarks/{path.stem}"
    for path in [*guides.guides(), *texts()]:
        name = path.relative_to(ROOT).as_posix()
        found[name] = f"guides/{guides.name_of(path)}"
    return found


def texts():
    """The guides that are text alone."""
    return sorted((ROOT / "guides").rglob("*.md"))


def relinked(text, file, source):
    """A text of the repository with links to the pages of the site.

    Args:
        text: string, Markdown.
        file: string, the file it is from, relative to the repository.
        source: path, the folder of the site's sources. Files that have no
            page are copied there.
    """
    known = pages()
    here = posixpath.dirname(known[file])

    def replace(match):
        target = posixpath.normpath(
            posixpath.join(posixpath.dirname(file), match[1])
        )
        if (ROOT / target).is_dir() and target != "guides":
            target = f"{target}/README.md"
        if target == "guides":
            found = "guides/index.md"
        elif target in known:
            end = ".ipynb" if target.endswith(".py") else ".md"
            found = known[target] + end
        elif (ROOT / target).is_file():
            found = f"files/{target}"
            (source / found).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / target, source / found)
        else:
            raise ValueError(
                f"A link must lead to a file. Received: {match[1]!r} in {file}"
            )
        return f"]({posixpath.relpath(found, here)}{match[2] or ''})"

    return LINK.sub(replace, text)


def copy_pages(source):
    """Writes the pages that are files of the repository."""
    for file, page in pages().items():
        if file.endswith(".py"):
            continue
        text = (ROOT / file).read_text(encoding="utf-8")
        if file == "LICENSE":
            text = f"# License\n\n```text\n{text}```\n"
        elif not re.search(r"^# ", text, re.MULTILINE):
            # A table of results.
            text = f"# {pathlib.Path(page).name}\n\n{text}"
        # Its sections are part of the first page.
        target = source / f"{'readme' if page == 'index' else page}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(relinked(text, file, source), encoding="utf-8")
    # The tables of results, below the page on benchmarks.
    names = [p.stem for p in (ROOT / "benchmarks/results").glob("*.md")]
    listed = "\n".join(sorted(names))
    with open(source / "benchmarks" / "index.md", "a") as file:
        file.write(f"\n\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n")


def write_guides(source, fresh, may_run):
    """Writes the notebooks of the guides, and the page that lists them."""
    names = {guides.name_of(path): path for path in guides.guides()}
    listed = {}
    for name, path in names.items():
        made = guides.record(path, BUILD / "runs", fresh, may_run)
        target = source / "guides" / f"{name}.ipynb"
        target.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(guides.notebook(path, made, set(names)))
        target.write_text(text, encoding="utf-8")
        copy = source / "files" / "guides" / f"{name}.py"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
        fields = guides.header(path)
        listed[name] = fields["Title"], fields["Description"], ".ipynb"
    for path in texts():
        title, _, rest = path.read_text(encoding="utf-8").partition("\n")
        text = " ".join(rest.strip().partition("\n\n")[0].split())
        about = reference.summary(text)
        listed[guides.name_of(path)] = title.lstrip("# "), about, ".md"
    index = source / "guides" / "index.md"
    index.write_text(guides_page(listed), encoding="utf-8")


def guides_page(listed):
    """The page that lists guides, by folder.

    Args:
        listed: dict from names to `(title, description, end of the file)`.
    """
    lines = [
        "# Guides",
        "Each guide is a script that runs from top to bottom, on a tiny model "
        "that it makes. The outputs and plots here are those of such a run. "
        "For a real model change one line, `preset`.",
    ]
    # The first one first.
    names = sorted(listed, key=lambda name: (name != "quickstart", name))
    for folder in sorted({name.rpartition("/")[0] for name in names}):
        if folder:
            lines.append(f"## {folder.capitalize()}")
        rows = ["| guide | about |", "|---|---|"]
        for name in names:
            title, about, end = listed[name]
            if name.rpartition("/")[0] == folder:
                rows.append(f"| [{title}]({name}{end}) | {about} |")
        lines.append("\n".join(rows))
    toctree = "\n".join(names)
    lines.append(f"```{{toctree}}\n:hidden:\n\n{toctree}\n```")
    return "\n\n".join(lines) + "\n"


def run_all(runner):
    """Runs all examples; then an error names those that failed."""
    found, failed = [], []
    for example in examples.examples():
        try:
            found.append(runner.run(example))
        except Exception:
            traceback.print_exc()
            failed.append(example.name)
    if failed:
        raise ValueError(f"Examples failed: {', '.join(failed)}.")
    return found


def outcomes(fresh):
    """The outcomes of all examples; they run if the code has changed."""
    digest = hashlib.sha256()
    files = [*(ROOT / "keras_posttrain").rglob("*.py"), examples.__file__]
    for path in sorted(map(str, files)):
        digest.update(pathlib.Path(path).read_bytes())
    kept = BUILD / f"examples-{digest.hexdigest()[:16]}.json"
    if kept.exists() and not fresh:
        return examples.read_outcomes(kept)
    with tempfile.TemporaryDirectory() as folder:
        found = run_all(examples.Runner(folder))
    found = with_vllm(found)
    BUILD.mkdir(parents=True, exist_ok=True)
    for old in BUILD.glob("examples-*.json"):
        old.unlink()
    examples.write_outcomes(found, kept)
    return found


def with_vllm(found):
    """Runs the examples that need vLLM by its environment, if there is one."""
    names = [o.example.name for o in found if "vllm" in (o.skipped or "")]
    python = guides.vllm_python()
    if not names or python is None:
        return found
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "outcomes.json"
        command = [python, "-m", "docs.examples", "--json", path, *names]
        subprocess.run(command, check=True, cwd=ROOT)
        ran = {o.example: o for o in examples.read_outcomes(path)}
    return [ran.get(o.example, o) for o in found]


def write_reference(source, fresh):
    found = outcomes(fresh)
    groups = reference.write(source / "reference", found)
    skipped = [o for o in found if o.skipped]
    print(f"{len(found) - len(skipped)} examples ran, {len(skipped)} did not:")
    for outcome in skipped:
        print(f"  {outcome.example.name}: {outcome.skipped}")
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    rows = [
        f"| [{title}]({slug}.md) | {lead} |"
        for slug, title, lead, _ in reference.GROUPS
        if slug in groups
    ]
    text = text.replace("{rows}", "\n".join(rows))
    text = text.replace("{groups}", "\n".join(groups))
    (source / "reference" / "index.md").write_text(text, encoding="utf-8")


def timed(title, function, *arguments):
    started = time.perf_counter()
    function(*arguments)
    print(f"{title}: {time.perf_counter() - started:.0f} s", flush=True)


def run_sphinx(source, site):
    """Every warning is an error: a link or a name that is not there."""
    made = BUILD / "html"
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-j", "2"]
    command += ["-W", "--keep-going", "-c", ROOT / "docs"]
    command += ["-d", BUILD / "doctrees", source, made]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=env)
    shutil.rmtree(site, ignore_errors=True)
    # Files that only Sphinx reads stay behind.
    shutil.copytree(made, site, ignore=shutil.ignore_patterns(".*", "*.inv"))


def replace_changed(new, old):
    """Moves new sources to their place; equal files keep their dates.

    Sphinx reads again only what has changed.
    """
    for path in [p for p in old.rglob("*") if p.is_file()]:
        if not (new / path.relative_to(old)).exists():
            path.unlink()
    for path in [p for p in new.rglob("*") if p.is_file()]:
        target = old / path.relative_to(new)
        data = path.read_bytes()
        if not target.exists() or target.read_bytes() != data:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fresh", action="store_true", help="run all again")
    parser.add_argument(
        "--no-guides",
        action="store_true",
        help="run no guide; those that have not run have no outputs",
    )
    arguments = parser.parse_args()
    source = BUILD / "source"
    source.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        new = pathlib.Path(folder)
        timed(
            "guides",
            write_guides,
            new,
            arguments.fresh,
            not arguments.no_guides,
        )
        timed("examples", write_reference, new, arguments.fresh)
        shutil.copy(ROOT / "docs" / "index.md", new)
        copy_pages(new)
        replace_changed(new, source)
    timed("Sphinx", run_sphinx, source, ROOT / "site")
    print(f"The site is in {ROOT / 'site'}/; open index.html.")


if __name__ == "__main__":
    main()
