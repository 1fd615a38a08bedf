"""The training step: from a batch to gradients, metrics and a new state.

`TrainStep` is built from explicit parts and knows no task. Its methods are
pure functions of arrays, in the order in which a step runs:
`loss_and_gradients`, then `apply_gradients`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_posttrain.losses import TokenLoss, reductions
from keras_posttrain.models import sharding
from keras_posttrain.training import batch_coupled, keras_words
from keras_posttrain.training.micro_batches import MicroBatches
from keras_posttrain.training.routing import Routing
from keras_posttrain.training.weights import ModelWeights

# Metrics that every training step reports in addition to its loss's.
STEP_METRICS = ("loss", "grad_norm", "learning_rate", "num_tokens", "skipped")

POLICY_OUTPUTS = (
    "per_token_logps",
    "correct",
    "entropies",
    "collision_entropies",
)


@dataclasses.dataclass(frozen=True, eq=False)
class LossTerms:
    """The loss of some rows, by a policy's forward pass.

    `token_outputs` is a function such as `Task.token_outputs`.
    """

    loss: object
    policy: object
    token_outputs: object

    def __call__(self, state, rows, normalizers, key, differentiable=True):
        """Returns loss and metrics of some rows, within `ModelWeights.scope`.

        The loss is these rows' share of the batch's; metrics are as
        `Loss.total` reports them. `normalizers` are those of the full batch;
        `key` is the JAX key of seed and step, or `None` for no dropout.
        """
        del state
        loss = self.loss
        if isinstance(loss, TokenLoss):
            scale = reductions.ratio(1.0, normalizers["loss"])
            weights = rows["completion_mask"].astype("float32") * scale
            total, outputs = self.policy.token_loss_sum(
                rows,
                weights,
                loss.token_loss,
                needs=loss.needs,
                dropout_key=key,
            )
            _, metrics = loss.total(rows, outputs)
            return total, metrics
        outputs = self.token_outputs(
            rows,
            loss.logps_mask(rows),
            loss.needs,
            dropout_key=key,
            differentiable=differentiable,
        )
        terms, metrics = loss.total(rows, outputs)
        shares = [reductions.ratio(terms[k], normalizers[k]) for k in terms]
        return sum(shares), metrics


@dataclasses.dataclass(frozen=True, eq=False)
class TrainStep:
    """One optimizer step and one evaluation step.

    A `state` is a dict: lists of arrays `trainable` and `frozen` in the order
    of `weights`, `optimizer` in that of `optimizer.variables` and `metrics`
    in that of the trackers' variables; the int32 scalars `step` and `seed`;
    and an entry for each of `companions`.

    Args:
        terms: function such as `LossTerms.__call__`.
        token_outputs: as in `LossTerms`, for losses that couple a batch.
        masters: list of indices into `optimizer.variables`, or `None`s, as
            `optimizers.build` returns it.
        dropout: bool, whether an adapter drops inputs.
        companions: dict by name, each a tuple of `FrozenPolicy`s whose arrays
            the step reads: `reference`, `teachers`.
        has_signal: function of a batch to a bool scalar, or `None`: where it
            is false, the step changes nothing and counts as skipped.
        routing: `Routing`, the part of a mixture's routers.
    """

    weights: ModelWeights
    loss: object
    terms: object
    token_outputs: object
    optimizer: object
    masters: list
    train_trackers: list
    test_trackers: list
    micro_batches: MicroBatches = MicroBatches()
    max_grad_norm: float | None = None
    dropout: bool = False
    companions: dict = dataclasses.field(default_factory=dict)
    has_signal: object = None
    routing: Routing = Routing()

    def held(self, frozen):
        """Returns the part of a state that a step reads and never changes."""
        return {
            "frozen": frozen,
            **{
                name: [model.values for model in models]
                for name, models in self.companions.items()
            },
        }

    def loss_and_gradients(self, state, batch):
        """Computes gradients of the loss, as `Task.loss_and_gradients`.

        The logs also have `has_signal` where that is known.
        """
        batch = self._with_reference(state, batch)
        normalizers = self.loss.normalizers(batch)
        key = self._dropout_key(state)
        routing = self.routing.of_batch(self, state, batch, key)

        def share(trainable, rows):
            with (
                self.weights.scope(trainable, state["frozen"]),
                routing.recorded() as layers,
            ):
                now = {**state, "trainable": trainable}
                found = self.terms(now, rows, normalizers, key)
            return routing.add(*found, layers)

        def sums(rows):
            (loss, metrics), gradients = jax.value_and_grad(
                share, has_aux=True
            )(state["trainable"], rows)
            return (loss, gradients), metrics

        if self._couples(batch):
            loss, gradients, metrics = batch_coupled.loss_and_gradients(
                self, state, batch, key, routing
            )
        else:
            (loss, gradients), metrics = self.micro_batches.sum(
                sums, batch, self._is_separable
            )
        logs = {
            "loss": loss,
            "num_tokens": jnp.sum(batch["segment_ids"] > 0).astype("float32"),
            "loss_weight": sum(normalizers.values()),
            **{k: reductions.metric_value(m) for k, m in metrics.items()},
        }
        if self.has_signal is not None:
            logs["has_signal"] = self.has_signal(batch)
        return gradients, logs

    def apply_gradients(self, state, gradients, logs):
        """Clips, applies the optimizer and records the step.

        As `Task.apply_gradients`; a step also counts as `skipped` where
        `has_signal` in the logs is false.
        """
        logs = dict(logs)
        weight = logs.pop("loss_weight", 1.0)
        norm = global_norm(gradients)
        keep = jnp.isfinite(norm) & (weight > 0) & logs.pop("has_signal", True)
        logs["grad_norm"] = norm
        before = state
        logs["skipped"] = 1.0 - keep.astype("float32")
        gradients = clip(gradients, norm, self.max_grad_norm)
        state = apply_optimizer(
            self.optimizer, self.masters, state, gradients, keep
        )
        late = getattr(self.optimizer, "rate_is_of_last_update", False)
        logs["learning_rate"] = self._learning_rate(state if late else before)
        weights = dict.fromkeys(self.loss.metric_names, weight)
        metrics = update_metrics(
            self.train_trackers,
            state["metrics"],
            logs,
            {**weights, "loss": weight},
        )
        return logs, {**state, "metrics": metrics}

    def evaluate(self, state, batch):
        """Returns `(logs, state)` of a batch, without gradients or dropout."""
        batch = self._with_reference(state, batch)
        normalizers = self.loss.normalizers(batch)

        def share(rows):
            with self.weights.scope(state["trainable"], state["frozen"]):
                return self.terms(
                    state, rows, normalizers, None, differentiable=False
                )

        if self._couples(batch):
            loss, metrics = batch_coupled.loss_alone(self, state, batch)
        else:
            loss, metrics = self.micro_batches.sum(
                share, batch, self._is_separable
            )
        logs = {k: reductions.metric_value(m) for k, m in metrics.items()}
        logs["loss"] = loss
        weight = sum(normalizers.values())
        values = update_metrics(
            self.test_trackers,
            state["metrics"],
            logs,
            dict.fromkeys(logs, weight),
        )
        return logs, {**state, "metrics": values}

    def _couples(self, batch):
        several = self.micro_batches.count(batch) > 1
        return several and self.loss.batch_coupled

    @property
    def _is_separable(self):
        """Whether all rows at once have the loss of parts of them."""
        balances = self.routing.policy and self.routing.loss.balance
        return not (self.loss.batch_coupled or balances)

    def _with_reference(self, state, batch):
        """Adds `ref_per_token_logps` to the batch if the loss reads them."""
        name = "ref_per_token_logps"
        if "reference" not in self.companions or name in batch:
            return batch
        (reference,), (values,) = (
            self.companions["reference"],
            state["reference"],
        )

        def logps(rows):
            return reference.logps(
                values, state["trainable"], state["frozen"], rows
            )

        return {**batch, name: self.micro_batches.map(logps, batch)}

    def _dropout_key(self, state):
        if not self.dropout:
            return None
        return jax.random.fold_in(jax.random.key(state["seed"]), state["step"])

    def _learning_rate(self, state):
        mapping = list(zip(self.optimizer.variables, state["optimizer"]))
        with keras.StatelessScope(state_mapping=mapping):
            return jnp.asarray(self.optimizer.learning_rate, "float32")


def compile_step(train_step, shardings=None, eager=False, options=None):
    """Jits a step for a loop over batches.

    Args:
        train_step: function `(state, batch) -> (logs, state)`.
        shardings: dict of lists of `jax.sharding.Sharding` by the names
            `trainable`, `optimizer` and `metrics`, or `None` without a
            distribution.
        options: dict or `None`, the compiler's options.

    Returns:
        A function `(changing, held, batch) -> (logs, changed)` of the parts
        of the state that a step changes, with `step` and `seed`, and of
        those that it only reads.
    """

    def run(changing, held, batch):
        result = train_step({**changing, **held}, batch)
        logs, state = keras_words.check_step(result)
        names = ("trainable", "optimizer", "metrics")
        return logs, {k: state[k] for k in names}

    if eager:
        return run
    out = None if shardings is None else (None, shardings)
    # What is held is an argument that is not donated: it is neither copied
    # nor a constant of the program.
    return jax.jit(
        run, donate_argnums=0, out_shardings=out, compiler_options=options
    )


def counters(step, seed):
    """Returns the counters of a state: `step` and `seed`."""
    return {"step": np.int32(step), "seed": np.int32(seed)}


def global_norm(gradients):
    """Returns the L2 norm of all gradients together, in float32."""
    squares = [jnp.sum(jnp.square(g.astype("float32"))) for g in gradients]
    return jnp.sqrt(sum(squares))


def clip(gradients, norm, max_norm):
    """Scales by `min(1, max_norm / (norm + 1e-6))`, as torch does."""
    if max_norm is None:
        return gradients
    factor = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return [g * factor.astype(g.dtype) for g in gradients]


def apply_optimizer(optimizer, masters, state, gradients, keep):
    """Updates weights and optimizer state; keeps the old ones if not `keep`.

    `masters` are indices into `optimizer.variables`, or `None`: the float32
    copy of each trainable variable of lower precision. Returns `state` with
    `trainable` and `optimizer` replaced.
    """
    old, variables = state["trainable"], state["optimizer"]
    sources = [
        value if at is None else variables[at]
        for value, at in zip(old, masters)
    ]
    gradients = [g.astype(s.dtype) for g, s in zip(gradients, sources)]
    if sharding.platform() == "cpu" and _is_applied_as_usual(optimizer):
        update = _apply_on_cpu
    else:
        update = _apply
    new, renewed = update(optimizer, variables, gradients, sources, keep)
    # The update reads the old values anyway, so that choosing between them
    # and the new ones costs nothing.
    new = [
        jnp.where(keep, n.astype(o.dtype), o)
        for n, o in zip(new, old, strict=True)
    ]
    return {**state, "trainable": new, "optimizer": renewed}


def _apply(optimizer, variables, gradients, weights, keep):
    """Computes new weights, and the optimizer's variables if `keep`."""
    new, renewed = optimizer.stateless_apply(variables, gradients, weights)
    return new, [jnp.where(keep, n, o) for n, o in zip(renewed, variables)]


def _is_applied_as_usual(optimizer):
    usual = keras.optimizers.Optimizer.stateless_apply
    return type(optimizer).stateless_apply is usual


def _apply_on_cpu(optimizer, variables, gradients, weights, keep):
    """Computes the same as `_apply`, with moments that are written once."""
    trained = optimizer._trainable_variables
    mapping = [
        *zip(trained, weights, strict=True),
        *zip(optimizer.variables, variables, strict=True),
    ]
    moments = dict(zip(map(id, optimizer.variables), variables))
    for variable in trained:
        # A master, which is a weight.
        moments.pop(id(variable), None)
    with _MomentScope(mapping, moments, keep) as scope:
        optimizer.apply(gradients)
    renewed = []
    for variable, before in zip(optimizer.variables, variables):
        value = scope.get_current_value(variable)
        if id(variable) not in moments:
            value = jnp.where(keep, value, before)
        renewed.append(value)
    return [scope.get_current_value(v) for v in trained], renewed


class _MomentScope(keras.StatelessScope):
    """The scope of an optimizer's update, which computes new moments once.

    XLA's CPU compiler would compute them a second time to update the weights:
    from copies of the old moments, whose memory the new ones take.

    Args:
        mapping: list of pairs of a variable and its value.
        moments: dict of the old values of the optimizer's variables, but
            masters, by the variables' ids.
        keep: bool scalar, whether new values replace the old ones.
    """

    def __init__(self, mapping, moments, keep):
        super().__init__(state_mapping=mapping)
        self._moments, self._keep = moments, keep

    def add_update(self, update):
        variable, value = update
        if id(variable) in self._moments:
            old = self._moments[id(variable)]
            # Without a barrier the weights' update would contain this.
            value = jax.lax.optimization_barrier(
                jnp.where(self._keep, value, old)
            )
        super().add_update((variable, value))


def update_metrics(trackers, values, logs, weights):
    """Returns the running means of an epoch with one step added.

    Args:
        values: list of arrays, those of the trackers' variables.
        logs: dict of scalars by tracker name. A custom `train_step` may omit
            some; their trackers stay as they are.
        weights: dict of scalars by tracker name, 1 by default. A value that
            is not finite has no weight.
    """
    variables = [v for t in trackers for v in t.variables]
    mapping = list(zip(variables, values))
    with keras.StatelessScope(state_mapping=mapping) as scope:
        for tracker in trackers:
            if tracker.name not in logs:
                continue
            value = jnp.asarray(logs[tracker.name], "float32")
            weight = jnp.asarray(weights.get(tracker.name, 1.0), "float32")
            finite = jnp.isfinite(value)
            tracker.update_state(
                jnp.where(finite, value, 0.0),
                sample_weight=jnp.where(finite, weight, 0.0),
            )
        renewed = [scope.get_current_value(v) for v in variables]
    return [n if n is not None else o for n, o in zip(renewed, values)]
