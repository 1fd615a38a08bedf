"""Writes the reference: a page for each public name, from its docstring."""

import functools
import inspect
import re
import textwrap

from docs import examples

# The groups of the reference, each with names or the beginnings of names.
# A name that is in no group is listed in the last.
GROUPS = (
    (
        "tasks",
        "Tasks",
        "A task is a `keras.Model` with a goal to train a language model for.",
        "SFTTask DPOTask RewardTask GRPOTask PPOTask DistillTask Loop Datum "
        "Task RolloutTask",
    ),
    (
        "models",
        "Models and tokenizers",
        "What a task is made from.",
        "LoRA Quantization Tokenizer examples.",
    ),
    (
        "data",
        "Data",
        "Rows are dicts, in lists, files and streams.",
        "data.",
    ),
    (
        "losses",
        "Losses",
        "Each loss is a pure function of arrays, and a class that holds its "
        "settings. `compile(loss=...)` takes the class.",
        "losses.",
    ),
    (
        "rewards",
        "Rewards",
        "A reward is a function that scores completions. These are ready to "
        "use.",
        "rewards.",
    ),
    (
        "rollouts",
        "Rollouts",
        "Engines that sample completions from the policy's weights.",
        "rollout.",
    ),
    (
        "episodes",
        "Episodes",
        "Several turns, tools, games and agents: `compile(episode=...)`.",
        "episodes.",
    ),
    (
        "callbacks",
        "Callbacks, reports and sweeps",
        "Save, log, trace, show and compare runs.",
        "callbacks. report sweep",
    ),
    (
        "evaluation",
        "Metrics and evaluation",
        "Metrics for `task.evaluate`, win rates, and evaluation harnesses.",
        "metrics. evaluation.",
    ),
    (
        "distribution",
        "Distribution and planning",
        "Layouts over several devices, and plans for hardware that is not "
        "there.",
        "distribution.",
    ),
    (
        "serve",
        "Server",
        "A server of the Tinker API, on your own device. `import "
        "keras_posttrain.serve` makes it available.",
        "serve.",
    ),
    (
        "optimizers",
        "Optimizers",
        "In addition to those of Keras and Optax.",
        "AdamW8bit decay_mask",
    ),
    ("more", "More", "Other public names.", ""),
)
# Losses by the file that defines them.
LOSSES = {
    "language_modeling": "Fine-tuning",
    "preference": "Preference pairs",
    "pair_loss": "Preference pairs",
    "reference_free": "Preference pairs without a reference",
    "unpaired": "Labelled completions",
    "reward_modeling": "Reward models",
    "policy_gradient": "Policy gradients",
    "policy_base": "Policy gradients",
    "corrections": "Corrections and masks of policy gradients",
    "importance": "Corrections and masks of policy gradients",
    "advantages": "Advantages",
    "turn_advantages": "Advantages",
    "value": "Value functions",
    "distillation": "Distillation",
    "divergence": "Distillation",
    "features": "Distillation",
    "f_divergences": "Divergences of preference losses",
    "router": "Mixtures of experts",
}
SECTION = re.compile(
    r"^(Args|Call arguments|Attributes|Returns|Yields|Raises|References?"
    r"|Examples?):$",
    re.MULTILINE,
)
# Runnable code comes before the tables of arguments.
ORDER = (
    "Example Args Call_arguments Attributes Returns Yields Raises References"
)
ENTRY = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*): ?", re.M)
TITLES = {
    "Args": "Arguments",
    "Examples": "Example",
    "Reference": "References",
}


def short(name):
    """A name as users write it."""
    return name.replace("keras_posttrain", "kpt", 1)


def group_of(name):
    """The group of a public name, as its place in `GROUPS`."""
    rest = name.partition(".")[2]
    for place, (*_, wanted) in enumerate(GROUPS[:-1]):
        for part in wanted.split():
            if rest == part or part.endswith(".") and rest.startswith(part):
                return place
    return len(GROUPS) - 1


def page_of(name):
    """The path of a name's page without its end, in the reference.

    Two names that differ in case only get different files on every disk.
    """
    stem = name.partition(".")[2]
    value = examples.public_names()[name]
    is_double = any(
        other != name and other.lower() == name.lower()
        for other in examples.public_names()
    )
    if is_double and not isinstance(value, type):
        stem += "-function"
    return stem


def summary(text):
    """The first sentence of a docstring, in one line."""
    first = " ".join(text.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[^.][.])\s", first)[0]


def outside_blocks(text):
    """The text with code replaced by spaces, at the same places."""
    return re.sub(
        r"^```.*?^```",
        lambda m: re.sub(r"[^\n]", " ", m[0]),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def sections(text):
    """Splits a docstring into its introduction and `{title: text}`."""
    found = list(SECTION.finditer(outside_blocks(text)))
    ends = [match.start() for match in found[1:]] + [len(text)]
    parts = {}
    for match, end in zip(found, ends):
        title = TITLES.get(match[1], match[1])
        body = textwrap.dedent(text[match.end() : end].strip("\n"))
        parts[title] = "\n\n".join(filter(None, (parts.get(title), body)))
    intro = text[: found[0].start()] if found else text
    return intro.strip(), parts


def entries(text):
    """A section of `name: text` entries as a list of definitions."""
    starts = list(ENTRY.finditer(text))
    if not starts or starts[0].start() != 0:
        return text
    ends = [match.start() for match in starts[1:]] + [len(text)]
    lines = []
    for match, end in zip(starts, ends):
        first, _, rest = text[match.end() : end].partition("\n")
        what = f"{first}\n{textwrap.dedent(rest)}".strip()
        names = ", ".join(f"`{name}`" for name in match[1].split(", "))
        lines.append(f"{names}\n: {textwrap.indent(what, '  ').strip()}\n")
    return "\n".join(lines)


def signature_of(value):
    """The arguments with their defaults, without types."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in found.parameters.values()
    ]
    found = found.replace(
        parameters=parameters, return_annotation=inspect.Signature.empty
    )
    # Defaults that print an address.
    return re.sub(r"<[^<>]*>", "...", str(found))


def directive(name, value, owner=None):
    """The signature, which the search and the index then know.

    Args:
        name: string, the full name.
        value: the class, function or member.
        owner: string or None, the full name of a member's class.
    """
    module, _, own = (owner or name).rpartition(".")
    options, function = [f":module: {module}"], examples.function_of(value)
    if owner is None:
        kind = "class" if isinstance(value, type) else "function"
        text = own + signature_of(value)
    else:
        text = f"{own}.{name.rpartition('.')[2]}"
        is_method = function and not isinstance(
            value, (property, functools.cached_property)
        )
        kind = "method" if is_method else "attribute"
        for way in (classmethod, staticmethod):
            if isinstance(value, way):
                options.append(f":{way.__name__}:")
        if is_method:
            text += signature_of(function)
            if not isinstance(value, staticmethod):
                text = re.sub(r"\((self|cls)(, )?", "(", text)
    return "\n".join([f"```{{py:{kind}}} {text}", *options, "```"])


def shown(outcome):
    """An example with what it needs before it, and what it printed."""
    parts = []
    if outcome.setup:
        parts.append(
            "<details class=setup><summary>Setup</summary>\n\n"
            f"```python\n{outcome.setup}\n```\n\n</details>"
        )
    parts.append(f"```python\n{outcome.example.source}\n```")
    if outcome.skipped:
        parts.append(f"*Not run for this site: {outcome.skipped}.*")
    elif outcome.text:
        parts.append(
            f"```{{code-block}} text\n:class: output\n\n{outcome.text}\n```"
        )
    return "\n\n".join(parts)


def body(text, outcomes, level):
    """A docstring as Markdown: the introduction, then its sections.

    Args:
        text: string, the docstring.
        outcomes: list of the `examples.Outcome`s of its code, in order.
        level: int, the level of the sections' headings, or 0 for bold text.
    """
    left = iter(outcomes)
    text = examples.BLOCK.sub(lambda _: shown(next(left)), text)
    intro, parts = sections(text)
    lines = [intro]
    for title in ORDER.replace("Args", "Arguments").split():
        title = title.replace("_", " ")
        if title in parts:
            lines.append(f"{'#' * level} {title}" if level else f"**{title}**")
            lines.append(entries(parts[title]))
    return "\n\n".join(lines)


def member_text(name, member, value, outcomes):
    """The part of a class's page on one member."""
    full = f"{name}.{member}"
    function = examples.function_of(value)
    parts = [f"### {member}", directive(full, value, name)]
    if function is not None:
        text = examples.docstring(function)
        parts.append(body(text, outcomes.get(full, ()), 0))
    return "\n\n".join(filter(None, parts))


def inherited(cls):
    """A line for each public class above, with links to its members."""
    lines = []
    for name, value in examples.public_names().items():
        is_above = isinstance(value, type) and value is not cls
        if is_above and issubclass(cls, value):
            links = ", ".join(
                f"{{py:obj}}`{m} <{name}.{m}>`"
                for m in examples.own_members(value)
            )
            lines.append(f"From {{py:obj}}`{short(name)} <{name}>`: {links}.")
    return lines


def page(name, value, outcomes):
    """The page of a public name, as Markdown."""
    place = group_of(name)
    parts = [
        f"# {name.rpartition('.')[2]}",
        f"`{short(name)}` · [{GROUPS[place][1]}]({GROUPS[place][0]}.md)",
        directive(name, value),
        body(examples.docstring(value, name), outcomes.get(name, ()), 2),
    ]
    if isinstance(value, type):
        own = examples.own_members(value)
        documented = {
            member: thing
            for member, thing in own.items()
            if (function := examples.function_of(thing))
            and (function.__doc__ or "").strip()
        }
        if documented:
            parts.append("## Methods and properties")
        parts += [
            member_text(name, member, thing, outcomes)
            for member, thing in documented.items()
        ]
        others = [m for m in own if m not in documented]
        if others:
            parts.append("## Other members")
            parts += [
                directive(f"{name}.{member}", own[member], name)
                for member in others
            ]
        lines = inherited(value)
        if lines:
            parts += ["## Inherited", *lines]
    return "\n\n".join(parts) + "\n"


def subgroups(place, names):
    """`{title: names}` of a group; losses are grouped by their kind."""
    if GROUPS[place][0] != "losses":
        return {"": names}
    titles = [*dict.fromkeys(LOSSES.values()), "Bases and sums"]
    found = {title: [] for title in titles}
    for name in names:
        module = examples.public_names()[name].__module__.rpartition(".")[2]
        found[LOSSES.get(module, titles[-1])].append(name)
    return {title: names for title, names in found.items() if names}


def group_page(place, names):
    """The page of a group: a line for each name, and the order of pages."""
    _, title, lead, _ = GROUPS[place]
    parts = [f"# {title}", lead]
    entries = []
    for subtitle, some in subgroups(place, names).items():
        if subtitle:
            parts.append(f"## {subtitle}")
        lines = ["| name | what it is |", "|---|---|"]
        for name in some:
            text = summary(
                examples.docstring(examples.public_names()[name], name)
            )
            text = text.replace("|", "\\|")
            last = name.rpartition(".")[2]
            lines.append(f"| [`{last}`]({page_of(name)}.md) | {text} |")
            entries.append(f"{last} <{page_of(name)}>")
        parts.append("\n".join(lines))
    listed = "\n".join(entries)
    parts.append(f"```{{toctree}}\n:hidden:\n\n{listed}\n```")
    return "\n\n".join(parts) + "\n"


def grouped():
    """`{place of a group: its names}`, in the order they are listed."""
    found = {}
    for name in examples.public_names():
        found.setdefault(group_of(name), []).append(name)
    for place, names in found.items():
        order = [f"keras_posttrain.{n}" for n in GROUPS[place][3].split()]
        names.sort(key=lambda n: (order + [n]).index(n))
    return dict(sorted(found.items()))


def write(folder, outcomes):
    """Writes all pages.

    Args:
        folder: path, where they are written.
        outcomes: list of `examples.Outcome`s.

    Returns:
        The names of the groups' pages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    by_name = {}
    for outcome in outcomes:
        by_name.setdefault(outcome.example.name, []).append(outcome)
    for name, value in examples.public_names().items():
        text = page(name, value, by_name)
        (folder / f"{page_of(name)}.md").write_text(text, encoding="utf-8")
    groups = grouped()
    for place, names in groups.items():
        path = folder / f"{GROUPS[place][0]}.md"
        path.write_text(group_page(place, names), encoding="utf-8")
    return [GROUPS[place][0] for place in groups]
