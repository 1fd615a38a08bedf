import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import keras
import keras_hub

from keras_posttrain.models import divergence_head, sharding
from keras_posttrain.models import head as heads
from keras_posttrain.models.attention import attention_scope, decoding_scope
from keras_posttrain.models.top_tokens import top_tokens

# Backbones whose attention layers have the seam of `models/attention.py`.
PACKABLE = (
    keras_hub.models.GemmaBackbone,
    keras_hub.models.Gemma3Backbone,
    keras_hub.models.LlamaBackbone,
    keras_hub.models.Llama3Backbone,
    keras_hub.models.MistralBackbone,
    keras_hub.models.QwenBackbone,
    keras_hub.models.Qwen3Backbone,
)
# Mixtures of experts, whose layers run one by one with a mask of padding.
MIXTURES = (
    keras_hub.models.MixtralBackbone,
    keras_hub.models.QwenMoeBackbone,
    keras_hub.models.Qwen3MoeBackbone,
)
SCALED_EMBEDDINGS = (
    keras_hub.models.GemmaBackbone,
    keras_hub.models.Gemma3Backbone,
)
PLAIN_INPUTS = {"token_ids", "padding_mask", "position_ids"}
# What `_select` reads of a batch.
SELECTED_BY = ("token_ids", "segment_ids", "positions", "predicted_by")


class Policy:
    """A KerasHub `CausalLM` as functions of a batch.

    All methods are traceable and read variables where they are called, so
    that a `keras.StatelessScope` around them decides the weights.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        adapter: `Adapter` attached to it, or `None`.
        remat: `"none"` keeps all activations for the backward pass,
            `"full"` keeps each decoder layer's input and computes the rest
            again, but for what devices that hold a layer together have added
            up: that is kept too.
        chunk_size: int or `None`, tokens per chunk of the head.
        num_layers: int or `None`, run only the first decoder layers, as a
            plan does; `None` for all.
    """

    def __init__(
        self,
        causal_lm,
        adapter=None,
        remat="none",
        chunk_size=None,
        num_layers=None,
    ):
        self.causal_lm = causal_lm
        self.backbone = causal_lm.backbone
        self.adapter = adapter
        self.remat = remat
        self.chunk_size = chunk_size
        self.num_layers = num_layers
        # Subclasses outside the table (vision towers, mixtures) override
        # parts of these layers: only the classes themselves are known.
        self.packable = type(self.backbone) in PACKABLE and not getattr(
            self.backbone, "vision_encoder", None
        )
        self.is_mixture = type(self.backbone) in MIXTURES
        if remat != "none" and not (self.packable or self.is_mixture):
            raise ValueError(
                f"{type(self.backbone).__name__} runs by KerasHub's own call, "
                "whose layers cannot be rematerialised one by one. Use "
                "remat='none' and a smaller `micro_batch_size`. "
                f"Received: remat={remat!r}"
            )
        wanted = set(self.backbone.input) - PLAIN_INPUTS
        if not self.packable and wanted:
            raise ValueError(
                f"{type(self.backbone).__name__} wants inputs "
                f"{sorted(wanted)} beside text, which is not supported. Use "
                "a text-only preset."
            )

    @property
    def layers(self):
        """List of the decoder layers that run."""
        return self.backbone.transformer_layers[: self.num_layers]

    @property
    def kernel(self):
        """The variable that the head multiplies with."""
        embedding = self.backbone.token_embedding
        if embedding.tie_weights:
            return embedding.embeddings
        return embedding.reverse_embeddings

    def head(self, temperature=1.0, axis=None):
        embedding = self.backbone.token_embedding
        return heads.Head(
            transposed=embedding.tie_weights,
            soft_cap=embedding.logit_soft_cap,
            temperature=temperature,
            chunk_size=self.chunk_size,
            trainable=self.kernel.trainable,
            axis=axis,
        )

    def hidden_states(self, batch, dropout_key=None, taps=None):
        """Final hidden states, after the last norm.

        Args:
            batch: dict with `token_ids`, `segment_ids` and `positions`, int
                arrays of shape `(rows, length)`; `sequence_ids` of shape
                `(rows, num_sequences)` where an adapter drops inputs;
                `prefix_segments` of that shape where sequences share a
                prompt.
            dropout_key: JAX key of the seed and the step, or `None` for no
                dropout.
            taps: `Taps` or `None`: what is wanted of the inside, filled
                while the model runs.

        Returns:
            A float array of shape `(rows, length, hidden_dim)`.
        """
        if taps is not None:
            taps.check(self)
        with contextlib.ExitStack() as stack:
            if dropout_key is not None and self.adapter is not None:
                keys = _dropout_keys(batch, dropout_key)
                stack.enter_context(self.adapter.dropping(keys))
            if self.packable:
                return self._packed_forward(batch, taps)
            if self.is_mixture:
                return self._mixture_forward(batch)
            return self._plain_forward(batch)

    def _packed_forward(self, batch, taps=None):
        ids = batch["token_ids"]
        scope = attention_scope(
            batch["segment_ids"],
            batch["positions"],
            _prefix_ids(batch),
            taps=taps,
        )
        layers = itertools.count()

        def run(layer, x):
            x, index = self._layer(layer, x), next(layers)
            if taps is not None and index in taps.hidden_layers:
                taps.hidden[index] = x.reshape(*ids.shape, -1)
            return x

        x = self._run_layers(ids.reshape(-1), scope, run)
        return x.reshape(*ids.shape, -1)

    def _run_layers(self, ids, scope, run=lambda layer, x: layer(x)):
        """Final hidden states of `(tokens,)` ids, as `(tokens, 1, hidden)`."""
        embedding = self.backbone.token_embedding
        x = sharding.looked_up(embedding(ids[:, None]), embedding.embeddings)
        if isinstance(self.backbone, SCALED_EMBEDDINGS):
            x = x * jnp.asarray(self.backbone.hidden_dim**0.5, x.dtype)
        with scope:
            for layer in self.layers:
                x = run(layer, x)
        return self.backbone.layer_norm(x)

    def prefill(self, batch):
        """Keys and values of prompts.

        Args:
            batch: as in `hidden_states`.

        Returns:
            A list with, for each layer, `(keys, values)` of shape
            `(rows * length, kv_heads, head_dim)`, keys rotated.
        """
        kept = []
        scope = attention_scope(
            batch["segment_ids"], batch["positions"], kept=kept
        )
        self._run_layers(batch["token_ids"].reshape(-1), scope)
        return kept

    def decode(self, token_ids, lengths, step, past, recent):
        """Logits of the next token of many sequences.

        Args:
            token_ids: int array of shape `(slots,)`, the last token of each.
            lengths, step, past, recent: as in
                `models/attention.py:decoding_scope`.

        Returns:
            `(logits, recent)`: float32 of shape `(slots, vocabulary)`, not
            divided by a temperature, and `recent` with the tokens added.
        """
        recent = list(recent)
        scope = decoding_scope(lengths, step, past, recent)
        hidden = self._run_layers(token_ids, scope)[:, 0]
        kernel = self.kernel.value.astype(hidden.dtype)
        logits, _ = self.head().logits(hidden, kernel)
        return logits, recent

    def _layer(self, layer, x, **inputs):
        x = sharding.by_rows(x)
        variables = layer.variables + self.adapter_variables(layer)
        gathers = sharding.gather(variables, x.dtype)
        if self.remat == "none" and not any(gathers):
            return layer(x, **inputs)
        values = [v.value for v in variables]
        summing = sharding.summing(layer)

        def again(values, x):
            mapping = [
                (variable, value if gather is None else gather(value))
                for variable, value, gather in zip(variables, values, gathers)
            ]
            scope = keras.StatelessScope(state_mapping=mapping)
            with scope, sharding.naming(summing):
                return layer(x, **inputs)

        # What was sent is computed again for no more than it must: sums over
        # devices are kept, which take the memory of the layer's input once
        # more. Weights that were gathered are not: all layers' together
        # would be the whole model on every device.
        keep = jax.checkpoint_policies.save_only_these_names(sharding.SUMMED)
        if self.remat == "none":
            keep = jax.checkpoint_policies.save_anything_except_these_names(
                sharding.GATHERED
            )
        return jax.checkpoint(again, policy=keep)(values, x)

    def adapter_variables(self, layer):
        if self.adapter is None:
            return []
        inside = {id(sub) for sub in layer._flatten_layers()}
        found = []
        for pair, a, b in zip(
            self.adapter.pairs, self.adapter.a, self.adapter.b
        ):
            if id(pair.layer) in inside:
                found += [a, b]
        return found

    def _mixture_forward(self, batch):
        padding_mask = (batch["segment_ids"] > 0).astype("int32")
        embedding = self.backbone.token_embedding
        x = embedding(batch["token_ids"])
        x = sharding.looked_up(x, embedding.embeddings)
        for layer in self.layers:
            x = self._layer(
                layer, x, decoder_padding_mask=padding_mask, training=False
            )
        return self.backbone.layer_norm(x)

    def _plain_forward(self, batch):
        inputs = {
            "token_ids": batch["token_ids"],
            "padding_mask": (batch["segment_ids"] > 0).astype("int32"),
            "position_ids": batch["positions"],
        }
        wanted = self.backbone.input
        return self.backbone(
            {k: v for k, v in inputs.items() if k in wanted}, training=False
        )

    def _flat(self, batch, dropout_key, hidden=None):
        if hidden is None:
            hidden = self.hidden_states(batch, dropout_key)
        return hidden.reshape(-1, hidden.shape[-1])

    def _projection(self, hidden, temperature=1.0, axis=None):
        """What `hidden` is projected with: `(head, kernel, its split)`.

        A kernel that is gathered along its second axis is turned: along its
        first it comes to lie as the products read it. XLA would make a copy
        of the whole kernel otherwise, 1 GiB of Llama-3's, and one of its
        gradient.
        """
        head = self.head(temperature, axis)
        kernel = self.kernel.value.astype(hidden.dtype)
        split = sharding.split_of(self.kernel)
        if split is not None and split.axes[1] in split.to_save_memory:
            head = dataclasses.replace(head, transposed=not head.transposed)
            split = dataclasses.replace(split, axes=split.axes[::-1])
            kernel = kernel.T
        return head, kernel, split

    def _shaped(self, values, batch):
        shape = batch["token_ids"].shape
        return {k: v.reshape(shape) for k, v in values.items()}

    def token_outputs(
        self,
        batch,
        mask,
        *,
        needs=("per_token_logps",),
        temperature=1.0,
        dropout_key=None,
        differentiable=True,
        hidden=None,
    ):
        """Log-probabilities and their companions for the tokens of `mask`.

        Args:
            batch: as in `hidden_states`.
            mask: bool array of shape `(rows, length)`.
            needs: names of what is wanted: `per_token_logps`, `correct`,
                `entropies`, `collision_entropies`.
            temperature: float, divides the logits.
            dropout_key: as in `hidden_states`.
            differentiable: bool; `per_token_logps` and `entropies` have
                gradients.
            hidden: what `hidden_states` gave, where it is known already.

        Returns:
            A dict of float32 arrays of shape `(rows, length)`, 0 outside
            `mask` and at a sequence's first token.
        """
        extras = _extras(needs)
        axis = self._shared_axis(batch)
        hidden = self._flat(batch, dropout_key, hidden)
        head, kernel, split = self._projection(hidden, temperature, axis)

        def sweep(kernel, hidden, batch, mask):
            tokens = _select(batch, mask)
            if not differentiable:
                return (), heads.token_values(
                    head, hidden, kernel, tokens, extras=extras
                )
            probe = jnp.zeros(tokens.index.shape, "float32")
            return (), heads.token_logps(
                head, hidden, kernel, tokens, probe, extras
            )

        _, values = _over_rows(
            sweep, kernel, split, hidden, batch, mask, shared=axis
        )
        values = self._shaped(values, batch)
        return {name: values[name] for name in needs}

    def _shared_axis(self, batch):
        """The axis of the mesh over which the head's vocabulary is split."""
        split = sharding.split_of(self.kernel)
        return sharding.shared_axis(split, batch["token_ids"].shape[0])

    def top_tokens(self, batch, mask, k, temperature=1.0):
        """The most probable tokens where those of `mask` stand.

        Args:
            batch, mask, temperature: as in `token_outputs`.
            k: int, how many.

        Returns:
            Dict of `top_ids` (int32) and `top_logps` (float32) of shape
            `(rows, length, k)`, best first, 0 as in `token_outputs`.
        """
        hidden = self._flat(batch, None)
        head, kernel, split = self._projection(hidden, temperature)

        def sweep(kernel, hidden, batch, mask):
            tokens = _select(batch, mask)
            return (), top_tokens(head, hidden, kernel, tokens, k)

        _, values = _over_rows(sweep, kernel, split, hidden, batch, mask)
        shape = (*batch["token_ids"].shape, k)
        return {name: v.reshape(shape) for name, v in values.items()}

    def token_loss_sum(
        self, batch, weights, token_loss, *, needs=(), dropout_key=None
    ):
        """The weighted sum of an elementwise loss of log-probabilities.

        Args:
            batch: as in `hidden_states`.
            weights: float array of shape `(rows, length)`; tokens of weight
                0 are not projected.
            token_loss: elementwise function of log-probabilities.
            needs, dropout_key: as in `token_outputs`.

        Returns:
            `(sum, outputs)`, the sum differentiable, the outputs not.
        """
        axis, extras = self._shared_axis(batch), _extras(needs)
        hidden = self._flat(batch, dropout_key)
        head, kernel, split = self._projection(hidden, axis=axis)

        def sweep(kernel, hidden, batch, weights):
            tokens = _select(batch, weights != 0)
            by_slot = weights.reshape(-1).astype("float32")[tokens.index]
            return heads.token_loss_sum(
                head, hidden, kernel, tokens, by_slot, token_loss, extras
            )

        total, values = _over_rows(
            sweep, kernel, split, hidden, batch, weights, shared=axis
        )
        values = self._shaped(values, batch)
        return total, {name: values[name] for name in needs}

    def teacher(self, batch, source=None, hidden=None):
        """This model's distributions, for a student to be compared with.

        Args:
            batch: as in `hidden_states`; what this model reads, row by row
                of the student's.
            source: int array of shape `(rows, length)` or `None`: for each
                of the student's tokens, the column of this model's hidden
                state that predicts it; by default that of the student's own,
                whose batch this is.
            hidden: what `hidden_states` gave, where it is known already.

        Returns:
            A `models/divergence_head.py:FullTeacher`, without gradients.
        """
        hidden = jax.lax.stop_gradient(self._flat(batch, None, hidden))
        head, kernel, split = self._projection(hidden)
        rows, length = batch["token_ids"].shape
        if source is None:
            source = batch.get("predicted_by")
        if source is None:
            columns = jnp.arange(-1, length - 1, dtype="int32")
            source = jnp.broadcast_to(columns, (rows, length))
        row_start = jnp.arange(rows, dtype="int32")[:, None] * length
        # The first token of a row has none, and is never compared.
        source = row_start + jnp.clip(source, 0, length - 1)
        return divergence_head.FullTeacher(
            head,
            hidden,
            jax.lax.stop_gradient(kernel),
            source.reshape(-1),
            split,
        )

    def divergence_sum(
        self,
        batch,
        weights,
        teachers,
        teacher_weights,
        divergence,
        *,
        temperature=1.0,
        tail=True,
        dropout_key=None,
        hidden=None,
        needs=(),
        mask=None,
    ):
        """The weighted sum of divergences from teachers and likelihoods.

        Args:
            batch: as in `hidden_states`.
            weights: pair of float arrays of shape `(rows, length)`, those of
                the divergences and of the log-probabilities; the second may
                be `None`. Tokens where both are 0 are not projected.
            teachers: sequence of `FullTeacher` and `TopTeacher`.
            teacher_weights: float array of shape
                `(teachers, rows, length)`, or `None` for 1 everywhere.
            divergence, temperature, tail: as in
                `models/divergence_head.py:divergence_sum`.
            dropout_key: as in `hidden_states`.
            hidden: what `hidden_states` gave, where it is known already.
            needs: names of what is wanted: `divergences`,
                `per_token_logps`, `agrees`, `teacher_per_token_logps`.
            mask: bool array of shape `(rows, length)` or `None`: tokens to
                project beside those with a weight, for their values.

        Returns:
            `(sum, outputs)`: the sum differentiable, the outputs not; a dict
            of float32 arrays of shape `(rows, length)`.
        """
        hidden = self._flat(batch, dropout_key, hidden)
        head, kernel, split = self._projection(hidden)
        used = functools.reduce(
            jnp.logical_or,
            [w != 0 for w in weights if w is not None],
            jnp.zeros(batch["token_ids"].shape, bool)
            if mask is None
            else mask,
        )
        if teacher_weights is None:
            shape = (len(teachers), *batch["token_ids"].shape)
            teacher_weights = jnp.ones(shape, "float32")

        def sweep(kernels, hidden, batch, used, weights, teachers, shares):
            tokens = _select(batch, used)

            def by_slot(x):
                return jnp.asarray(x, "float32").reshape(-1)[tokens.index]

            ours, *theirs = kernels
            return divergence_head.divergence_sum(
                head,
                hidden,
                ours,
                tokens,
                jax.tree.map(by_slot, weights),
                divergence_head.with_kernels(teachers, theirs),
                jax.tree.map(by_slot, shares),
                divergence,
                temperature,
                tail,
                tuple(needs),
            )

        teachers, theirs, splits = divergence_head.without_kernels(teachers)
        total, values = sharding.over_rows(
            sweep,
            [kernel, *theirs],
            [split, *splits],
            hidden,
            _selected_by(batch),
            used,
            tuple(weights),
            teachers,
            tuple(teacher_weights),
        )
        values = self._shaped(values, batch)
        return total, {name: values[name] for name in needs}


def _extras(needs):
    return tuple(name for name in heads.EXTRAS if name in needs)


def _over_rows(sweep, kernel, split, hidden, batch, *rows, shared=None):
    """`sweep(kernel, hidden, batch, *rows)`, by device."""
    return sharding.over_rows(
        lambda kernels, *rows: sweep(*kernels, *rows),
        [kernel],
        [split],
        hidden,
        _selected_by(batch),
        *rows,
        shared=shared,
    )


def _prefix_ids(batch):
    """The segment that each token's own goes on from, -1 without one."""
    prefixes = batch.get("prefix_segments")
    if prefixes is None:
        return None
    slot = jnp.maximum(batch["segment_ids"] - 1, 0)
    of_token = jnp.take_along_axis(prefixes, slot, axis=1)
    return jnp.where(of_token > 0, of_token, -1)


def _selected_by(batch):
    return {name: batch[name] for name in SELECTED_BY if name in batch}


def _select(batch, mask):
    mask = mask & (batch["positions"] > 0) & (batch["segment_ids"] > 0)
    return heads.select_tokens(
        batch["token_ids"], mask, batch.get("predicted_by")
    )


def _dropout_keys(batch, step_key):
    from keras_posttrain.models.lora import DropoutKeys

    slot = jnp.maximum(batch["segment_ids"] - 1, 0)
    sequences = jnp.take_along_axis(batch["sequence_ids"], slot, axis=1)
    return DropoutKeys(
        step_key, sequences.reshape(-1), batch["positions"].reshape(-1)
    )
