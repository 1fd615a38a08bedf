"""The error of an episode that failed through no fault of the model."""


class EpisodeError(Exception):
    """Says that the infrastructure of an episode failed, not the model.

    Raise it in an episode, a tool or an environment when a server does not
    answer or a machine is out of memory. The episode is run once more with
    the same seed. If that fails too, its trajectories are left out of the
    loss and of the baseline, and counted. A tool that takes too long raises
    it as well. Any other exception of an episode stops the run.

    Example:

    ```python
    async def search(query: str) -> str:
        try:
            return await client.search(query)
        except ConnectionError as error:
            raise kpt.episodes.EpisodeError(f"search: {error}") from error
    ```
    """

    def __init__(self, message=""):
        super().__init__(message)


class ToolError(Exception):
    """An exception of a tool whose message is for the model as it is."""
