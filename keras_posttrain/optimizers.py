import contextlib
import functools

import jax
import jax.numpy as jnp
import keras
import optax


def is_decayed(variable):
    """Whether weight decay applies: to matrices, not to norms and biases.

    Args:
        variable: `keras.Variable`.

    Returns:
        A bool.
    """
    last = variable.path.rsplit("/", 1)[-1]
    return len(variable.shape) > 1 and last != "bias"


class OptaxOptimizer(keras.optimizers.Optimizer):
    """An Optax gradient transformation as a Keras optimizer.

    `task.compile(optimizer=optax.adamw(1e-5))` makes one of these. The
    transformation sees the parameters as a dict by path, so that Optax masks
    and partitions can go by name; it is taken as it is, learning rate and
    weight decay included. `kpt.decay_mask` is the mask that leaves norms and
    biases out:

    ```python
    optax.adamw(1e-5, weight_decay=0.1, mask=kpt.decay_mask)
    ```

    Its learning rate is known and logged where the transformation was made
    with `optax.inject_hyperparams`, once, and settable if it was a number
    there; else it is logged as `null`.

    Args:
        transform: `optax.GradientTransformation`.
    """

    def __init__(self, transform, name="optax"):
        super().__init__(learning_rate=1.0, name=name)
        self.transform = transform
        self._state_variables = None
        self._rate_at, self._rate_is_scheduled = None, False

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        if holds_shapes(variables):
            values = [
                jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables
            ]
            init = functools.partial(jax.eval_shape, self.transform.init)
        else:
            values, init = [v.value for v in variables], self.transform.init
        params = self._by_path(variables, values)
        if len(params) < len(variables):
            raise ValueError(
                "Optax sees parameters by path, and two variables share one: "
                f"{sorted(v.path for v in variables)}"
            )
        leaves, self._treedef = jax.tree_util.tree_flatten_with_path(
            init(params)
        )
        self._state_variables = []
        layouts = self._by_path(variables, map(_layout, variables))
        for i, (path, leaf) in enumerate(leaves):
            # What Optax keeps for a parameter has its path at the end.
            owner = getattr(path[-1], "key", None) if path else None
            same = owner in params and leaf.shape == params[owner].shape
            variable = keras.Variable(
                leaf if isinstance(leaf, jax.Array) else "zeros",
                shape=leaf.shape,
                dtype=leaf.dtype,
                trainable=False,
                name=f"state_{i}",
                layout=layouts[owner] if same else None,
            )
            self._track_variable(variable)
            self._state_variables.append(variable)
        self._find_learning_rate([path for path, _ in leaves])

    def _find_learning_rate(self, paths):
        """Which state variable `optax.inject_hyperparams` keeps the rate in.

        Beside its value, a schedule has a state of its own. Several rates,
        as of `optax.multi_transform`, have no one value.
        """
        at = [_place(path, "hyperparams") for path in paths]
        if at.count(True) == 1:
            self._rate_at = at.index(True)
        self._rate_is_scheduled = any(
            _place(path, "hyperparams_states") for path in paths
        )

    # Optax stores the rate of the update that it has made.
    rate_is_of_last_update = True

    @property
    def learning_rate(self):
        if self._rate_at is None:
            return float("nan")
        return self._state_variables[self._rate_at].value

    @learning_rate.setter
    def learning_rate(self, value):
        if self._rate_at is None or self._rate_is_scheduled:
            raise ValueError(
                "An Optax transformation keeps its learning rate to itself, "
                "and so does a schedule. Give it the schedule that you mean, "
                "or make its one rate settable: "
                "`optax.inject_hyperparams(optax.adamw)(learning_rate=1e-5)`. "
                f"Received: learning_rate={value}"
            )
        self._state_variables[self._rate_at].assign(value)

    def _by_path(self, variables, values):
        return {v.path: x for v, x in zip(variables, values)}

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        # The one hook of the base class that sees all gradients at once.
        del learning_rate
        grads = self._by_path(trainable_variables, grads)
        params = self._by_path(
            trainable_variables, [v.value for v in trainable_variables]
        )
        leaves = [v.value for v in self._state_variables]
        state = jax.tree.unflatten(self._treedef, leaves)
        updates, state = self.transform.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        for variable in trainable_variables:
            variable.assign(params[variable.path])
        for variable, leaf in zip(
            self._state_variables, jax.tree.leaves(state)
        ):
            variable.assign(leaf)


def holds_shapes(variables):
    """Whether variables have no values, as `shapes_only` makes them."""
    return not all(isinstance(v._value, jax.Array) for v in variables)


def _layout(variable):
    """Where a variable lies on a mesh; Keras copies it to moments so."""
    return getattr(variable, "_layout", None)


def _place(path, field):
    """Whether a path of a state goes through `field["learning_rate"]`."""
    return any(
        getattr(key, "name", None) == field
        and getattr(entry, "key", None) == "learning_rate"
        for key, entry in zip(path, path[1:])
    )


def decay_mask(params):
    """The Optax mask that leaves norms and biases out of weight decay.

    Args:
        params: dict of arrays by path, as `OptaxOptimizer` passes it.

    Returns:
        A dict of bools of the same keys.
    """
    return {
        path: x.ndim > 1 and path.rsplit("/", 1)[-1] != "bias"
        for path, x in params.items()
    }


def get(optimizer, *, learning_rate):
    """The Keras optimizer for what a user passed to `compile`.

    Args:
        optimizer: `"auto"`, a Keras optimizer, its name, or an Optax
            transformation.
        learning_rate: float, of the AdamW that `"auto"` stands for.

    Returns:
        A `keras.optimizers.Optimizer`.
    """
    if optimizer == "auto":
        return keras.optimizers.AdamW(
            learning_rate, weight_decay=0.0, epsilon=1e-8
        )
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return optimizer
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return OptaxOptimizer(optimizer)
    try:
        found = keras.optimizers.get(optimizer)
    except (ValueError, TypeError):
        found = None
    if found is None:
        raise ValueError(
            "`optimizer` must be 'auto', a Keras optimizer or its name, or "
            "an Optax transformation such as `optax.adamw(1e-5)`. "
            f"Received: optimizer={optimizer!r}"
        )
    return found


def renewed(optimizer):
    """Makes an optimizer of the same settings that is not built yet.

    It is for a plan: a learning rate that is a number becomes 1. While Keras
    trains, that of the optimizer cannot be read.

    Args:
        optimizer: `keras.optimizers.Optimizer`.

    Returns:
        A `keras.optimizers.Optimizer`.
    """
    if isinstance(optimizer, OptaxOptimizer):
        return OptaxOptimizer(optimizer.transform, name=optimizer.name)
    scalars = [
        (v, jnp.ones((), v.dtype)) for v in optimizer.variables if not v.shape
    ]
    with keras.StatelessScope(state_mapping=scalars):
        config = optimizer.get_config()
    return type(optimizer).from_config(config)


def check(optimizer):
    """Refuses settings that would make the step another one."""
    made_before = [v.path for v in optimizer.variables if _layout(v) is None]
    if made_before and keras.distribution.distribution() is not None:
        raise ValueError(
            "The optimizer was made before the distribution was set, and its "
            "variables lie on one device. Call "
            "`keras.distribution.set_distribution` first. Received: "
            f"optimizer={optimizer.name!r} with {made_before}"
        )
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "The optimizer's `gradient_accumulation_steps` averages means of "
            "unequal batches and runs schedules too fast. Pass "
            "`micro_batch_size=` to `compile` instead. Received: "
            "gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}"
        )

    # Keras scales losses in its own step, and gradients back in here.
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scaled or getattr(optimizer, "loss_scale_factor", None):
        raise ValueError(
            "Losses are not scaled: float32 and bfloat16 gradients do not "
            "underflow, and the optimizer would divide them by a factor that "
            "they do not have. Pass the inner optimizer, without "
            "`loss_scale_factor`. Received: optimizer="
            f"{type(optimizer).__name__}, loss_scale_factor="
            f"{getattr(optimizer, 'loss_scale_factor', None)}"
        )


def _exclude_from_decay(optimizer, variables, masters):
    """Leaves norms and biases out of weight decay, unless the user chose.

    Args:
        optimizer: `keras.optimizers.Optimizer`.
        variables: list of `keras.Variable`, the model's.
        masters: list of `keras.Variable`, what the optimizer updates.
    """
    if not getattr(optimizer, "weight_decay", None) or optimizer.built:
        return
    # Whoever has called `exclude_from_weight_decay` has chosen, and named
    # the model's variables.
    chosen = getattr(optimizer, "_exclude_from_weight_decay", None)
    if chosen is not None:
        chosen.update(
            optimizer._var_key(m)
            for v, m in zip(variables, masters)
            if optimizer._var_key(v) in chosen
        )
        return
    undecayed = [m for v, m in zip(variables, masters) if not is_decayed(v)]
    if undecayed:
        optimizer.exclude_from_weight_decay(var_list=undecayed)


def _master(variable):
    """A float32 copy of the same path: Optax masks and Keras's exclusions
    from weight decay go by it."""
    if keras.backend.standardize_dtype(variable.dtype) == "float32":
        return variable
    *scopes, name = variable.path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        without = holds_shapes([variable])
        return keras.Variable(
            "zeros" if without else variable.value.astype("float32"),
            shape=variable.shape,
            dtype="float32",
            name=name,
            layout=_layout(variable),
        )


def build(optimizer, variables):
    """Builds an optimizer, with float32 masters of what is kept in less.

    Adam on bfloat16 weights alone changes nothing: its second moment's
    decay, 0.999, is 1 in bfloat16. Such weights are updated on a float32
    copy, which is one of the optimizer's variables.

    Args:
        optimizer: `keras.optimizers.Optimizer`.
        variables: list of trainable `keras.Variable`s.

    Returns:
        A list: for each variable the index of its master among
        `optimizer.variables`, or `None`.
    """
    if not variables:
        raise ValueError(
            "Nothing is trainable: every layer of the model is frozen. Set "
            "`causal_lm.trainable = True` or pass `lora=kpt.LoRA(...)`."
        )
    if optimizer.built:
        masters = _masters_of(optimizer, variables)
    else:
        masters = [_master(v) for v in variables]
        _exclude_from_decay(optimizer, variables, masters)
        optimizer.build(masters)
        known = {id(v) for v in variables}
        for master in masters:
            if id(master) not in known:
                optimizer._track_variable(master)
        # Past Keras's `__setattr__`, which would track the variables again.
        vars(optimizer)["kpt_masters"] = list(zip(variables, masters))
    place = {id(v): i for i, v in enumerate(optimizer.variables)}
    return [place.get(id(m)) for m in masters]


def _masters_of(optimizer, variables):
    """The masters of an optimizer that was built for these variables."""
    pairs = vars(optimizer).get("kpt_masters", [])
    if [id(v) for v, _ in pairs] != [id(v) for v in variables]:
        raise ValueError(
            "The optimizer was built for other variables and keeps their "
            "state. Pass a new optimizer to `compile`. "
            f"Received: optimizer={optimizer.name!r}"
        )
    return [master for _, master in pairs]


def refresh_masters(optimizer, variables):
    """Lets masters follow weights that were assigned since.

    A master whose rounded value is the weight stays: it knows more digits.

    Args:
        optimizer: what `build` was given.
        variables: list of trainable `keras.Variable`s.
    """
    for variable, master in zip(variables, _masters_of(optimizer, variables)):
        if master is variable:
            continue
        weight, value = variable.value, master.value
        same = value.astype(weight.dtype) == weight
        master.assign(jnp.where(same, value, weight.astype(value.dtype)))
