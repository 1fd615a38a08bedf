"""The policy that a run is compared with: frozen, and kept with the run."""

import contextlib

import jax
import jax.numpy as jnp
import keras

from keras_posttrain.models import presets
from keras_posttrain.models.hf.loading import repair
from keras_posttrain.models.policy import Policy
from keras_posttrain.training import step as steps


class Reference:
    """The reference policy of a task.

    By default it is the policy when training began: the model with the
    adapter off where the adapter was 0 then, which costs no memory; else a
    copy of what is trained, the adapter or all weights. Its arrays are an
    argument of the programs that read them.

    Args:
        task: `Task`.
        model: a preset, a KerasHub `CausalLM`, or `None` for the policy.
        moves: bool, whether it is going to be updated.
    """

    # What users call it: the argument's name.
    role = "reference"

    def __init__(self, task, model=None, moves=False):
        self.task, self.policy = task, task.policy
        self.values, self.kind = [], "model"
        if model is not None:
            self._take_model(model, moves)
        elif not moves and _is_zero(task.adapter):
            self.kind = "off"
        else:
            self.kind = "copy"
            # The policy alone: a task may train more than that.
            owners = [x for x in (task.causal_lm, task.adapter) if x]
            self.variables = [v for x in owners for v in x.trainable_variables]
            self.values = [
                jnp.array(v.value, copy=True) for v in self.variables
            ]

    def _take_model(self, model, moves):
        task = self.task
        if moves:
            raise ValueError(
                "Only a reference that began as the policy can be updated "
                "from it. Leave `reference=` out, or the callback that "
                "updates it."
            )
        if isinstance(model, str) or hasattr(model, "__fspath__"):
            dtype = task.causal_lm.backbone.dtype_policy
            model = presets.load_causal_lm(model, dtype=dtype)
        if model is task.causal_lm:
            raise ValueError(
                f"`{self.role}` must be another model than the one in "
                "training: it has to stay as it is. Leave it out for the "
                "policy when training began."
            )
        self._check_vocabulary(model.backbone.vocabulary_size)
        repair(model)
        self.policy = Policy(model, chunk_size=task.chunk_size)
        self.variables = model.variables
        self.values = [v.value for v in model.variables]

    def _check_vocabulary(self, theirs):
        ours = self.task.causal_lm.backbone.vocabulary_size
        if ours != theirs:
            raise ValueError(
                "The reference must have the vocabulary of the policy. "
                f"Received: a reference with vocabulary_size={theirs}, a "
                f"policy with vocabulary_size={ours}."
            )

    @property
    def num_bytes(self):
        """Int, bytes of memory that the reference takes."""
        return sum(x.nbytes for x in self.values)

    @contextlib.contextmanager
    def using(self, values, trainable, frozen):
        """A scope in which `self.policy` has the reference's weights."""
        with steps.TRACING:
            yield from self._using(values, trainable, frozen)

    def _using(self, values, trainable, frozen):
        task = self.task
        if self.kind == "model":
            mapping = list(zip(self.variables, values))
            with keras.StatelessScope(state_mapping=mapping):
                yield
        elif self.kind == "copy":
            mapping = list(zip(self.variables, values))
            mapping += list(zip(task.non_trainable_variables, frozen))
            with keras.StatelessScope(state_mapping=mapping):
                yield
        else:
            with (
                task.using_weights(trainable, frozen),
                task.adapter.disabled(),
            ):
                yield

    def update(self, mixup):
        """Moves the reference to `mixup` policy + `1 - mixup` reference."""

        @jax.jit
        def mix(old, new):
            return [
                (mixup * n.astype("float32") + (1 - mixup) * o).astype(o.dtype)
                for o, n in zip(old, new)
            ]

        # Keras's own loop empties the variables while it runs.
        self.task.jax_state_sync()
        new = [v.value for v in self.variables]
        self.values = mix(self.values, new)

    def state(self):
        """The arrays that a checkpoint has to hold."""
        kept = self.values if self.kind == "copy" else []
        return {str(i): x for i, x in enumerate(kept)}

    def set_state(self, arrays):
        if self.kind == "copy":
            self.values = [arrays[str(i)] for i in range(len(self.values))]


def _is_zero(adapter):
    if adapter is None:
        return False
    return not any(bool(jnp.any(b.value != 0)) for b in adapter.b)
