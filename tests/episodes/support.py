"""Helpers of the tests of episodes."""


class Batches:
    """Keeps the batches that a task trains on."""

    def __init__(self, task):
        found = self.found = []

        class Keeping(task.collector):
            def build(self, round):
                collection = super().build(round)
                found.extend(collection.batches)
                return collection

        task.collector = Keeping
