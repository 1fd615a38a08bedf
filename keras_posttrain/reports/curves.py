"""Metrics by step, thinned as a run grows longer."""

from keras_posttrain.reports.encoding import encode, number


class Curves:
    """The values of metrics, of at most `most` steps.

    With more steps every second one is left out, again and again: `stride`
    is the distance of those that are kept. The last step is always kept.
    """

    def __init__(self, most=2000):
        self.most, self.stride = most, 1
        self.names, self._places = [], {}
        # By step, its line as JSON: the step, seconds, then a value a name.
        self._lines = {}
        self._last = None

    def add(self, step, seconds, values):
        """Adds the metrics of a step, a dict of floats by name."""
        self._last = (step, seconds, values)
        if step % self.stride == 0:
            self._lines[step] = self._line(*self._last)
            if len(self._lines) > self.most:
                self.stride *= 2
                self._lines = {
                    k: v
                    for k, v in self._lines.items()
                    if k % self.stride == 0
                }

    def _line(self, step, seconds, values):
        places, names = self._places, self.names
        row = ["null"] * len(names)
        for name, value in values.items():
            place = places.get(name)
            if place is None:
                place = places[name] = len(names)
                names.append(name)
                row.append("null")
            row[place] = number(value)
        return ",".join((str(step), number(seconds), *row))

    def text(self):
        """Returns them as JSON."""
        lines = self._lines
        if self._last is not None and self._last[0] not in lines:
            lines = lines | {self._last[0]: self._line(*self._last)}
        rows = "],[".join(lines.values())
        rows = f"[[{rows}]]" if rows else "[]"
        return (
            f'{{"names":{encode(self.names)},"stride":{self.stride},'
            f'"rows":{rows}}}'
        )

    def restore(self, data, step):
        """Takes back the steps up to `step` of what `text` returned."""
        for name in data["names"]:
            self._places[name] = len(self.names)
            self.names.append(name)
        self.stride = data["stride"]
        for at, seconds, *values in data["rows"]:
            found = {
                name: value
                for name, value in zip(data["names"], values)
                if value is not None
            }
            if at <= step:
                self.add(at, seconds, found)

    def rows(self):
        """Yields `(step, seconds, JSON of the line)` of those kept."""
        yield from self._lines.items()

    def __len__(self):
        return len(self._lines)
