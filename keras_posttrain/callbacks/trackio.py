from keras_posttrain.callbacks.tracker import Tracker


class Trackio(Tracker):
    """Gives the metrics of each step to Trackio.

    Names and values are those of `metrics.jsonl`. It needs `trackio`
    (`pip install "keras_posttrain[trackio]"`), which keeps them on this
    machine unless it is given a `space_id`. If it fails or is unreachable, it
    warns and the run continues.

    Args:
        project: str, the project's name.
        **settings: arguments of `trackio.init`, such as `name`, `space_id`
            or `resume="allow"`.

    Example:

    ```python
    task.fit(rows, callbacks=[kpt.callbacks.Trackio("my project")])
    ```
    """

    package = "trackio"

    def __init__(self, project, **settings):
        super().__init__()
        self.settings = {"project": project, **settings}

    def _open(self, settings, step):
        # An optional dependency.
        import trackio

        given = {"config": settings, **self.settings}
        self._run = trackio.init(**given)

    def _log(self, step, values):
        self._run.log(values, step=step)

    def _finish(self, status):
        self._run.finish()
