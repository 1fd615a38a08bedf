"""A causal language model as functions of a packed batch."""

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import keras_hub

from keras_posttrain.losses import reductions
from keras_posttrain.models import (
    context,
    divergence_head,
    experts,
    gemma3n,
    gemma4,
    gpu_attention,
    norms,
    qwen3_5,
    recurrence,
    rematerialisation,
    rotary,
    sharding,
    tensor_parallel,
    vision,
)
from keras_posttrain.models import head as heads
from keras_posttrain.models.attention import (
    add_hook,
    attention_layer,
    attention_scope,
    decoding_scope,
    extending_scope,
    subtree_ends,
    verifying_scope,
)
from keras_posttrain.models.equal_layers import Calls
from keras_posttrain.models.hf.blocks import multipliers_of
from keras_posttrain.models.hf.families import is_gemma4_decoder
from keras_posttrain.models.lora import DropoutKeys
from keras_posttrain.models.quantized import values_of
from keras_posttrain.models.top_tokens import top_tokens

# Mixtures of experts, which get the hook of `models/attention.py`.
MIXTURES = (
    keras_hub.models.MixtralBackbone,
    keras_hub.models.QwenMoeBackbone,
    keras_hub.models.Qwen3MoeBackbone,
    keras_hub.models.GptOssBackbone,
)
# Backbones whose attention layers have the hook.
PACKABLE = (
    keras_hub.models.GemmaBackbone,
    keras_hub.models.Gemma3Backbone,
    keras_hub.models.Gemma4Backbone,
    keras_hub.models.LlamaBackbone,
    keras_hub.models.Llama3Backbone,
    keras_hub.models.MistralBackbone,
    keras_hub.models.QwenBackbone,
    keras_hub.models.Qwen3Backbone,
    *qwen3_5.BACKBONES,
    *MIXTURES,
)
# As messages name them.
PACKABLE_MODELS = (
    "a model of Gemma 1-4, Llama, Mistral, Mixtral, Qwen 2-3.5 or their "
    "mixtures, or gpt-oss, or a Hugging Face directory of Gemma 3n, Granite, "
    "OLMo 2-3, Phi 3-4 or SmolLM3"
)
SCALED_EMBEDDINGS = (
    keras_hub.models.GemmaBackbone,
    keras_hub.models.Gemma3Backbone,
    keras_hub.models.Gemma4Backbone,
)
PLAIN_INPUTS = {"token_ids", "padding_mask", "position_ids"}
# The arrays of a batch that `_select` reads.
SELECTED_BY = ("token_ids", "segment_ids", "positions", "predicted_by")


class Policy:
    """A KerasHub `CausalLM` as functions of a batch.

    All methods can be traced by JAX. They read variables when they are
    called, so that a `keras.StatelessScope` can set the weights.

    Args:
        remat: one of `rematerialisation.CHOICES`, what decoder layers keep
            for the backward pass, or `"auto"`.
        chunk_size: int or `None`, tokens per chunk of the head.
        num_layers: int or `None`: run only the first decoder layers, as a
            plan does.
        choose_remat: function of the policy and the tokens of a batch on a
            device to one of `rematerialisation.CHOICES`, for `"auto"`.
        chooser: `gpu_attention.Chooser` of what computes attention, or
            `None` for an automatic choice.
    """

    def __init__(
        self,
        causal_lm,
        adapter=None,
        remat="none",
        chunk_size=None,
        num_layers=None,
        choose_remat=None,
        chooser=None,
    ):
        self.causal_lm = causal_lm
        self.backbone = causal_lm.backbone
        self.adapter = adapter
        self.remat = remat
        self.choose_remat = choose_remat
        self.chooser = chooser or gpu_attention.Chooser()
        self.chunk_size = chunk_size
        self.num_layers = num_layers
        self._routing = None
        _check_not_gemma3n(self.backbone)
        # Subclasses (with experts or other inputs) override parts of these
        # layers: only these exact classes are supported.
        self.packable = type(self.backbone) in PACKABLE
        self._per_layer_inputs = None
        if type(self.backbone) is keras_hub.models.Gemma4Backbone:
            self.packable = is_gemma4_decoder(self.backbone)
            if self.packable:
                gemma4.prepare(self.backbone)
                if self.backbone.hidden_size_per_layer_input:
                    self._per_layer_inputs = gemma4.PerLayerInputs(
                        self.backbone
                    )
        # Whether some layers have a state in the place of keys and values.
        self.is_recurrent = self.packable and qwen3_5.is_text(self.backbone)
        if self.is_recurrent:
            qwen3_5.prepare(self.backbone)
        if type(self.backbone) in MIXTURES:
            for layer in self.backbone.transformer_layers:
                add_hook(attention_layer(layer))
                experts.compute_chosen_experts(layer)
        if remat not in ("none", "auto") and not self.packable:
            raise ValueError(
                f"{type(self.backbone).__name__} runs by KerasHub's own call, "
                "whose layers cannot be rematerialised one by one. Use "
                "remat='none' and a smaller `micro_batch_size`. "
                f"Received: remat={remat!r}"
            )
        wanted = set(self.backbone.input) - PLAIN_INPUTS
        if not self.packable and wanted:
            raise ValueError(
                f"{type(self.backbone).__name__} needs inputs "
                f"{sorted(wanted)} in addition to text, which is not "
                "supported. Use a text-only preset."
            )

    @property
    def layers(self):
        """List of the decoder layers that run."""
        return self.backbone.transformer_layers[: self.num_layers]

    @property
    def state_dim(self):
        """Int, the features of a token that decoder layers pass on."""
        backbone = self.backbone
        return backbone.hidden_dim * gemma3n.count_states(backbone)

    @property
    def attending(self):
        """List of the numbers of the decoder layers with attention."""
        linear = qwen3_5.LINEAR
        return [
            i
            for i, layer in enumerate(self.layers)
            if getattr(layer, "layer_type", None) != linear
        ]

    @property
    def can_split_rows(self):
        """Bool, whether the tokens of a row can be split over devices."""
        return self.packable and not self.is_recurrent

    @property
    def has_experts(self):
        """Bool, whether a layer has experts whose routing is recorded."""
        return self.packable and any(map(experts.is_recorded, self.layers))

    @property
    def choices_shape(self):
        """Tuple, the mixtures and the experts that a token chooses in each."""
        mixtures = sum(map(experts.is_recorded, self.layers))
        return mixtures, experts.num_choices(self.backbone)

    @contextlib.contextmanager
    def recorded_routing(self, is_recorded=True):
        """Records the routing of all calls of `hidden_states` inside.

        With `is_recorded=False` that of the calls inside is left out.

        Yields:
            A list of the `RoutingSums` of each layer with experts, filled by
            the calls; or `None`.
        """
        before, self._routing = self._routing, [] if is_recorded else None
        try:
            yield self._routing
        finally:
            self._routing = before

    @property
    def kernel(self):
        """The variable of the projection on the vocabulary."""
        embedding = self.backbone.token_embedding
        if embedding.tie_weights:
            return embedding.embeddings
        return embedding.reverse_embeddings

    def head(self, temperature=1.0, axis=None):
        """Returns the `Head` with this model's settings."""
        embedding = self.backbone.token_embedding
        return heads.Head(
            transposed=embedding.tie_weights,
            soft_cap=embedding.logit_soft_cap,
            temperature=temperature,
            chunk_size=self.chunk_size,
            trainable=self.kernel.trainable,
            axis=axis,
        )

    def hidden_states(self, batch, dropout_key=None, capture=None):
        """Computes the final hidden states, after the last norm.

        Args:
            batch: dict with `token_ids`, `segment_ids` and `positions`, int
                arrays of shape `(rows, length)`; `sequence_ids` of shape
                `(rows, num_sequences)` where an adapter drops inputs;
                `sequence_mask` of that shape, without which rows are an
                engine's; `prefix_segments` of that shape where segments
                continue others: see `attention.py:subtree_ends`; then also
                `shared_by` where routing is recorded; `routed_experts`
                where it is replayed, as of `experts.py:given_choices`, of
                shape `(rows, length, mixtures, top_k)`; the arrays of
                images where there are any: see `vision.py`.
            dropout_key: JAX key of the seed and the step, or `None` for no
                dropout.
            capture: `ActivationCapture` to fill, or `None`.

        Returns:
            A float array of shape `(rows, length, hidden_dim)`; of the rows'
            pieces where a layout splits their tokens: see `context.py`.
        """
        if capture is not None:
            capture.check(self)
        self._check_pieces(batch, capture)
        with contextlib.ExitStack() as stack:
            if dropout_key is not None and self.adapter is not None:
                keys = _dropout_keys(batch, dropout_key)
                stack.enter_context(self.adapter.dropout(keys))
            if self.packable:
                return self._packed_forward(batch, capture)
            return self._plain_forward(batch)

    def _check_pieces(self, batch, capture):
        """Raises a `ValueError` for rows whose tokens cannot be split."""
        pieces = context.pieces_of(batch["token_ids"].shape)
        reasons = {
            f"of {type(self.backbone).__name__}": not self.can_split_rows,
            "with images": "pixels" in batch,
            "whose activations are captured": capture is not None,
        }
        found = [reason for reason, holds in reasons.items() if holds]
        if pieces.count > 1 and found:
            raise ValueError(
                f"The tokens of rows {found[0]} cannot be split over devices. "
                "Use `kpt.distribution.fsdp()`. "
                f"Received: context={pieces.count}"
            )

    def _packed_forward(self, batch, capture=None):
        pieces = context.pieces_of(batch["token_ids"].shape)
        ids = pieces.cut(batch["token_ids"])
        remat = self._remat(ids)
        if pieces.count > 1:
            # The gathered keys and values of all layers would be kept.
            remat = "attention" if remat == "none" else remat
        calls = self._calls(batch, capture)
        scope = self._scope(batch, capture=capture, pieces=pieces, calls=calls)
        layers = itertools.count()

        def run(layer, x, **more):
            index = next(layers)
            call = None if calls is None else (calls, index)
            out = self._layer(layer, x, remat, call, **more)
            if capture is not None and index in capture.hidden_layers:
                x = out[0] if isinstance(out, tuple) else out
                if gemma3n.joins_states(self.backbone.layer_norm):
                    x = x[:, :, 0]
                capture.hidden[index] = x.reshape(*ids.shape, -1)
            return out

        weights = None
        if self._routing is not None:
            weights = pieces.cut(token_counts(batch))
        given = batch.get("routed_experts")
        if given is not None:
            given = pieces.cut(given).reshape(ids.size, *given.shape[2:])
        with (
            experts.used_tokens(pieces.cut(batch["segment_ids"]) > 0),
            experts.given_choices(given),
            experts.recorded_routing(weights) as routing,
        ):
            x = self._run_layers(ids.reshape(-1), scope, run, batch, remat)
        if self._routing is not None:
            self._routing.extend(routing)
        return x.reshape(*ids.shape, -1)

    def _calls(self, batch, capture):
        """Returns `Calls` of layers, or `None` where each one is traced.

        What a layer reads or records by its number is not an array that it
        could be called with. Outside of a program nothing is traced.
        """
        by_number = (
            capture is not None
            or "routed_experts" in batch
            or (self.adapter is not None and self.adapter.drops_inputs)
        )
        is_traced = isinstance(batch["token_ids"], jax.core.Tracer)
        if by_number or not is_traced or len(self.layers) < 2:
            return None
        return Calls()

    def _run_layers(
        self,
        ids,
        scope,
        run=lambda f, x, **more: f(x, **more),
        batch=None,
        remat="none",
    ):
        """Computes hidden states `(tokens, 1, hidden)` of `(tokens,)` ids.

        `run` calls a layer with hidden states and keyword arguments. `batch`
        is as in `hidden_states`, where the tokens are of one with images.
        """
        embedding = self.backbone.token_embedding
        ids, is_padding = vision.embedded_ids(self.causal_lm, ids, batch)
        x = _embedded(embedding, ids, is_padding)
        if isinstance(self.backbone, SCALED_EMBEDDINGS):
            x = x * jnp.asarray(self.backbone.hidden_dim**0.5, x.dtype)
        if batch is not None and "pixels" in batch:
            rows = x.reshape(*batch["token_ids"].shape, -1)
            rows = vision.put_images(self.backbone, rows, batch)
            x = rows.reshape(x.shape)
        norm = self.backbone.layer_norm
        with (
            norms.without_axes_of_one([*self.layers, norm]),
            rotary.with_tables(self.layers),
        ):
            if type(self.backbone) is keras_hub.models.Gemma4Backbone:
                inputs = self._inputs_by_layer(ids, is_padding, x, remat)
                with scope:
                    x = gemma4.run_layers(self.layers, x, inputs, run)
                if gemma3n.joins_states(norm):
                    return self._layer(norm, x, remat)
                return norm(x)
            with scope:
                for layer in self.layers:
                    x = run(layer, x)
            return norm(x)

    def _inputs_by_layer(self, ids, is_padding, x, remat):
        """Returns the result of `gemma4.PerLayerInputs`, or `None`."""
        if self._per_layer_inputs is None:
            return None
        embedding = self.backbone.per_layer_token_embedding
        if embedding.input_dim < self.backbone.vocabulary_size:
            ids = gemma3n.known(ids, embedding.input_dim)
        own = _embedded(embedding, ids, is_padding)
        return self._layer(self._per_layer_inputs, x, remat, own=own)

    @contextlib.contextmanager
    def _scope(
        self, batch, kept=None, capture=None, slots=None, pieces=None,
        windows=None, calls=None,
    ):  # fmt: skip
        """Opens the scopes of a batch; `slots` are the segments of a row.

        `pieces`, `windows` and `calls` are as in `attention_scope`.
        """
        ids, prefixes = batch["segment_ids"], batch.get("prefix_segments")
        scope = attention_scope(
            ids,
            batch["positions"],
            None if prefixes is None else subtree_ends(prefixes, ids),
            images=vision.image_blocks(self.backbone, batch),
            kept=kept,
            windows=windows,
            capture=capture,
            numbers=self.attending,
            calls=calls,
            pieces=pieces,
            **self._kernels(batch),
        )
        rows = None
        if self.is_recurrent:
            if prefixes is None and kept is not None:
                prefixes = jnp.zeros((ids.shape[0], slots), "int32")
            rows = recurrence.PackedRows(ids)
            if prefixes is not None:
                rows = recurrence.TreeRows(ids, prefixes, kept)
        with scope, recurrence.recurrent_scope(rows):
            yield

    def _kernels(self, batch):
        """Returns the arguments `chooser` and `is_packed` of a scope."""
        mask = batch.get("sequence_mask")
        if mask is None:
            return {"chooser": self.chooser.of_engine, "is_packed": True}
        return {"chooser": self.chooser, "is_packed": mask.shape[1] > 1}

    def prefill(self, batch, slots=None, windows=None):
        """Computes the keys, rotated, and values of prompts, and states.

        Args:
            batch: as in `hidden_states`. Segments may continue others.
            slots: int, the most segments of a row, where layers are
                recurrent and no segment continues another.
            windows: as in `attention_scope`.

        Returns:
            A pair for each layer: of keys and values, both of shape
            `(rows * length, kv_heads, head_dim)`, or of the arrays of
            `RecurrentState` after each segment, `rows * slots` of them.
        """
        kept = []
        scope = self._scope(batch, kept=kept, slots=slots, windows=windows)
        with experts.used_tokens(batch["segment_ids"] > 0):
            ids = batch["token_ids"].reshape(-1)
            self._run_layers(ids, scope, batch=batch)
        return kept

    def extend(
        self, token_ids, positions, cache, slots, counts, place=lambda x: x
    ):
        """Computes tokens after others, and writes them to their cache.

        `token_ids` has the shape `(sequences, tokens)`, of which the first
        `counts`, an int array of shape `(sequences,)`, are used. The other
        arguments are those of `attention.py:extending_scope`.

        Returns:
            `cache`, a list, with the tokens added.
        """
        cache, rows = list(cache), None
        if self.is_recurrent:
            rows = recurrence.NextTokens(
                token_ids.shape, slots, counts, cache, place
            )
        scope = extending_scope(positions, slots, counts, cache, place)
        with recurrence.recurrent_scope(rows):
            self._run_layers(token_ids.reshape(-1), scope)
        return cache

    def decode(self, token_ids, lengths, step, past, recent, is_active=None):
        """Computes the logits of the next token of each sequence.

        `token_ids` has the shape `(slots,)`, the last token of each sequence.
        The states of recurrent layers change only where `is_active`, a bool
        array of that shape, is true; `None` is everywhere. The other
        arguments are those of `attention.py:decoding_scope`.

        Returns:
            `(logits, recent)`: a float32 array of shape
            `(slots, vocabulary)`, not divided by a temperature, and `recent`
            with the tokens added.
        """
        recent, rows = list(recent), None
        if self.is_recurrent:
            if is_active is None:
                is_active = jnp.ones(token_ids.shape, bool)
            rows = recurrence.NextToken(is_active, recent)
        scope = decoding_scope(lengths, step, past, recent)
        return self._next_logits(token_ids, scope, rows), recent

    def verify(
        self, token_ids, lengths, positions, column, placed, past, recent
    ):
        """Computes the logits after each of the next tokens of sequences.

        `token_ids` has the shape `(slots, tokens)`. No layer is recurrent.
        The other arguments are those of `attention.py:verifying_scope`.

        Returns:
            As `decode`; the logits have the shape
            `(slots * tokens, vocabulary)`.
        """
        recent = list(recent)
        scope = verifying_scope(
            lengths, positions, column, placed, past, recent
        )
        return self._next_logits(token_ids.reshape(-1), scope), recent

    def _next_logits(self, token_ids, scope, rows=None):
        with recurrence.recurrent_scope(rows):
            hidden = self._run_layers(token_ids, scope)[:, 0]
        hidden = self._scaled(hidden)
        kernel = self.kernel.value.astype(hidden.dtype)
        return self.head().logits(hidden, kernel)

    def _remat(self, token_ids):
        """Returns what layers keep for tokens of shape `(rows, length)`."""
        if self.remat != "auto":
            return self.remat
        *_, shards = sharding.data_axis()
        if token_ids.shape[0] % shards:
            shards = 1
        shards *= tensor_parallel.shards(self, token_ids.size)
        return self.choose_remat(self, token_ids.size // shards)

    def _layer(self, layer, x, remat, call=None, **more):
        """Calls a layer with hidden states and more arrays.

        `remat` is one of `rematerialisation.CHOICES`; `call` is a pair of
        `Calls` and the layer's number, or `None` to trace this layer.
        """
        layouts = tensor_parallel.layouts_for(layer, len(x))
        if layouts is None:
            x = sharding.shard_rows(x)
        else:
            x = jax.lax.with_sharding_constraint(x, layouts.split)
        variables = layer.variables + self.adapter_variables(layer)
        gathers = sharding.gather(variables, x.dtype)
        keeps_all = remat == "none" and not any(gathers)
        if keeps_all and call is None:
            with tensor_parallel.split_products(layouts):
                return layer(x, **more)
        trained = [v.trainable for v in variables]

        def run(values, x, more):
            x, values = sharding.in_turn(x, values, gathers, trained)
            mapping = [
                (variable, value if gather is None else gather(value))
                for variable, value, gather in zip(variables, values, gathers)
            ]
            scope = values_of(mapping)
            with (
                scope,
                tensor_parallel.split_products(layouts),
                rematerialisation.named_outputs(layer, remat),
                experts.routing_of_layer() as routing,
            ):
                out = layer(x, **more)
            return out, routing.found()

        def make():
            if keeps_all:
                return run
            policy = rematerialisation.saveable(remat)
            return jax.checkpoint(run, policy=policy)

        if call is None:
            function = make()
        else:
            calls, number = call
            function = calls.function(number, layer, variables, make)
        out, routing = function([v.value for v in variables], x, more)
        experts.add_routing(routing)
        return out

    def adapter_variables(self, layer):
        """Returns the adapter's variables of a decoder layer."""
        if self.adapter is None:
            return []
        inside = {id(variable) for variable in layer.variables}
        found = []
        for adapter in self.adapter.stack:
            for pair, a, b in zip(adapter.pairs, adapter.a, adapter.b):
                if id(pair.variables[0]) in inside:
                    found += [a, b]
        return found

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
        return self._scaled(hidden.reshape(-1, hidden.shape[-1]))

    def _scaled(self, hidden):
        """Returns hidden states as the head projects them."""
        factors = multipliers_of(self.causal_lm)
        return hidden if factors is None else hidden / factors["logits"]

    def _projection(self, hidden, temperature=1.0, axis=None):
        """Returns `(head, kernel, split)` for the projection of `hidden`.

        A kernel that is gathered along its second axis is transposed first.
        Gathered along its first axis, its layout is the one that the products
        read. Otherwise XLA would copy the full kernel (1 GiB for Llama-3) and
        its gradient.
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
        """Returns values of `_over_rows`, of shape `(rows, length, ...)`."""
        targets = context.Targets.of(batch)
        pieces = targets.pieces.shape[0]

        def shaped(x):
            return targets.join(x.reshape(pieces, -1, *x.shape[1:]))

        return {name: shaped(x) for name, x in values.items()}

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
        """Computes log-probabilities and more for the tokens of `mask`.

        Args:
            batch, dropout_key: as in `hidden_states`.
            mask: bool array of shape `(rows, length)`.
            needs: names of the values to return, out of `per_token_logps`,
                `correct`, `entropies` and `collision_entropies`.
            temperature: float that divides the logits.
            differentiable: bool, whether `per_token_logps` and `entropies`
                have gradients.
            hidden: result of `hidden_states`, if computed already.

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
        """Returns the axis of the mesh that splits the vocabulary."""
        split = sharding.split_of(self.kernel)
        return sharding.shared_axis(split, batch["token_ids"].shape[0])

    def top_tokens(self, batch, mask, k, temperature=1.0):
        """Computes the top-k tokens at the positions of `mask`.

        Returns a dict of `top_ids` (int32) and `top_logps` (float32) of
        shape `(rows, length, k)`, best first, 0 as in `token_outputs`.
        """
        hidden = self._flat(batch, None)
        head, kernel, split = self._projection(hidden, temperature)

        def sweep(kernel, hidden, batch, mask):
            tokens = _select(batch, mask)
            return (), top_tokens(head, hidden, kernel, tokens, k)

        _, values = _over_rows(sweep, kernel, split, hidden, batch, mask)
        return self._shaped(values, batch)

    def token_loss_sum(
        self, batch, weights, token_loss, *, needs=(), dropout_key=None
    ):
        """Sums a weighted elementwise loss of log-probabilities.

        Tokens of weight 0 in `weights`, `(rows, length)`, are not projected.
        Returns the sum and the dict of `token_outputs`; only the sum has
        gradients.
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
        """Returns this model as a `FullTeacher`, without gradients.

        Args:
            batch: this model's input; its rows correspond to those of the
                student's batch.
            source: int array of shape `(rows, length)` or `None`: for each
                token of the student, the column of this model's hidden state
                that predicts it. By default both read the same batch, and it
                is the column of the student's hidden state.
            hidden: as in `token_outputs`.
        """
        hidden = jax.lax.stop_gradient(self._flat(batch, None, hidden))
        head, kernel, split = self._projection(hidden)
        targets = context.Targets.of(batch)
        if targets.pieces.count > 1:
            if source is not None:
                raise ValueError(
                    "The tokens of a row cannot be split over devices where "
                    "a teacher reads other tokens than its student. Use "
                    "`kpt.distribution.fsdp()`. "
                    f"Received: context={targets.pieces.count}"
                )
            hidden = _at_targets(targets, hidden)
            return divergence_head.FullTeacher(
                head,
                hidden,
                jax.lax.stop_gradient(kernel),
                jnp.arange(hidden.shape[0], dtype="int32"),
                split,
            )
        rows, length = batch["token_ids"].shape
        if source is None:
            source = batch.get("predicted_by")
        if source is None:
            columns = jnp.arange(-1, length - 1, dtype="int32")
            source = jnp.broadcast_to(columns, (rows, length))
        row_start = jnp.arange(rows, dtype="int32")[:, None] * length
        # No state predicts the first token of a row, which is never compared.
        source = row_start + jnp.clip(source, 0, length - 1)
        return divergence_head.FullTeacher(
            head,
            hidden,
            jax.lax.stop_gradient(kernel),
            source.reshape(-1),
            split,
        )

    def divergence_sum(
        self, batch, weights, teachers, teacher_weights, divergence, *,
        temperature=1.0, tail=True, dropout_key=None, hidden=None, needs=(),
        mask=None,
    ):  # fmt: skip
        """Sums weighted divergences from teachers and log-probabilities.

        Arguments that are not listed are those of `token_outputs` and of
        `divergence_head.py:divergence_sum`.

        Args:
            weights: pair of float arrays of shape `(rows, length)`, the
                weights of the divergences and of the log-probabilities; the
                second may be `None`. Tokens where both are 0 are not
                projected.
            teacher_weights: float array of shape
                `(teachers, rows, length)`, or `None` for 1 everywhere.
            needs: names of the values to return, out of `divergences`,
                `per_token_logps`, `agrees` and `teacher_per_token_logps`.
            mask: bool array of shape `(rows, length)` or `None`: tokens to
                project in addition to those with a weight.

        Returns:
            `(sum, outputs)`: the sum, which has gradients, and a dict of
            float32 arrays of shape `(rows, length)` without gradients.
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

        targets = context.Targets.of(batch)
        cut = functools.partial(jax.tree.map, targets.cut)
        teachers = [_teacher_at(targets, teacher) for teacher in teachers]
        teachers, theirs, splits = divergence_head.without_kernels(teachers)
        total, values = sharding.over_rows(
            sweep,
            [kernel, *theirs],
            [split, *splits],
            _at_targets(targets, hidden),
            _selected_by(batch, targets),
            cut(used),
            cut(tuple(weights)),
            teachers,
            cut(tuple(teacher_weights)),
        )
        values = self._shaped(values, batch)
        return total, {name: values[name] for name in needs}


def _check_not_gemma3n(backbone):
    if isinstance(backbone, keras_hub.models.Gemma3nBackbone):
        raise ValueError(
            "Gemma 3n is read from Hugging Face directories only, of its text "
            "model or of the multimodal one. Pass the path of such a "
            "directory to `from_preset`. Received: a KerasHub model with a "
            f"{type(backbone).__name__}"
        )


def _embedded(embedding, ids, is_padding):
    """Returns embeddings `(tokens, 1, features)` of `(tokens,)` ids.

    `is_padding` is that of `vision.embedded_ids`.
    """
    x = sharding.embedded(embedding, ids[:, None])
    if is_padding is None:
        return x
    return jnp.where(is_padding[:, None, None], jax.lax.stop_gradient(x), x)


def token_counts(batch):
    """Counts the sequences that each token belongs to.

    Returns a float32 array of shape `(rows, length)`, 0 at padding.
    """
    ids = batch["segment_ids"]
    if "shared_by" not in batch:
        return (ids > 0).astype("float32")
    return reductions.spread(batch["shared_by"].astype("float32"), ids)


def _extras(needs):
    return tuple(name for name in heads.EXTRAS if name in needs)


def _over_rows(sweep, kernel, split, hidden, batch, *rows, shared=None):
    """Runs `sweep(kernel, hidden, batch, *rows)` on each device's rows."""
    targets = context.Targets.of(batch)
    return sharding.over_rows(
        lambda kernels, *rows: sweep(*kernels, *rows),
        [kernel],
        [split],
        _at_targets(targets, hidden),
        _selected_by(batch, targets),
        *(targets.cut(x) for x in rows),
        shared=shared,
    )


def _at_targets(targets, hidden):
    """Returns flat hidden states, of pieces with what `Targets` append."""
    if targets.pieces.count == 1:
        return hidden
    dim = hidden.shape[-1]
    hidden = targets.hidden(hidden.reshape(*targets.pieces.shape, dim))
    return hidden.reshape(-1, dim)


def _teacher_at(targets, teacher):
    """Returns a teacher whose arrays are those of the pieces of rows."""
    pieces = targets.pieces
    is_top = isinstance(teacher, divergence_head.TopTeacher)
    if pieces.count == 1 or not is_top:
        return teacher

    def cut(x):
        k = x.shape[-1]
        x = x.reshape(pieces.rows, pieces.length, k)
        return targets.cut(x).reshape(-1, k)

    return jax.tree.map(cut, teacher)


def _selected_by(batch, targets):
    """Returns the arrays that `_select` reads.

    Where rows are cut into pieces, each token is in the place of the one that
    predicts it.
    """
    found = {name: batch[name] for name in SELECTED_BY if name in batch}
    if targets.pieces.count == 1:
        return found
    found = {name: targets.cut(x) for name, x in found.items()}
    shape = found["token_ids"].shape
    columns = jnp.arange(shape[1], dtype="int32")
    return found | {"predicted_by": jnp.broadcast_to(columns, shape)}


def _select(batch, mask):
    mask = mask & (batch["positions"] > 0) & (batch["segment_ids"] > 0)
    return heads.select_tokens(
        batch["token_ids"], mask, batch.get("predicted_by")
    )


def _dropout_keys(batch, step_key):
    slot = jnp.maximum(batch["segment_ids"] - 1, 0)
    sequences = jnp.take_along_axis(batch["sequence_ids"], slot, axis=1)
    pieces = context.pieces_of(slot.shape)
    sequences, positions = (
        pieces.cut(x).reshape(-1) for x in (sequences, batch["positions"])
    )
    if pieces.count == 1:
        # XLA would split them over a model axis too, and send the keys.
        sequences, positions = map(sharding.shard_rows, (sequences, positions))
    return DropoutKeys(step_key, sequences, positions)
