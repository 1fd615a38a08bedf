"""Medians, ratios and the table of runs of conversations with a tool."""

import collections
import dataclasses

import summary

WAYS = {
    "ours": "keras_posttrain, an episode",
    "lock-step": "keras_posttrain's engine, in lock-step",
    "trl": "TRL",
    "tunix": "Tunix",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A script with its arguments."""

    way: str
    tool_seconds: float

    @property
    def peer(self):
        return "ours" if self.way == "lock-step" else self.way

    @property
    def name(self):
        return f"{self.way}/{self.tool_seconds:g}"

    @property
    def flags(self):
        flags = ["--tool-seconds", str(self.tool_seconds)]
        return flags + ["--lock-step"] * (self.way == "lock-step")

    @property
    def environ(self):
        return {}


def all_runs():
    for way in WAYS:
        for seconds in (0.0, 1.0):
            yield Run(way, seconds)


def line(figures):
    """Returns the text that is printed when a process ends."""
    return f"{figures['rollout_s']:.2f} s, {figures['tokens']:.0f} tokens"


def ratios(seconds, turns):
    """Yields `(text, number)` pairs.

    Args:
        turns: int, of a conversation.
        seconds: dict from `(way, tool_seconds)` to the seconds of a rollout.
    """
    ours, alone = seconds.get(("ours", 1.0)), seconds.get(("ours", 0.0))
    if ours and alone:
        bound = alone + (turns - 1) * 1.0
        yield "an episode over sampling and one chain of tools", ours / bound
    for way, name in WAYS.items():
        for tool in (0.0, 1.0):
            found = seconds.get((way, tool)), seconds.get(("ours", tool))
            if way != "ours" and all(found):
                text = f"{name}, over an episode, tool of {tool:g} s"
                yield text, found[0] / found[1]


def markdown(results, options):
    [work, *_] = [
        r["work"] for run in results for r in results[run] if "work" in r
    ] or [collections.Counter()]
    rows = {
        run: summary.medians(repeats, ("rollout_s", "tokens"))
        for run, repeats in results.items()
    }
    rows = {run: row for run, row in rows.items() if row}
    out = summary.head(
        "Conversations with a tool, side by side",
        results,
        options,
        f"{work['prompts'] * work['samples']} conversations of "
        f"{work['turns']} turns of {work['tokens']} tokens. Between two turns "
        "a tool takes the seconds of its column. Only the rollout is "
        "measured.",
    )
    columns = ["way", "tool s", "rollout s", "sampled tokens", "tokens/s"]
    cells = [
        [
            WAYS[run.way],
            f"{run.tool_seconds:g}",
            f"{row['rollout_s']:.2f}",
            f"{row['tokens']:.0f}",
            summary.span(row),
            summary.other(row),
        ]
        for run, row in rows.items()
    ]
    out += summary.table([*columns, "other"], cells)
    out += ["", "## Ratios", ""]
    seconds = {
        (run.way, run.tool_seconds): row["rollout_s"]
        for run, row in rows.items()
    }
    out += [
        f"- {text}: {ratio:.2f}"
        for text, ratio in ratios(seconds, work["turns"])
    ]
    problems = summary.errors(results)
    counts = {row["tokens"] for row in rows.values()}
    if counts and min(counts) < 0.99 * max(counts):
        problems.append(f"The ways sampled other numbers: {sorted(counts)}.")
    return summary.text(out, problems), problems
