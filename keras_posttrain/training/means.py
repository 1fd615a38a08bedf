import math


class Means:
    """Running means of an epoch, on the host.

    Args:
        sums: dict by name of `[sum, count]`.
    """

    def __init__(self, sums=()):
        self.sums = dict(sums)

    def add(self, values):
        """Adds a dict of numbers; one that is not finite has no weight."""
        for name, value in values.items():
            if math.isfinite(value):
                total, count = self.sums.get(name, (0.0, 0))
                self.sums[name] = [total + value, count + 1]

    def results(self):
        return {name: total / n for name, (total, n) in self.sums.items()}
