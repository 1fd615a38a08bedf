from keras_posttrain.callbacks.tracker import Tracker


class WandB(Tracker):
    """Gives the metrics of each step to Weights & Biases.

    Names and values are those of `metrics.jsonl`. It needs `wandb`
    (`pip install "keras_posttrain[wandb]"`). If it fails or is unreachable,
    it warns and the run continues.

    Args:
        project: str or `None`, the project's name.
        **settings: arguments of `wandb.init`, such as `name`,
            `mode="offline"`, or `id` and `resume="allow"` for runs that
            resume.

    Example:

    ```python
    task.fit(rows, callbacks=[kpt.callbacks.WandB("my project")])
    ```
    """

    package = "wandb"

    def __init__(self, project=None, **settings):
        super().__init__()
        self.settings = {"project": project, **settings}

    def _open(self, settings, step):
        # An optional dependency.
        import wandb

        given = {"config": settings, **self.settings}
        self._run = wandb.init(**given)

    def _log(self, step, values):
        self._run.log(values, step=step)

    def _finish(self, status):
        self._run.finish(exit_code=int(status != "finished"))
