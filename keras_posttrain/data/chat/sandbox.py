"""Renders chat templates, in a worker process.

Sandboxed Jinja2 with the extensions of `transformers`. A worker loads this
file alone, so that it imports nothing of this package.
"""

import datetime
import functools
import json

import jinja2
import jinja2.ext
import jinja2.sandbox

# The longest text that is sent back.
MAX_CHARACTERS = 2**26


def renderer():
    """Returns `render`."""
    return render


def render(template, conversations):
    """Renders a template.

    Args:
        template: string.
        conversations: list of dicts of variables.

    Returns:
        List of pairs, one a conversation: `"text"` and the text, `"refusal"`
        and the reason, or `"fault"` and what is wrong with the template.
    """
    try:
        compiled = _compile(template)
    except jinja2.exceptions.TemplateSyntaxError as error:
        return [("fault", f"line {error.lineno}, {error.message}")]
    return [_render(compiled, variables) for variables in conversations]


def _render(compiled, variables):
    try:
        text = compiled.render(variables)
    except jinja2.exceptions.TemplateError as error:
        return "refusal", str(error)
    except Exception as error:
        return "refusal", f"it raised {type(error).__name__}: {error}"
    if len(text) > MAX_CHARACTERS:
        return "refusal", f"it rendered {len(text)} characters"
    return "text", text


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}...{% endgeneration %}` of sampled text."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), True)
        call = self.call_method("_mark", [jinja2.nodes.ContextReference()])
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, context, caller):
        start, end = context.get("generation_marks") or ("", "")
        return start + caller() + end


def _raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern):
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
):
    # Jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.lru_cache(maxsize=32)
def _compile(template):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    compiled = environment.from_string(template)
    # Each rendering copies them, several times as fast from a plain dict.
    compiled.globals = dict(compiled.globals)
    return compiled
