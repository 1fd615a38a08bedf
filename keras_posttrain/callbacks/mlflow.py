import time

from keras_posttrain.callbacks.tracker import Tracker

# The most settings and metrics of one call, and characters of a setting.
MOST_PARAMS, MOST_METRICS, MOST_CHARACTERS = 100, 1000, 500


class MLflow(Tracker):
    """Gives the metrics of each step to MLflow.

    Names and values are those of `metrics.jsonl`; in names MLflow knows no
    `@`, so that `pass@1` becomes `pass_at_1`. It needs `mlflow` or
    `mlflow-skinny` (`pip install "keras_posttrain[mlflow]"`). If it fails or
    is unreachable, it warns and the run continues.

    Args:
        experiment: str, the experiment's name; it is made if missing.
        tracking_uri: str or `None` for MLflow's own setting.
        run_name: str or `None`.
        run_id: str or `None`, a run to continue.

    Example:

    ```python
    task.fit(rows, callbacks=[kpt.callbacks.MLflow("my experiment")])
    ```
    """

    package = "mlflow"

    def __init__(
        self, experiment, tracking_uri=None, run_name=None, run_id=None
    ):
        super().__init__()
        self.experiment, self.tracking_uri = experiment, tracking_uri
        self.run_name, self.run_id = run_name, run_id

    def _open(self, settings, step):
        # An optional dependency.
        import mlflow

        self._client = mlflow.MlflowClient(self.tracking_uri)
        if self.run_id is not None:
            self._id = self.run_id
            return
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = (
            found.experiment_id
            if found
            else self._client.create_experiment(self.experiment)
        )
        run = self._client.create_run(experiment, run_name=self.run_name)
        self._id = run.info.run_id
        params = [
            mlflow.entities.Param(name, str(value)[:MOST_CHARACTERS])
            for name, value in settings.items()
        ]
        self._client.log_batch(self._id, params=params[:MOST_PARAMS])

    def _log(self, step, values):
        # An optional dependency.
        import mlflow

        now = int(1000 * time.time())
        metrics = [
            mlflow.entities.Metric(name.replace("@", "_at_"), value, now, step)
            for name, value in values.items()
        ]
        for at in range(0, len(metrics), MOST_METRICS):
            part = metrics[at : at + MOST_METRICS]
            self._client.log_batch(self._id, metrics=part)

    def _finish(self, status):
        self._client.set_terminated(self._id, status.upper())
