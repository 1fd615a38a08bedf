"""The documentation: examples run, every name has one, and links resolve."""

import json
import re
import textwrap

import pytest

import keras_posttrain as kpt
from docs import build, examples, guides, reference

# Those that compile most. What they show, tests in CI show too.
SLOW = {
    f"keras_posttrain.{name}"
    for name in (
        "AdamW8bit",
        "DPOTask",
        "DistillTask",
        "GRPOTask",
        "Loop",
        "PPOTask",
        "RewardTask",
        "Task.plan",
        "callbacks.CompletionsLog",
        "callbacks.UpdateReference",
        "callbacks.WandB",
        "distribution.search",
        "distribution.shapes_only",
        "episodes.Gym",
        "episodes.Tools",
        "evaluation.reasoning_gym",
        "sweep",
    )
}


def test_every_public_name_has_an_example():
    named = {example.name for example in examples.examples()}
    assert [n for n in examples.public_names() if n not in named] == []


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    # Small and without training: what the model knows changes no value in a
    # comment.
    folder = tmp_path_factory.mktemp("examples")
    return examples.Runner(folder, epochs=0, num_layers=1)


def cases():
    for place, names in reference.grouped().items():
        for is_slow in (False, True):
            chosen = [
                example
                for example in examples.examples()
                if (example.name in SLOW) == is_slow
                and any(
                    example.name == n or example.name.startswith(f"{n}.")
                    for n in names
                )
            ]
            if chosen:
                yield pytest.param(
                    chosen,
                    id=reference.GROUPS[place][0] + "-slow" * is_slow,
                    marks=pytest.mark.full if is_slow else (),
                )


# As in `evaluation/test_inspect.py`, for Inspect AI.
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:The 'initial' parameter:DeprecationWarning",
)
@pytest.mark.contract
@pytest.mark.parametrize("chosen", list(cases()))
def test_examples_run(runner, eight_devices, chosen):
    done = [runner.run(example) for example in chosen]
    assert any(not outcome.skipped for outcome in done)


def test_only_examples_of_vllm_are_not_run():
    """`make test-vllm` runs them."""
    libraries = {"trackio", "wandb", "mlflow", "tensorboardX"}
    not_run = {
        example.name
        for example in examples.examples()
        if (why := examples.missing(example))
        and not any(name in why for name in libraries | {"reasoning_gym"})
    }
    assert not_run <= {"keras_posttrain.rollout.VLLMRollout"}


def one(source):
    return examples.Example("keras_posttrain.losses.dpo_loss", source)


def test_values_in_comments_are_compared(tmp_path):
    runner = examples.Runner(tmp_path)
    right = "x = 0.5\nx + x  # 1.0\ny = x\n# y is log(e) / 2\nx, 2  # 0.5, 2"
    outcome = runner.run(one(right))
    assert outcome.num_compared == 3 and outcome.text == "1.0\n(0.5, 2)"
    for wrong in ("0.5  # 0.6", "x = 0.5\n# x is 0.6", '"a"  # "b"'):
        with pytest.raises(AssertionError, match="not"):
            runner.run(one(wrong))


def test_an_example_gets_what_it_reads():
    setup = examples.setup_of(one("def f(task): pass\ntask.fit(rows)"))
    assert list(setup) == ["kpt", "rows", "task"]
    assert setup["task"].endswith("task.compile()")
    assert examples.setup_of(one("rows = []\nprint(rows)")) == {}


def test_every_name_has_a_page_of_its_own():
    golden = build.ROOT / "tests" / "golden" / "public_api.txt"
    lines = golden.read_text(encoding="utf-8")
    named = re.findall(r"^(?:class )?([\w.]+)\(", lines, re.MULTILINE)
    assert set(named) == set(examples.public_names())
    pages = [reference.page_of(n).lower() for n in examples.public_names()]
    assert len(set(pages)) == len(pages)
    grouped = [n for names in reference.grouped().values() for n in names]
    assert sorted(grouped) == sorted(examples.public_names())


def test_a_page_has_the_example_and_its_output(tmp_path):
    name = "keras_posttrain.losses.dpo_loss"
    [example] = [e for e in examples.examples() if e.name == name]
    outcome = examples.Runner(tmp_path).run(example)
    page = reference.page(name, kpt.losses.dpo_loss, {name: [outcome]})
    parts = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert parts == ["Example", "Arguments", "Returns", "References"]
    assert example.source in page and outcome.text in page
    assert "\n`beta`\n: float, the strength" in page
    assert "```{py:function} dpo_loss(chosen_ratios, rejected" in page


def test_links_of_the_pages_resolve(tmp_path):
    build.copy_pages(tmp_path)
    for file, page in build.pages().items():
        if file.endswith(".py"):
            continue
        name = "readme" if page == "index" else page
        text = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
        for link, _ in build.LINK.findall(text):
            target = (tmp_path / f"{page}.md").parent / link
            known = target.resolve().relative_to(tmp_path.resolve())
            written = {*build.pages().values(), "guides/index"}
            is_page = known.with_suffix("").as_posix() in written
            assert is_page or target.exists(), (file, link)
    with pytest.raises(ValueError, match="must lead to a file"):
        build.relinked("[x](nowhere.md)", "README.md", tmp_path)


GUIDE = '''
"""
Title: A guide
Description: What it shows.
Last modified: 2026/11/25
"""

"""
## First

See `other.py`.
"""

import sys
import {library}

print("folder", sys.argv[1], __name__)

"""
## Second
"""

{code}
'''


def test_a_notebook_has_what_its_guide_printed_and_drew(tmp_path, monkeypatch):
    monkeypatch.setattr(guides, "ROOT", tmp_path)
    path = tmp_path / "guides" / "recipes" / "one.py"
    path.parent.mkdir(parents=True)
    code = """
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
        pyplot.plot([1, 2])
        print("10%\\r100%")
        print("I0000 00:00:1 1 port.cc:153] oneDNN", file=sys.stderr)
    """
    code = textwrap.dedent(code)
    path.write_text(GUIDE.format(library="json", code=code))
    kept = tmp_path / "kept"
    assert guides.record(path, kept, may_run=False) is None
    made = guides.record(path, kept)
    names = {"recipes/one", "other"}
    cells = guides.notebook(path, made, names)["cells"]
    assert cells[0]["source"].startswith("# A guide\n\nWhat it shows.")
    assert "[`other.py`](../other.ipynb)" in cells[1]["source"]
    assert cells[2]["outputs"][0]["text"] == "folder out __main__\n"
    text, figure = cells[4]["outputs"]
    assert text["text"] == "100%\n" and figure["data"]["image/png"]
    # It does not run again, until it changes.
    [file] = kept.iterdir()
    file.write_text(json.dumps(made | {"date": "kept"}))
    assert guides.record(path, kept)["date"] == "kept"
    path.write_text(GUIDE.format(library="json", code="raise ValueError(1)"))
    with pytest.raises(Exception, match="exit status 1"):
        guides.record(path, kept)
