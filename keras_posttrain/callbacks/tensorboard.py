from keras_posttrain.callbacks.directories import Folder
from keras_posttrain.callbacks.tracker import Tracker


class TensorBoard(Tracker):
    """Writes the metrics of each step for TensorBoard.

    Names and values are those of `metrics.jsonl`. It needs `tensorboardX`
    (`pip install "keras_posttrain[tensorboard]"`), and neither TensorFlow nor
    a server. A resumed run replaces the steps that it repeats. If it fails,
    it warns and the run continues.

    Args:
        directory: str, path or address, that of `tensorboard --logdir`;
            created if missing.

    Example:

    ```python
    task.fit(rows, callbacks=[kpt.callbacks.TensorBoard("run/tb")])
    ```
    """

    package = "tensorboardX"

    def __init__(self, directory):
        super().__init__()
        self._folder = Folder(directory, is_locked=False)
        self.directory = self._folder.path

    def _open(self, settings, step):
        # An optional dependency.
        import tensorboardX

        self._folder.begin()
        self._writer = tensorboardX.SummaryWriter(
            str(self.directory), purge_step=step + 1 if step else None
        )
        rows = [f"| {name} | {value} |" for name, value in settings.items()]
        text = "\n".join(["| | |", "|---|---|", *rows])
        self._writer.add_text("run", text, step)

    def _log(self, step, values):
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def _finish(self, status):
        self._writer.close()
        self._folder.end()
