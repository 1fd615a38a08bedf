from typing import TYPE_CHECKING

from keras_posttrain import _lazy_imports

if TYPE_CHECKING:
    from keras_posttrain.episodes.calculator import arithmetic
    from keras_posttrain.episodes.chat import Chat, Reply
    from keras_posttrain.episodes.endpoint import Endpoint
    from keras_posttrain.episodes.episode import Episode
    from keras_posttrain.episodes.errors import EpisodeError
    from keras_posttrain.episodes.gym import Gym
    from keras_posttrain.episodes.isolated import Isolated
    from keras_posttrain.episodes.limits import Limits
    from keras_posttrain.episodes.opponents import Frozen
    from keras_posttrain.episodes.python_tool import Python, python
    from keras_posttrain.episodes.tools import Tools
    from keras_posttrain.episodes.trajectory import Segment, Trajectory

__all__ = [
    "Chat",
    "Endpoint",
    "Episode",
    "EpisodeError",
    "Frozen",
    "Gym",
    "Isolated",
    "Limits",
    "Python",
    "Reply",
    "Segment",
    "Tools",
    "Trajectory",
    "arithmetic",
    "python",
]

__getattr__, __dir__ = _lazy_imports.attach(__name__)
