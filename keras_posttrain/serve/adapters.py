"""Several LoRA adapters of one base, trained by one set of programs.

The variables of the task say which model is computed. Their values are
arguments of each program: an adapter is a list of arrays, and to train
another one is to pass other arrays.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from keras_posttrain.data.batches.packing import coarse_lengths
from keras_posttrain.distribution import processes
from keras_posttrain.models import quantized
from keras_posttrain.serve.losses import named
from keras_posttrain.serve.refused import Refused
from keras_posttrain.training import checks, padding


@dataclasses.dataclass(eq=False)
class AdapterState:
    """What belongs to one adapter.

    Attributes:
        weights: list of float32 arrays, in the order of the task's trainable
            variables. They are never donated: samplers keep them.
        means, squares: lists of arrays, Adam's moments.
        step: int, optimizer steps done.
        gradients: list of float32 arrays, the sums since the last step, or
            `None`.
    """

    weights: list
    means: list
    squares: list
    step: int = 0
    gradients: list | None = None

    @classmethod
    def of(cls, weights):
        """Returns a state that begins with weights."""
        return cls(weights, *(_zeros(weights) for _ in range(2)))


@dataclasses.dataclass(frozen=True)
class AdamParams:
    """The settings of one step of AdamW, as in torch.

    `grad_clip_norm` bounds the global norm of the gradients; 0 does not.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            most = 1.0 if name.startswith("beta") else float("inf")
            if not 0 <= value < most:
                raise Refused(
                    f"`{name}` must be in [0, {most:g}). "
                    f"Received: {name}={value!r}"
                )


class AdapterTrainer:
    """The programs that train any adapter of a task.

    Args:
        task: a task with an adapter.
        micro_batch_size: int, rows that pass through the model at once.
    """

    def __init__(self, task, micro_batch_size=8):
        checks.whole_rows("The server of the Tinker API")
        self.task = task
        rows = padding.micro_rows(micro_batch_size)
        self.row_counts = sorted(
            {padding.micro_rows(2**i) for i in range(rows.bit_length())}
            | {rows}
        )
        self.max_tokens = task.sequence_length
        self.vocabulary_size = task.causal_lm.backbone.vocabulary_size
        options = quantized.compiler_options(task.causal_lm)
        self._jit = functools.partial(jax.jit, compiler_options=options)
        # The programs of losses: with gradients, and without.
        self._gradients, self._forward = {}, {}
        self._step = self._jit(_adam, donate_argnums=(1, 2, 3))

    # Adapters

    def initial(self, seed, rank=None, attention=True, mlp=True):
        """Returns the weights of a new adapter, which changes nothing yet.

        Args:
            seed: int, as of `kpt.LoRA`.
            rank: int up to that of the task's adapter: the rest is zero, and
                so are its gradients.
            attention, mlp: bools, whether these layers are adapted.
        """
        adapter = self.task.adapter
        values = {}
        factors = adapter.initial_factors(seed)
        for pair, a, b, new in zip(
            adapter.pairs, adapter.a, adapter.b, factors
        ):
            adapts = mlp if ".mlp." in pair.name else attention
            kept = np.arange(adapter.lora.rank) < (rank or adapter.lora.rank)
            # A is (..., in, rank).
            values[id(a)] = new * (kept & adapts)
            values[id(b)] = jnp.zeros(b.shape, "float32")
        return [
            jax.device_put(values[id(v)], v.value.sharding)
            for v in self.task.trainable_variables
        ]

    # Passes

    def check(self, request):
        """Raises a `Refused` for data that cannot be trained on."""
        loss = named(request.loss)
        loss.config(request.config)
        if not request.examples:
            raise Refused("A request must have data. Received: none.")
        for i, example in enumerate(request.examples):
            self._check_example(i, example, loss)

    def _check_example(self, i, example, loss):
        size = len(example.token_ids)
        if not 1 <= size <= self.max_tokens:
            raise Refused(
                f"A datum must have 1 to {self.max_tokens} tokens. Received: "
                f"datum {i} with {size}. Shorten it, or start the server "
                f"with --sequence-length {size}."
            )
        if "target_tokens" not in example.inputs:
            raise Refused(f"`target_tokens` is missing in datum {i}.")
        targets = example.inputs["target_tokens"]
        known = {"target_tokens", *loss.needs}
        for name, array in example.inputs.items():
            if name not in known:
                raise Refused(
                    f"The loss reads {sorted(known)}. Received: {name!r} in "
                    f"datum {i}"
                )
            if array.shape != targets.shape or array.shape[:1] != (size,):
                raise Refused(
                    f"`{name}` of datum {i} must have one value for each of "
                    f"its {size} tokens and targets of shape "
                    f"{targets.shape}. Received: shape {array.shape}"
                )
        for name, default in loss.needs.items():
            if default is None and name not in example.inputs:
                raise Refused(f"The loss reads `{name}`: missing in datum {i}")
        for name, ids in (
            ("the input", example.token_ids),
            ("`target_tokens`", targets),
        ):
            wrong = ids[(ids < 0) | (ids >= self.vocabulary_size)]
            if len(wrong):
                raise Refused(
                    f"Token ids must be in [0, {self.vocabulary_size}), the "
                    f"model's vocabulary. Received: {wrong[0]} in {name} of "
                    f"datum {i}"
                )

    def forward_backward(self, state, request):
        """Adds the gradients of a request to those of an adapter.

        Returns:
            `(logps, metrics)`: a list of float32 arrays of the shape of each
            example's `target_tokens`, and a dict of floats.
        """
        loss = named(request.loss)
        config = loss.config(request.config)
        sums = None
        if not request.forward_only:
            sums = state.gradients or _zeros(state.weights)
            # An error must not leave donated arrays behind.
            state.gradients = None
        computed = []
        for places, batch in self._batches(request.examples, loss):
            inputs = state.weights, self._frozen(), batch, config
            if request.forward_only:
                value, logps = self._forward_of(request.loss)(*inputs)
            else:
                run = self._gradients_of(request.loss)
                sums, value, logps = run(sums, *inputs)
            computed.append((places, value, logps))
        # Read at the end: the device need not wait between two batches.
        found, total = [None] * len(request.examples), 0.0
        for places, value, logps in computed:
            total += float(value)
            logps = np.asarray(logps)
            for row, i in enumerate(places):
                targets = request.examples[i].inputs["target_tokens"]
                found[i] = logps[row, : len(targets)].reshape(targets.shape)
        if not request.forward_only:
            state.gradients = sums
        return found, {"loss:sum": total}

    def optim_step(self, state, params):
        """Updates an adapter by its gradients, and forgets them.

        Returns:
            dict of floats: `grad_norm`, before it is clipped, and `skipped`,
            1 where gradients were not finite and nothing was changed.
        """
        if state.gradients is None:
            raise Refused(
                "There are no gradients to step by: call `forward_backward` "
                "before `optim_step`."
            )
        found = self._step(
            state.weights,
            state.means,
            state.squares,
            state.gradients,
            float(state.step + 1),
            dataclasses.asdict(params),
        )
        state.weights, state.means, state.squares, norm, is_finite = found
        state.gradients = None
        state.step += int(is_finite)
        return {"grad_norm": float(norm), "skipped": 1.0 - float(is_finite)}

    # Batches

    def _batches(self, examples, loss):
        """Yields `(places, batch)`: rows of similar length.

        The shapes are few: numbers of rows and lengths are powers of two.
        """
        order = sorted(
            range(len(examples)),
            key=lambda i: (
                examples[i].inputs["target_tokens"].shape[1:],
                len(examples[i].token_ids),
            ),
        )
        at = 0
        while at < len(order):
            width = examples[order[at]].inputs["target_tokens"].shape[1:]
            places = [
                i
                for i in order[at : at + self.row_counts[-1]]
                if examples[i].inputs["target_tokens"].shape[1:] == width
            ]
            yield places, self._batch([examples[i] for i in places], loss)
            at += len(places)

    def _batch(self, examples, loss):
        rows = next(n for n in self.row_counts if n >= len(examples))
        longest = max(len(x.token_ids) for x in examples)
        lengths = coarse_lengths(self.max_tokens)
        length = next(n for n in lengths if n >= longest)
        shape = rows, length
        targets = examples[0].inputs["target_tokens"].shape[1:]
        batch = {
            "token_ids": np.zeros(shape, np.int32),
            "segment_ids": np.zeros(shape, np.int32),
            "positions": np.zeros(shape, np.int32),
            "target_tokens": np.zeros((*shape, *targets), np.int32),
            "is_used": np.zeros((*shape, *targets), np.float32),
        }
        for name in loss.needs:
            batch[name] = np.zeros((*shape, *targets), np.float32)
        for row, example in enumerate(examples):
            size = len(example.token_ids)
            batch["token_ids"][row, :size] = example.token_ids
            batch["segment_ids"][row, :size] = 1
            batch["positions"][row, :size] = np.arange(size)
            batch["is_used"][row, :size] = 1
            for name, default in {"target_tokens": None, **loss.needs}.items():
                value = example.inputs.get(name, default)
                batch[name][row, :size] = value
        return processes.put_rows(batch)

    def _frozen(self):
        return [v.value for v in self.task.non_trainable_variables]

    # Programs

    def _forward_of(self, name):
        if name not in self._forward:
            run = functools.partial(self._sum, named(name).function)
            self._forward[name] = self._jit(run)
        return self._forward[name]

    def _gradients_of(self, name):
        if name not in self._gradients:
            run = functools.partial(self._add_gradients, named(name).function)
            self._gradients[name] = self._jit(run, donate_argnums=0)
        return self._gradients[name]

    def _add_gradients(self, loss, sums, weights, frozen, batch, config):
        run = functools.partial(self._sum, loss)
        found = jax.value_and_grad(run, has_aux=True)(
            weights, frozen, batch, config
        )
        (value, logps), gradients = found
        sums = [a + b.astype("float32") for a, b in zip(sums, gradients)]
        return sums, value, logps

    def _sum(self, loss, weights, frozen, batch, config):
        """Returns the sum of a loss, and the log-probabilities of targets."""
        logps = self._logps(weights, frozen, batch)
        # The derivative at what is not used must be finite too.
        used = batch["is_used"] > 0
        values = loss(jnp.where(used, logps, 0.0), batch, config)
        return jnp.where(used, values, 0.0).sum(), logps

    def _logps(self, weights, frozen, batch):
        """Returns the log-probabilities of targets, in their shape."""
        policy = self.task.policy
        used = batch["segment_ids"] > 0
        targets = batch["target_tokens"]
        columns = targets[..., None] if targets.ndim == 2 else targets
        here = jnp.arange(used.shape[1], dtype="int32")[None]
        with self.task.using_weights(weights, frozen):
            hidden = policy.hidden_states(batch)
            found = [
                policy.token_outputs(
                    # A target is predicted where its input is, and may be
                    # any token.
                    batch
                    | {
                        "token_ids": columns[..., k],
                        "positions": batch["positions"] + 1,
                        "predicted_by": jnp.broadcast_to(here, used.shape),
                    },
                    used,
                    hidden=hidden,
                )["per_token_logps"]
                for k in range(columns.shape[-1])
            ]
        return jnp.stack(found, axis=-1).reshape(targets.shape)


def _zeros(arrays):
    return [jnp.zeros_like(x, "float32") for x in arrays]


def _adam(weights, means, squares, gradients, step, params):
    """Returns new weights, moments, the gradients' norm and if it is finite.

    This is AdamW of torch, with its decoupled weight decay.
    """
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))
    is_finite = jnp.isfinite(norm)
    clip, rate = params["grad_clip_norm"], params["learning_rate"]
    factor = jnp.where(clip > 0, jnp.minimum(1.0, clip / (norm + 1e-6)), 1.0)
    one, two = params["beta1"], params["beta2"]

    def update(w, m, v, g):
        g = g * factor
        new_m = one * m + (1 - one) * g
        new_v = two * v + (1 - two) * jnp.square(g)
        mean = new_m / (1 - one**step)
        root = jnp.sqrt(new_v / (1 - two**step)) + params["eps"]
        new_w = w * (1 - rate * params["weight_decay"]) - rate * mean / root
        kept = zip((new_w, new_m, new_v), (w, m, v))
        return [jnp.where(is_finite, new, old) for new, old in kept]

    found = [update(*each) for each in zip(weights, means, squares, gradients)]
    return *map(list, zip(*found)), norm, is_finite
