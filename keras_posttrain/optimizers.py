import contextlib
import functools
import json
import math

import jax
import jax.numpy as jnp
import keras
import optax


def is_decayed(path, array):
    """Returns `True` if weight decay applies to a weight by default.

    It does to matrices, but not to norms and biases.
    """
    return len(array.shape) > 1 and path.rsplit("/", 1)[-1] != "bias"


class OptaxOptimizer(keras.optimizers.Optimizer):
    """An Optax gradient transformation as a Keras optimizer.

    `task.compile(optimizer=optax.adamw(1e-5))` makes one. The transformation
    gets the parameters as a dict by path, so that Optax masks and partitions
    can select them by name. Its learning rate and weight decay are not
    changed. `kpt.decay_mask` is the mask that leaves out norms and biases:

    ```python
    optax.adamw(1e-5, weight_decay=0.1, mask=kpt.decay_mask)
    ```

    The learning rate is logged if the transformation was made with one
    `optax.inject_hyperparams`, and can be set if it was given as a number
    there. Otherwise it is logged as `null`.
    """

    def __init__(self, transform, name="optax"):
        super().__init__(learning_rate=1.0, name=name)
        self.transform = transform
        self._state_variables = None
        self._rate_index, self._rate_is_scheduled = None, False

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
                "Optax identifies parameters by path, and two variables share "
                "one: "
                f"{sorted(v.path for v in variables)}"
            )
        leaves, self._treedef = jax.tree_util.tree_flatten_with_path(
            init(params)
        )
        self._state_variables = []
        layouts = self._by_path(variables, map(_layout, variables))
        for i, (path, leaf) in enumerate(leaves):
            # The path of Optax's state for a parameter ends with its path.
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
        """Finds the state variable with the rate of `inject_hyperparams`.

        A schedule has a state in addition to its value. Several rates, as in
        `optax.multi_transform`, cannot be logged as one.
        """
        is_rate = [_is_rate(path, "hyperparams") for path in paths]
        if is_rate.count(True) == 1:
            self._rate_index = is_rate.index(True)
        self._rate_is_scheduled = any(
            _is_rate(path, "hyperparams_states") for path in paths
        )

    # Optax stores the rate of the last update, not of the next one.
    rate_is_of_last_update = True

    @property
    def learning_rate(self):
        if self._rate_index is None:
            return float("nan")
        return self._state_variables[self._rate_index].value

    @learning_rate.setter
    def learning_rate(self, value):
        if self._rate_index is None or self._rate_is_scheduled:
            raise ValueError(
                "The learning rate of an Optax transformation or of a "
                "schedule cannot be set. Pass the transformation the schedule "
                "that you need, or make its one rate settable: "
                "`optax.inject_hyperparams(optax.adamw)(learning_rate=1e-5)`. "
                f"Received: learning_rate={value}"
            )
        self._state_variables[self._rate_index].assign(value)

    def _by_path(self, variables, values):
        return {v.path: x for v, x in zip(variables, values)}

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        # The only hook of the base class that gets all gradients at once.
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
    """Returns `True` for variables of `shapes_only`, which have no values."""
    return not all(isinstance(v._value, jax.Array) for v in variables)


def _layout(variable):
    """Returns the layout of a variable on a mesh, or `None`."""
    return getattr(variable, "_layout", None)


def _is_rate(path, field):
    """Returns `True` if a path contains `field["learning_rate"]`."""
    return any(
        getattr(key, "name", None) == field
        and getattr(entry, "key", None) == "learning_rate"
        for key, entry in zip(path, path[1:])
    )


def decay_mask(params):
    """Returns the Optax mask that excludes norms and biases from decay.

    Args:
        params: dict of arrays by path, as `OptaxOptimizer` passes it.

    Returns:
        A dict of bools of the same keys.

    Example:

    ```python
    kpt.decay_mask({"dense/kernel": np.ones((2, 2)), "norm/scale": np.ones(2)})
    # {"dense/kernel": True, "norm/scale": False}
    adamw = optax.adamw(1e-5, weight_decay=0.1, mask=kpt.decay_mask)
    task.compile(optimizer=adamw)
    ```
    """
    return {path: is_decayed(path, x) for path, x in params.items()}


def get(optimizer, *, learning_rate):
    """Returns the Keras optimizer for an argument of `compile`.

    Args:
        optimizer: `"auto"`, a Keras optimizer, its name, or an Optax
            transformation.
        learning_rate: float, the rate of the AdamW that `"auto"` means.

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
    except (ValueError, TypeError, KeyError):
        found = None
    if found is None:
        raise ValueError(
            "`optimizer` must be 'auto', a Keras optimizer or its name, or "
            "an Optax transformation such as `optax.adamw(1e-5)`. "
            f"Received: optimizer={optimizer!r}"
        )
    return found


def settings(optimizer):
    """Returns the settings of an optimizer, a dict fit for JSON.

    Those of an Optax transformation are inside its functions: there are none.
    """
    if isinstance(optimizer, OptaxOptimizer):
        return {}
    if optimizer.variables and holds_shapes(optimizer.variables):
        return {}
    try:
        config = optimizer.get_config()
    except NotImplementedError:
        # A schedule of the user's own need not have a config.
        return {"learning_rate": repr(type(optimizer._learning_rate))}
    config.pop("name", None)
    return json.loads(json.dumps(config, default=repr))


def unbuilt_copy(optimizer):
    """Makes an optimizer of the same settings that is not built yet.

    It is for a plan, in which the values of scalars do not matter: a constant
    learning rate becomes 1, because during `fit` the optimizer's variables
    have no values that can be read.

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
    """Raises an error for optimizer settings that would change the step."""
    made_before = [v.path for v in optimizer.variables if _layout(v) is None]
    if made_before and keras.distribution.distribution() is not None:
        raise ValueError(
            "The optimizer was made before the distribution was set, and its "
            "variables are on one device. Call "
            "`keras.distribution.set_distribution` first. Received: "
            f"optimizer={optimizer.name!r} with {made_before}"
        )
    rate = None
    if not holds_shapes(optimizer.variables):
        rate = float(optimizer.learning_rate)
    # Optax reports no rate of most transformations.
    unknown = isinstance(optimizer, OptaxOptimizer)
    if rate is not None and not unknown and not 0 <= rate < math.inf:
        raise ValueError(
            "The learning rate must be a finite number of at least 0. "
            f"Received: {type(optimizer).__name__} with learning_rate={rate}"
        )
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "The optimizer's `gradient_accumulation_steps` averages means of "
            "unequal batches and runs schedules too fast. Pass "
            "`micro_batch_size=` to `compile` instead. Received: "
            "gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps}"
        )

    # Keras scales losses in its step, and unscales gradients in the optimizer.
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scaled or getattr(optimizer, "loss_scale_factor", None):
        raise ValueError(
            "Losses are not scaled: float32 and bfloat16 gradients do not "
            "underflow, and the optimizer would divide them by a factor that "
            "was not applied. Pass the inner optimizer, without "
            "`loss_scale_factor`. Received: optimizer="
            f"{type(optimizer).__name__}, loss_scale_factor="
            f"{getattr(optimizer, 'loss_scale_factor', None)}"
        )


def _exclude_from_decay(optimizer, variables, masters):
    """Excludes norms and biases from weight decay, unless the user chose.

    Args:
        optimizer: `keras.optimizers.Optimizer`.
        variables: list of `keras.Variable`, the model's.
        masters: list of `keras.Variable`, those that the optimizer updates.
    """
    if not getattr(optimizer, "weight_decay", None) or optimizer.built:
        return
    # A user who called `exclude_from_weight_decay` named variables of the
    # model, and the same choice is made for their masters.
    chosen = getattr(optimizer, "_exclude_from_weight_decay", None)
    if chosen is not None:
        chosen.update(
            optimizer._var_key(m)
            for v, m in zip(variables, masters)
            if optimizer._var_key(v) in chosen
        )
        return
    undecayed = [
        m for v, m in zip(variables, masters) if not is_decayed(v.path, v)
    ]
    if undecayed:
        optimizer.exclude_from_weight_decay(var_list=undecayed)


def _master(variable):
    """Makes a float32 copy with the same path.

    Optax masks and Keras's exclusions from weight decay use the path.
    """
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
    """Builds an optimizer with float32 masters of low-precision weights.

    Adam on bfloat16 weights changes nothing, because the decay of its second
    moment, 0.999, is 1 in bfloat16. Such weights are updated through a
    float32 copy, which is one of the optimizer's variables.

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
        # Keras's `__setattr__` would track the variables again.
        vars(optimizer)["kpt_masters"] = list(zip(variables, masters))
    indices = {id(v): i for i, v in enumerate(optimizer.variables)}
    return [indices.get(id(m)) for m in masters]


def _masters_of(optimizer, variables):
    """Returns the masters of an optimizer that was built for variables."""
    pairs = vars(optimizer).get("kpt_masters", [])
    if [id(v) for v, _ in pairs] != [id(v) for v in variables]:
        raise ValueError(
            "The optimizer was built for other variables and has their "
            "state. Pass a new optimizer to `compile`. "
            f"Received: optimizer={optimizer.name!r}"
        )
    return [master for _, master in pairs]


def refresh_masters(optimizer, variables):
    """Updates masters of weights that were assigned since.

    A master whose rounded value equals the weight is kept, because it is more
    precise.

    Args:
        optimizer: the optimizer that was passed to `build`.
        variables: list of trainable `keras.Variable`s.
    """
    for variable, master in zip(variables, _masters_of(optimizer, variables)):
        if master is variable:
            continue
        weight, value = variable.value, master.value
        same = value.astype(weight.dtype) == weight
        master.assign(jnp.where(same, value, weight.astype(value.dtype)))
