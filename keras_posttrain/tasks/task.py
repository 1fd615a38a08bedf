import jax

from keras_posttrain.data.rows.preparation import RowSettings
from keras_posttrain.distribution import fsdp, processes
from keras_posttrain.models import guards, presets
from keras_posttrain.models.hf import exchange, loading
from keras_posttrain.models.hf.adapter_files import read_config
from keras_posttrain.models.linear import flatten_linear_layers
from keras_posttrain.models.lora import Adapter, lora_from_config
from keras_posttrain.models.policy import Policy
from keras_posttrain.tasks.trainer import Trainer
from keras_posttrain.training import checks
from keras_posttrain.training.generation import Generator


class Task(Trainer):
    """A causal language model with something to train it for.

    The base of every task: it holds the model, the tokenizer and the
    adapter, and keeps what `keras.Model` offers (`compile`, `fit`,
    `evaluate`, callbacks, history, distribution) around a training step of
    its own. Use a subclass such as `kpt.SFTTask`.

    Args:
        causal_lm: a KerasHub `CausalLM`.
        tokenizer: `kpt.Tokenizer`, or `None` where all rows are tokenised.
        lora: `kpt.LoRA`, or `None` to train all weights.
        reference: `None`; only tasks whose loss compares with a reference
            take one.
        sequence_length: int, tokens a row may hold.
        truncation: `"error"`, `"drop"` or `"cut"`: what becomes of a row
            that is longer.
        chat_template: str or `None`, a Jinja2 template instead of the
            preset's own.
        chat_template_kwargs: dict of variables for the template, such as
            `{"enable_thinking": False}`, in training and in `generate`.
        remat: `"none"`, or `"full"` to keep only the inputs of decoder
            layers for the backward pass; over a mesh's model axis also what
            devices have added up, about as much again.
        chunk_size: int or `None`, tokens whose logits exist at once.
    """

    def __init__(
        self,
        causal_lm,
        tokenizer=None,
        *,
        lora=None,
        reference=None,
        sequence_length=1024,
        truncation="error",
        chat_template=None,
        chat_template_kwargs=None,
        remat="none",
        chunk_size=None,
        name=None,
    ):
        checks.task_arguments(lora, sequence_length, truncation, remat)
        if reference is not None:
            raise ValueError(
                f"{type(self).__name__} compares with no reference model; "
                "leave `reference` out. "
                f"Received: reference={reference!r}"
            )
        guards.check_model(causal_lm, sequence_length)
        loading.repair(causal_lm)
        super().__init__(name=name)
        self.causal_lm = causal_lm
        self.tokenizer = tokenizer
        if chat_template is not None:
            self._need_tokenizer("chat_template")
            self.tokenizer = tokenizer.with_chat_template(chat_template)
        self.sequence_length = sequence_length
        self.truncation = truncation
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.remat, self.chunk_size = remat, chunk_size
        flatten_linear_layers(causal_lm.backbone)
        self.adapter = Adapter(causal_lm, lora) if lora else None
        self._make_policy()
        self._generator = Generator(self)
        self.step_logs = {}
        self._log_probs = None
        self.built = True

    @classmethod
    def from_preset(
        cls,
        preset,
        *,
        lora=None,
        reference=None,
        sequence_length=1024,
        dtype=None,
        truncation="error",
        chat_template=None,
        remat="none",
        load_weights=True,
        **kwargs,
    ):
        """Loads a model and makes a task of it.

        Args:
            preset: what KerasHub's `from_preset` takes: a preset name, an
                `hf://` or `kaggle://` handle, or a local directory of
                KerasHub's or Hugging Face's format. A Hugging Face
                directory's own config and tokenizer are honoured.
            dtype: `"float32"`, `"bfloat16"` or `"mixed_bfloat16"`. Trained
                weights that are kept in bfloat16 have float32 masters.
            load_weights: bool, `False` for random weights.
            lora, reference, sequence_length, truncation, chat_template,
                remat, **kwargs: see the class.

        Returns:
            The task.

        Raises:
            ValueError: where the preset is unknown, or its model cannot be
                built faithfully; the message names the field.
        """
        checks.task_arguments(lora, sequence_length, truncation, remat)
        causal_lm = presets.load_causal_lm(
            preset, dtype=dtype, load_weights=load_weights
        )
        task = cls(
            causal_lm,
            presets.load_tokenizer(preset),
            lora=lora,
            reference=reference,
            sequence_length=sequence_length,
            truncation=truncation,
            chat_template=chat_template,
            remat=remat,
            **kwargs,
        )
        task.preset = str(preset)
        return task

    preset = None

    @property
    def max_length(self):
        """Tokens that a sequence may have by the model's config, or `None`."""
        return guards.max_length(self.causal_lm)

    # Setting up

    def _make_policy(self):
        self.policy = Policy(
            self.causal_lm,
            adapter=self.adapter,
            remat=self.remat,
            chunk_size=self.chunk_size,
        )

    # Using the model

    def row_settings(self, name, **overrides):
        """Makes the `RowSettings` of a dataset.

        Args:
            name: str, the argument that the rows were passed as.
            **overrides: settings to replace.
        """
        settings = {
            "tokenizer": self.tokenizer,
            "sequence_length": self.sequence_length,
            "vocabulary_size": self.causal_lm.backbone.vocabulary_size,
            "truncation": self.truncation,
            "chat_template_kwargs": self.chat_template_kwargs,
            "name": name,
        }
        return RowSettings(**settings | overrides)

    def log_probs(self, rows, batch_size=8):
        """The log-probability of every token given those before it.

        Args:
            rows: rows of any type that the task trains on.
            batch_size: int, rows at once.

        Returns:
            A list of float32 arrays, one a row and as long as its tokens;
            the first entry, which nothing predicts, is 0.
        """
        # An answer for each row: none may be dropped or cut.
        examples, _ = self.prepare(
            rows, "rows", train_on="all", truncation="error"
        )
        checks.positive_int("batch_size", batch_size)
        batches = self.plain_batches(examples, batch_size, shuffle=False)
        if self._log_probs is None:

            def run(trainable, frozen, batch):
                with self.using_weights(trainable, frozen):
                    mask = batch["segment_ids"] > 0
                    outputs = self.policy.token_outputs(
                        batch, mask, differentiable=False
                    )
                return outputs["per_token_logps"]

            self._log_probs = jax.jit(run)
        state = (
            [v.value for v in self.trainable_variables],
            [v.value for v in self.non_trainable_variables],
        )
        out = []
        for batch in batches.get_jax_iterator():
            values = processes.fetch(self._log_probs(*state, batch))
            lengths = (batch["segment_ids"] > 0).sum(axis=1)
            out += [v[:n] for v, n in zip(values, lengths) if n]
        return out

    def generate(
        self,
        prompts,
        *,
        max_tokens=256,
        temperature=1.0,
        top_k=None,
        top_p=None,
        min_p=None,
        num_generations=1,
        stop_token_ids="auto",
        seed=None,
        return_token_ids=False,
        on_text=None,
        verbose=0,
    ):
        """Completes prompts, by the built-in engine `kpt.rollout`.

        Args:
            prompts: a str, a list of messages, `{"prompt_ids": [...]}`, or a
                list of these.
            max_tokens: int, the most new tokens.
            temperature: float, 0 for the most probable token always.
            top_k: int or `None`, sample among this many tokens.
            top_p: float or `None`, sample among the fewest tokens that have
                this much probability together.
            min_p: float or `None`, sample among tokens at least this share
                as probable as the most probable one.
            num_generations: int, samples of each prompt.
            stop_token_ids: ints that end a completion; `"auto"` is the
                tokenizer's set; `None` is none.
            seed: int or `None`, for repeatable samples: they depend on the
                seed, the prompt and the weights, not on other prompts.
            return_token_ids: bool, lists of ids instead of text.
            on_text: `f(index, text)` or `None`: called with new text of a
                completion as it comes; `index` counts completions.
            verbose: 0, or 1 for a progress bar.

        Returns:
            The completion of each prompt, without the prompt; a list of them
            where `num_generations` is more than 1. One prompt, not a list,
            has its answer alone.

        Raises:
            ValueError: names the prompt or the argument that cannot be
                served; nothing is computed then.

        Example:

        ```python
        task.generate("Once upon a time", on_text=lambda i, t: print(t))
        ```
        """
        return self._generator(
            prompts,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            num_generations=num_generations,
            stop_token_ids=stop_token_ids,
            seed=seed,
            return_token_ids=return_token_ids,
            on_text=on_text,
            verbose=verbose,
        )

    # Planning

    def plan(
        self,
        topology,
        strategy=fsdp,
        *,
        batch_size=8,
        sequence_length=None,
        micro_batch_size="compiled",
        remat=None,
        prompt_length=None,
        packing=False,
        share_prefix=False,
        exact=False,
    ):
        """What a training step would need of hardware that is not there.

        The step that `fit` would run is compiled by the compiler for that
        hardware. Nothing is allocated and the task stays as it is; it may
        hold shapes only (`kpt.distribution.shapes_only`).

        Args:
            topology: str, `"<chip>:<grid>"` such as `"v5e:4x4"`,
                `"v5p:2x2x4"` or `"v6e:2x4"`, or `"cpu:8"` for devices of
                this host. For TPUs the package `libtpu` must be installed.
            strategy: function of `devices`, a list, that gives a
                distribution: `kpt.distribution.fsdp`, or one with arguments,
                `functools.partial(kpt.distribution.fsdp_tensor_parallel,
                model=4)`.
            batch_size: int, as in `fit`. All rows are as long as they may
                be.
            sequence_length: int, or `None` for the task's own.
            micro_batch_size: int or `None`, instead of what `compile` was
                given.
            remat: `"none"` or `"full"`, or `None` for the task's own.
            prompt_length: int, tokens of a prompt in tasks on completions,
                or `None` for half of a row, or what a rollout's completion
                leaves.
            packing: as in `fit`.
            share_prefix: bool, as in `fit` of tasks on completions: a
                prompt is computed once for those of its completions that
                are in a row with it.
            exact: bool, whether all layers are compiled. By default one and
                two of them are (or one and two rounds of a pattern, as
                Gemma's), and numbers of all lie on a line through both:
                right for FLOPs and what is sent, some percent off for
                memory where a chip is nearly full, which is told.

        Returns:
            A `kpt.distribution.Plan`; `print` shows it.

        Raises:
            ValueError: where the topology is not known, the layout does not
                suit it, or `fit` would refuse. A step that is too large for
                the memory is no error: its plan says so.

        Example:

        ```python
        with kpt.distribution.shapes_only():
            task = kpt.SFTTask.from_preset(
                "llama3_8b_en", load_weights=False, dtype="bfloat16"
            )
        task.compile()
        print(task.plan("v5e:4x4", batch_size=16, remat="full"))
        ```
        """
        # It knows the tasks, which begin here.
        from keras_posttrain.planning import train_plan

        settings = {}
        if sequence_length is not None:
            settings["sequence_length"] = sequence_length
        if micro_batch_size != "compiled":
            settings["micro_batch_size"] = micro_batch_size
        if remat is not None:
            settings["remat"] = remat
        layout = {"packing": packing, "share_prefix": share_prefix}
        train_plan.check(self, batch_size, layout, **settings)
        batch = {
            "batch_size": batch_size, "prompt_length": prompt_length, **layout
        }  # fmt: skip
        return train_plan.make_plan(
            self, topology, strategy, batch, exact, **settings
        )

    def plan_decode(
        self,
        topology,
        strategy=fsdp,
        *,
        num_slots=128,
        num_tokens=1024,
        exact=False,
    ):
        """What sampling would need of hardware that is not there.

        Planned is a call of the built-in engine's program: 32 tokens for each
        of its slots, beside the weights and the optimizer's state.

        Args:
            topology, strategy, exact: as in `plan`.
            num_slots: int, sequences that are sampled at once, on all chips.
            num_tokens: int, those that each has room for.

        Returns:
            A `kpt.distribution.Plan`.

        Raises:
            ValueError: as in `plan`.
        """
        from keras_posttrain.planning import decode_plan

        return decode_plan.make_plan(
            self, topology, strategy, num_slots, num_tokens, exact
        )

    # Saving

    def _need_adapter(self, method):
        if self.adapter is None:
            raise ValueError(
                f"`{method}` needs an adapter; make the task with "
                "`lora=kpt.LoRA(...)`, or use `export` for whole weights."
            )

    def _need_tokenizer(self, what):
        if self.tokenizer is None:
            raise ValueError(
                f"`{what}` needs a tokenizer, and this task has none. Pass "
                "`tokenizer=`, or make the task with `from_preset`."
            )

    def save_adapter(self, path):
        """Writes the adapter in PEFT's format; it loads in PEFT and vLLM."""
        self._need_adapter("save_adapter")
        self.adapter.save(path, base_name=self.preset)

    def load_adapter(self, path):
        """Takes the weights of a PEFT adapter.

        A task without an adapter gets one of the file's settings, as long as
        it is not compiled.

        Args:
            path: str or path of a PEFT adapter directory.
        """
        if self.adapter is None:
            if self.compiled:
                raise ValueError(
                    "This task was compiled to train all weights. Load the "
                    "adapter before `compile`, or make the task with "
                    "`lora=kpt.LoRA(...)`."
                )
            lora = lora_from_config(read_config(path), path)
            adapter = Adapter(self.causal_lm, lora)
            try:
                adapter.load(path)
            except ValueError:
                adapter.detach(self.causal_lm)
                raise
            self.adapter = adapter
            self._make_policy()
            return
        self.adapter.load(path)

    def merge_adapter(self):
        """Adds the adapter to the weights; training is refused until
        `unmerge_adapter`, which restores them bit for bit."""
        self._need_adapter("merge_adapter")
        self.adapter.merge()
        self._forget_programs()

    def unmerge_adapter(self):
        """Takes back `merge_adapter`."""
        self._need_adapter("unmerge_adapter")
        self.adapter.unmerge()
        self._forget_programs()

    def _forget_programs(self):
        # They were traced with the adapter's part, or without it.
        self._log_probs = self.test_function = None

    def export(self, path, *, dtype=None, max_shard_bytes=5 * 2**30):
        """Writes a Hugging Face directory, the adapter merged in.

        Args:
            path: str or path, new or an earlier export.
            dtype: `None` for that of the weights, or `"float32"`,
                `"bfloat16"`, `"float16"`.
            max_shard_bytes: int, the most bytes in a safetensors file.
        """
        values = self.adapter.merged_values() if self.adapter else None
        exchange.export(
            self.causal_lm,
            path,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            values=values,
            tokenizer=self.tokenizer,
        )

    def save_to_preset(self, path):
        """Writes a KerasHub preset, the adapter merged in.

        Args:
            path: str or path of a new directory.
        """
        presets.save_to_preset(
            self.causal_lm, path, self.adapter, self.tokenizer
        )

    def load_weights(self, *args, **kwargs):
        checks.refuse_keras_weights("load_weights")

    def save_weights(self, *args, **kwargs):
        checks.refuse_keras_weights("save_weights")

    def call(self, batch):
        """Log-probabilities of a batch's tokens, `(rows, length)`."""
        mask = batch["segment_ids"] > 0
        return self.policy.token_outputs(batch, mask)["per_token_logps"]
