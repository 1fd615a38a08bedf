"""Options of the command line, and the scripts that commands stand for."""

import ast
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import math
import os
import pathlib
import sys
import textwrap

from keras_posttrain import losses, rewards, rollout

WIDTH = 79
STRATEGIES = (
    "data_parallel", "fsdp", "tensor_parallel", "fsdp_tensor_parallel",
    "hybrid",
)  # fmt: skip
# Names of the script, which nothing imported may take.
TAKEN = {"keras", "kpt", "sys", "task"}


class Code(str):
    """Text that is part of a script as it is."""


# How the text of an option is read.
TEXT = "text"  # as it is: a path or a name
VALUE = "value"  # a Python literal, or else text, which Python then refuses
FLAG = "flag"  # true where it is given


@dataclasses.dataclass(frozen=True)
class Option:
    """An option, and the argument that it sets.

    Args:
        name: str, on the command line; with `_` the argument's name.
        place: str, the call with that argument: `"task"`, `"compile"` or
            `"fit"`. `""` for one that `script` knows.
        kind: str, how its text is read.
        metavar: str, what help calls the value.
        help: str; options without one are listed by name.
        many: bool, whether it takes several values.
        optional: bool, whether the value may be left out, for `True`.
        required: bool.
    """

    name: str
    place: str
    kind: str = VALUE
    metavar: str = "N"
    help: str = ""
    many: bool = False
    optional: bool = False
    required: bool = False

    @property
    def parsed(self):
        """Dict of arguments of argparse's `add_argument`."""
        if self.kind == FLAG:
            return {"action": "store_true", "default": None}
        found = {"required": self.required, "metavar": self.metavar}
        if self.kind == VALUE:
            found["type"] = _literal
        if self.optional:
            found |= {"nargs": "?", "const": True}
        return found | ({"nargs": "+"} if self.many else {})

    @property
    def shown(self):
        """Str, the option with its value, for help."""
        if self.kind == FLAG:
            return f"--{self.name}"
        value = f"{self.metavar} ..." if self.many else self.metavar
        return f"--{self.name} {f'[{value}]' if self.optional else value}"


def _literal(text):
    """Returns the value of a Python literal, or else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


MODEL = (
    Option("preset", "task", TEXT, "PRESET", required=True,
           help="KerasHub's, hf://..., or a directory (needed)"),
    Option("data", "fit", TEXT, "FILE", many=True, required=True,
           help="rows: .jsonl, .json, .csv, .parquet (needed)"),
    Option("out", "", TEXT, "DIR", required=True,
           help="all that is written; run again to resume (needed)"),
    Option("eval-data", "fit", TEXT, "FILE", many=True,
           help="held-out rows, evaluated after every epoch"),
    Option("lora", "task", VALUE, "RANK",
           help="train an adapter of this rank, not all weights"),
    Option("quantize", "task", TEXT, "KIND"),
    Option("learning-rate", "compile", metavar="X",
           help="of AdamW; by default one that suits the task"),
    Option("sequence-length", "task"),
    Option("epochs", "fit", help="passes over the rows"),
)  # fmt: skip
ROWS = (
    Option("batch-size", "fit", help="rows of a step"),
)  # fmt: skip
PROMPTS = (
    Option("batch-size", "fit", help="prompts of a rollout"),
)  # fmt: skip
FUNCTIONS = (
    Option("rewards", "compile", TEXT, "F", many=True,
           help="module:function, file.py or of kpt.rewards"),
    Option("reward-model", "compile", TEXT, "PRESET", many=True,
           help="what `reward` has exported, as a reward"),
    Option("episode", "compile", TEXT, "F",
           help="an episode, as module:name or file.py:name"),
)  # fmt: skip
SAMPLES = (
    Option("num-generations", "compile"),
    Option("max-completion-length", "compile"),
    Option("temperature", "compile", metavar="X"),
    Option("num-minibatches", "compile"),
    Option("num-iterations", "compile"),
    Option("rollout", "compile", TEXT, "ENGINE"),
)
OF_REWARDS = (
    Option("reward-weights", "compile", metavar="X", many=True),
    Option("reference", "task", TEXT, "PRESET"),
    Option("max-staleness", "fit"),
)
LAST = (
    Option("export", "", FLAG,
           help="write the merged model too, in DIR/model"),
    Option("print-script", "", FLAG, help="print the script, and stop"),
    Option("loss", "compile", TEXT, "LOSS"),
    Option("dtype", "task", TEXT, "TYPE"),
    Option("truncation", "task", TEXT, "KIND"),
    Option("remat", "task", TEXT, "KIND"),
    Option("attention", "task", TEXT, "KIND"),
    Option("micro-batch-size", "compile"),
    Option("packing", "fit", optional=True),
    Option("seed", "fit"),
    Option("checkpoint-every", ""),
    Option("report", "", TEXT, "yes|no"),
    Option("distribution", "", TEXT, "NAME"),
)  # fmt: skip
SHARES = (Option("share-prefix", "fit", FLAG),)


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: its task, what it is for, and its options."""

    task: str
    help: str
    rows: str
    options: tuple
    samples: bool = False


COMMANDS = {
    "sft": Command(
        "SFTTask",
        "fine-tune on texts, chats, or prompts with completions",
        '{"text"}, {"messages"} or {"prompt", "completion"}',
        (*MODEL, *ROWS, *LAST),
    ),
    "dpo": Command(
        "DPOTask",
        "prefer the better of two answers (DPO, KTO, ORPO, ...)",
        '{"prompt", "chosen", "rejected"} or {"prompt", "completion", '
        '"label"}',
        (*MODEL, *ROWS, *LAST, *SHARES,
         Option("reference", "task", TEXT, "PRESET"),
         Option("reference-cache", "compile", TEXT, "DIR")),
    ),
    "reward": Command(
        "RewardTask",
        "train a reward model on pairs of answers",
        '{"prompt", "chosen", "rejected"}',
        (*MODEL, *ROWS, *LAST, *SHARES),
    ),
    "grpo": Command(
        "GRPOTask",
        "reinforcement learning from rewards, in groups of samples",
        '{"prompt", ...}; other columns reach the rewards',
        (*MODEL, *PROMPTS, *FUNCTIONS, *SAMPLES, *LAST, *SHARES,
         *OF_REWARDS),
        samples=True,
    ),
    "ppo": Command(
        "PPOTask",
        "reinforcement learning from rewards, with a value model",
        '{"prompt", ...}; other columns reach the rewards',
        (*MODEL, *PROMPTS, *FUNCTIONS, *SAMPLES, *LAST, *SHARES,
         *OF_REWARDS, Option("kl-coef", "compile", metavar="X"),
         Option("value-model", "compile", TEXT, "PRESET")),
        samples=True,
    ),
    "distill": Command(
        "DistillTask",
        "learn from a larger model, or from a long prompt",
        '{"prompt", "completion"} with {"teacher_prompt"}; or {"prompt"}',
        (*MODEL, *ROWS,
         Option("teacher", "task", TEXT, "PRESET",
                help="by default the model at the start of training"),
         Option("on-policy", "compile", metavar="X", optional=True,
                help="on the student's samples; X is their share"),
         *SAMPLES, *LAST,
         Option("top-k", "compile"),
         Option("teacher-cache", "compile", TEXT, "DIR"),
         Option("teacher-length", "task"),
         Option("max-staleness", "fit")),
    ),
}  # fmt: skip


# Help


def overview(name):
    """Returns the help that lists the commands."""
    lines = [f"usage: {name} COMMAND --preset P --data FILE --out DIR ...", ""]
    lines += [f"  {k:<9}{v.help}" for k, v in COMMANDS.items()]
    lines += [
        "",
        f"  {name} COMMAND --help lists the options of a command.",
        f"  {name} --version",
        "",
        "A command prints the Python script that it runs. --print-script only",
        "prints it: edit it where options do not suffice.",
        "",
        f"  {name} sft --preset qwen3_0.6b_en \\",
        "      --data rows.jsonl --lora 16 --out run/",
    ]
    return "\n".join(lines)


def help_of(name, command):
    """Returns the help of a command, which fits a screen of 80 x 24."""
    lines = [f"usage: {name} OPTIONS"]
    lines += [f"{command.help}; rows are", f"  {command.rows}"]
    lines += [
        f"  {option.shown:<26} {option.help}"
        for option in command.options
        if option.help
    ]
    others = [
        o.shown.replace(" ", "\0") for o in command.options if not o.help
    ]
    lines += textwrap.wrap(
        "also, as in Python: " + " ".join(others),
        WIDTH,
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ") + "\n"


# Scripts


def script(command, given):
    """Returns the Python script that a command stands for.

    Args:
        command: `Command`.
        given: dict by name, the options that were given.

    Raises:
        ValueError: for a loss, a function or a strategy that is not there.
    """
    imports, folder = Imports(), given["out"]
    calls = {"task": {}, "compile": {}, "fit": {}}
    for option in command.options:
        if option.place and option.name in given:
            name = option.name.replace("-", "_")
            calls[option.place][name] = given[option.name]
    _of_model(calls["task"])
    _of_compile(calls["compile"], imports)
    data = _one_or_many(calls["fit"].pop("data"))
    if "eval_data" in calls["fit"]:
        held_out = _one_or_many(calls["fit"].pop("eval_data"))
        calls["fit"]["validation_data"] = held_out
    calls["fit"]["callbacks"] = _callbacks(command, given)
    lines = []
    if "distribution" in given:
        made = _object(
            "distribution", given["distribution"], "distribution", STRATEGIES
        )
        lines += [_call("keras.distribution.set_distribution", [made])]
    preset = calls["task"].pop("preset")
    task = f"kpt.{command.task}.from_preset"
    lines += ["task = " + _call(task, [preset], calls["task"], 7)]
    lines += [_call("task.compile", [], calls["compile"])]
    lines += [_call("task.fit", [data], calls["fit"])]
    if "lora" in given:
        lines += [_call("task.save_adapter", [_join(folder, "adapter")])]
    if "lora" not in given or "export" in given:
        lines += [_call("task.export", [_join(folder, "model")])]
    return "\n".join([*imports.lines(lines), *lines]) + "\n"


def _of_model(task):
    if "lora" in task:
        task["lora"] = Code(f"kpt.LoRA(rank={task['lora']!r})")


def _of_compile(found, imports):
    """Replaces texts by what they stand for, in the arguments of `compile`."""
    if "learning_rate" in found:
        rate = found.pop("learning_rate")
        # As "auto" is, with another rate.
        kwargs = {"weight_decay": 0.0, "epsilon": 1e-8}
        found["optimizer"] = Code(
            _call("keras.optimizers.AdamW", [rate], kwargs, 15)
        )
    if found.get("loss", "auto") != "auto":
        names = [n for n in losses.__all__ if n.endswith("Loss")]
        found["loss"] = _object("loss", found["loss"], "losses", names)
    if found.get("rollout", "auto") != "auto":
        engines = [n for n in rollout.__all__ if n.endswith("Rollout")]
        found["rollout"] = _object(
            "rollout", found["rollout"], "rollout", engines
        )
    functions = [
        imports.function("rewards", text) for text in found.pop("rewards", [])
    ]
    functions += [
        Code(
            _call("kpt.RewardTask.from_preset", [preset], {"trainable": False})
        )
        for preset in found.pop("reward_model", [])
    ]
    if functions:
        found["rewards"] = functions
    if "episode" in found:
        found["episode"] = imports.function("episode", found["episode"])


def _callbacks(command, given):
    folder = given["out"]
    kwargs = {}
    if "checkpoint-every" in given:
        kwargs["every"] = given["checkpoint-every"]
    found = [
        Code(_call("kpt.callbacks.Checkpoint", [folder], kwargs)),
        Code(_call("kpt.callbacks.MetricsLog", [folder])),
    ]
    if command.samples or "on-policy" in given:
        found.append(Code(_call("kpt.callbacks.CompletionsLog", [folder])))
    wanted = given.get("report", "yes")
    if wanted not in ("yes", "no"):
        raise ValueError(
            f"`--report` must be yes or no. Received: {wanted}. The page is "
            "written into the folder that `--out` names."
        )
    if wanted == "yes":
        found.append(Code(_call("kpt.callbacks.Report", [folder])))
    return found


class Imports:
    """The functions that a script imports from users' modules."""

    def __init__(self):
        self.folders, self.names, self.taken = [], {}, set(TAKEN)

    def function(self, option, text):
        """Returns the code of a function that an option names.

        Args:
            option: str, its name.
            text: str, `"module:function"`, `"file.py:function"`, `"file.py"`
                with one function, or of `rewards` a class of `kpt.rewards`
                with its arguments.
        """
        module, _, name = text.rpartition(":")
        if not module and not text.endswith(".py"):
            if option == "rewards" and text[:1].isupper():
                names = [n for n in rewards.__all__ if n.endswith("Reward")]
                return _object(option, text, "rewards", names)
            raise _no_function(option, text, "names no module")
        if not module or name.endswith(".py"):
            # `file.py`, maybe with the drive of Windows.
            module, name = text, ""
        found, folder, module = _import(option, text, module)
        name = name or _only_function(option, text, found)
        if not hasattr(found, name):
            close = difflib.get_close_matches(name, dir(found), n=1)
            hint = f". Did you mean '{close[0]}'?" if close else ""
            raise _no_function(
                option, text, f"{found.__file__} has no '{name}'{hint}"
            )
        return self._add(folder, module, name)

    def _add(self, folder, module, name):
        if folder is not None and folder not in self.folders:
            self.folders.append(folder)
        number, alias = 1, name
        while alias in self.taken:
            number += 1
            alias = f"{name}_{number}"
        self.taken.add(alias)
        renamed = "" if alias == name else f" as {alias}"
        self.names.setdefault(module, []).append(name + renamed)
        return Code(alias)

    def lines(self, body):
        """Returns the first lines of a script with this body."""
        found = ["import sys", ""] if self.folders else []
        found += ["import keras_posttrain as kpt"]
        if any("keras." in line for line in body):
            found += ["import keras"]
        if self.folders:
            found += [""]
            found += [_call("sys.path.insert", [0, f]) for f in self.folders]
        for module, names in self.names.items():
            found += [f"from {module} import {', '.join(names)}"]
        return [*found, ""]


def _import(option, text, module):
    """Imports a module for its names: `(module, folder, its name)`."""
    folder = None
    if module.endswith(".py"):
        path = pathlib.Path(module).expanduser().absolute()
        if not path.is_file():
            raise _no_function(option, text, f"there is no file {module!r}")
        folder, module = str(path.parent), path.stem
        if not module.isidentifier():
            raise _no_function(
                option, text, f"{module!r} is no name of a module: rename it"
            )
    else:
        path = pathlib.Path.cwd() / module.split(".")[0]
        if path.is_dir() or path.with_suffix(".py").is_file():
            # A script finds only what is in its own folder.
            folder = os.getcwd()
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(name=module)
    except (ModuleNotFoundError, ValueError):
        raise _no_function(
            option, text, f"there is no module {module!r}"
        ) from None
    found = importlib.import_module(module)
    theirs = getattr(found, "__file__", None)
    if folder is not None and not str(theirs).startswith(folder):
        raise _no_function(
            option, text, f"another module has the name {module!r}: rename it"
        )
    return found, folder, module


def _only_function(option, text, module):
    """Returns the name of a file's one function."""
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
    if len(names) != 1:
        have = f"has the functions {names}" if names else "has no function"
        raise _no_function(option, text, f"{have}: name one after a colon")
    return names[0]


def _no_function(option, text, reason):
    what = ""
    if option == "rewards":
        what = ", or a reward of `kpt.rewards` such as 'MathReward()'"
    return ValueError(
        f"`--{option}` must be 'module:function' or 'file.py:function'{what}. "
        f"Received: '{text}' ({reason})"
    )


def _object(option, text, module, names):
    """Returns the code of an object of `kpt.<module>`.

    Args:
        option: str, its name.
        text: str, `"Name"` or `"Name(argument=1.0)"`, with literals.
        module: str, a module of the package.
        names: the names that it may have.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else None
        name = ast.unparse(call.func if call else node)
        values = (
            [*call.args, *(k.value for k in call.keywords)] if call else []
        )
        for value in values:
            ast.literal_eval(value)
    except (SyntaxError, ValueError):
        name = text
    if name not in names:
        lower = {known.lower(): known for known in names}
        close = difflib.get_close_matches(
            name.lower().split("(")[0], lower, n=1, cutoff=0.4
        )
        hint = f" Did you mean '{lower[close[0]]}'?" if close else ""
        raise ValueError(
            f"`--{option}` must be a name of `kpt.{module}`, with arguments "
            f"in parentheses where needed, such as '{names[0]}()'. "
            f"Received: '{text}'.{hint}"
        )
    return Code(f"kpt.{module}.{ast.unparse(node)}" + ("" if call else "()"))


def _one_or_many(paths):
    return paths[0] if len(paths) == 1 else paths


def _join(folder, name):
    return f"{folder.rstrip('/')}/{name}"


def _call(function, values=(), kwargs=None, indent=0):
    """Returns the code of a call, over several lines where it is long."""
    parts = [_code(value) for value in values]
    parts += [f"{name}={_code(v)}" for name, v in (kwargs or {}).items()]
    return _bracketed(f"{function}(", parts, ")", indent)


def _code(value):
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, list):
        return _bracketed("[", [_code(item) for item in value], "]", 16)
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, str) and value.isprintable():
        if '"' not in value and "\\" not in value:
            return f'"{value}"'
    return repr(value)


def _bracketed(start, parts, end, indent):
    line = start + ", ".join(parts) + end
    if len(line) + indent <= WIDTH and "\n" not in line:
        return line
    inner = "".join(f"{part},\n" for part in parts)
    return f"{start}\n{textwrap.indent(inner, '    ')}{end}"
