"""Sizes, token ids and first weights of all libraries (numpy only).

Seeded generators make them, so that all libraries start from the same numbers
and their first losses must agree. Token ids 0, 1 and 2 are padding, start and
end; the others are sampled uniformly.
"""

import dataclasses

import numpy as np

PAD, BOS, EOS, FIRST = 0, 1, 2, 3

LORA_RANK, LORA_ALPHA = 16, 32.0
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 0.01
PROMPT_SHARE = 0.4
PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
LINEARS = PROJECTIONS["self_attn"] + PROJECTIONS["mlp"]


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a Llama-type model."""

    vocab: int
    layers: int
    tied: bool = False
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 1024
    norm_eps: float = 1e-6
    rope_theta: float = 1e6  # Tunix 0.1.7 always uses this base

    @property
    def head_dim(self):
        return self.hidden // self.heads

    def weights(self, seed=0):
        """Returns the first float32 weights by their Hugging Face names."""
        rng = np.random.default_rng(seed)
        d, kv = self.hidden, self.kv_heads * self.head_dim
        shapes = {
            "q_proj": (d, d),
            "k_proj": (kv, d),
            "v_proj": (kv, d),
            "o_proj": (d, d),
            "gate_proj": (self.intermediate, d),
            "up_proj": (self.intermediate, d),
            "down_proj": (d, self.intermediate),
        }

        def normal(*shape):
            return np.float32(0.02) * rng.standard_normal(shape, np.float32)

        out = {"model.embed_tokens.weight": normal(self.vocab, d)}
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            for part, names in PROJECTIONS.items():
                for name in names:
                    key = f"{layer}.{part}.{name}.weight"
                    out[key] = normal(*shapes[name])
            for norm in ("input", "post_attention"):
                key = f"{layer}.{norm}_layernorm.weight"
                out[key] = np.ones(d, np.float32)
        out["model.norm.weight"] = np.ones(d, np.float32)
        if not self.tied:
            out["lm_head.weight"] = normal(self.vocab, d)
        return out


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, the length of its rows, and the rows of a step."""

    model: Model
    length: int
    batch: int
    rows: int  # default number of rows per pass

    def steps(self, rows):
        return -(-len(rows) // self.batch)


WORKLOADS = {
    # Mixed lengths, which favour packing and projecting fewer tokens.
    "w1": Workload(Model(32_000, layers=4), length=512, batch=8, rows=64),
    # A large vocabulary, whose logits need much memory.
    "w2": Workload(
        Model(262_144, layers=2, tied=True), length=1024, batch=2, rows=4
    ),
    # Most weights are in the linear layers, as in large models.
    "w3": Workload(
        Model(
            4_096,
            layers=8,
            hidden=1024,
            heads=16,
            kv_heads=8,
            intermediate=4096,
        ),
        length=256,
        batch=4,
        rows=16,
    ),
}


def sft_rows(name, count=None):
    """Returns `(token ids, prompt length)` per row.

    The loss is on the completion. W1 has 256 rows of log-normal length (median
    164 before the cut at 512); all others have the full length.
    """
    workload = WORKLOADS[name]
    count = count or workload.rows
    if name == "w1":
        rng = np.random.default_rng(1)
        sigma = 0.7
        mean = np.log(210) - sigma**2 / 2
        lengths = np.exp(rng.normal(mean, sigma, 256)).astype(int)
        lengths = np.clip(lengths, 16, workload.length)
        if count > len(lengths):
            raise ValueError(
                f"W1 has {len(lengths)} rows. Received: count={count}."
            )
        lengths = lengths[:count]
    else:
        rng = np.random.default_rng(2)
        lengths = [workload.length] * count
    rows = []
    for n in lengths:
        ids = rng.integers(FIRST, workload.model.vocab, n)
        ids[-1] = EOS
        rows.append((ids.tolist(), int(PROMPT_SHARE * n)))
    return rows


# --- Rollouts ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Work of a rollout: `prompts` x `samples` of at most `max_tokens`."""

    model: Model = Model(8192, layers=6)
    prompts: int = 16
    longest_prompt: int = 96
    samples: int = 8
    max_tokens: int = 128
    # Exactly `max_tokens` each, or ended by stop tokens.
    stop: bool = False

    def prompt_ids(self):
        """Returns lists of 16 to `longest_prompt` token ids."""
        rng = np.random.default_rng(4)
        lengths = rng.integers(16, self.longest_prompt + 1, self.prompts)
        vocab = self.model.vocab
        return [rng.integers(FIRST, vocab, n).tolist() for n in lengths]

    def stop_ids(self):
        """Returns 1 of 64 tokens; a sample has 63 tokens on average."""
        if not self.stop:
            return []
        rng = np.random.default_rng(5)
        vocab = self.model.vocab
        ids = np.arange(FIRST, vocab)
        return sorted(rng.choice(ids, vocab // 64, replace=False).tolist())


ROLLOUTS = {
    "a": Rollout(),
    "b": Rollout(max_tokens=256, stop=True),
}
GRID_STEPS = 64  # decoding steps in the grid


# --- Reinforcement learning --------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RLWork:
    """A GRPO step: `prompts` x `samples` of `max_tokens`, and an update."""

    model: Model = ROLLOUTS["a"].model
    prompts: int = 8
    shortest_prompt: int = 16
    longest_prompt: int = 96
    samples: int = 8
    max_tokens: int = 64

    @property
    def completions(self):
        return self.prompts * self.samples

    @property
    def longest(self):
        """The most tokens of a prompt with its completion."""
        return self.longest_prompt + self.max_tokens

    @property
    def group(self):
        """The most tokens of a prompt with all its completions."""
        return self.longest_prompt + self.samples * self.max_tokens

    def prompt_ids(self, steps):
        """Returns lists of token ids, `prompts` per step."""
        rng = np.random.default_rng(7)
        lengths = rng.integers(
            self.shortest_prompt, self.longest_prompt + 1, self.prompts * steps
        )
        vocab = self.model.vocab
        return [rng.integers(FIRST, vocab, n).tolist() for n in lengths]


RL = {
    "w5": RLWork(),
    # Prompts that are much longer than their completions.
    "w5-long": RLWork(prompts=4, shortest_prompt=512, longest_prompt=512),
}


def words(vocab, chat=False):
    """Returns the ids of words; `chat` leaves the last id free."""
    out = {"<pad>": PAD, "<s>": BOS, "</s>": EOS}
    return out | {f"t{i}": i for i in range(FIRST, vocab - chat)}


@dataclasses.dataclass(frozen=True)
class AgenticWork:
    """Conversations in which every turn but the last calls a tool.

    The model's turns have `tokens` tokens each.
    """

    model: Model = ROLLOUTS["a"].model
    prompts: int = 8
    samples: int = 8
    turns: int = 4
    tokens: int = 32
    prompt_words: int = 64
    said_words: int = 24

    @property
    def conversations(self):
        return self.prompts * self.samples

    @property
    def longest(self):
        """More tokens than a conversation has, its template included."""
        said = self.prompt_words + self.turns * (self.tokens + self.said_words)
        return said + 16 * self.turns

    def words(self, count, seed):
        """Returns random words: `t17 t4 ...`."""
        rng = np.random.default_rng([9, seed])
        ids = rng.integers(FIRST, self.model.vocab - 1, count)
        return " ".join(f"t{i}" for i in ids)


AGENTIC = AgenticWork()
# A word too.
TOOL = "t3"
# A control token that is no word: it has the last id.
END_OF_TURN = "<end>"
# Whitespace separates words.
CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}t4 {{ message.content }} "
    "{% for call in message.tool_calls or [] %}{{ call.function.name }} "
    "{{ call.function.arguments }} {% endfor %}<end> {% endfor %}"
    "{% if add_generation_prompt %}t4 {% endif %}"
)


def even_share(ids):
    """Returns the reward, the share of even ids in a completion."""
    return sum(i % 2 == 0 for i in ids) / len(ids)


# --- Preferences -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PairWork:
    """Work of DPO with `beta`: pairs of completions, `batch` per step."""

    model: Model = WORKLOADS["w1"].model
    count: int = 64
    batch: int = 4
    shortest_prompt: int = 160
    longest_prompt: int = 240
    shortest: int = 100
    longest: int = 200
    beta: float = 0.1

    @property
    def length(self):
        """The most tokens of a prompt with one completion."""
        return self.longest_prompt + self.longest

    def pairs(self, count=None):
        """Returns `(prompt, chosen, rejected)` token ids per pair."""
        rng = np.random.default_rng(3)
        vocab = self.model.vocab

        def random_ids(least, most):
            return rng.integers(FIRST, vocab, rng.integers(least, most + 1))

        out = []
        for _ in range(self.count):
            prompt = random_ids(self.shortest_prompt, self.longest_prompt)
            sides = [random_ids(self.shortest, self.longest) for _ in range(2)]
            for ids in sides:
                ids[-1] = EOS
            out.append(tuple(ids.tolist() for ids in (prompt, *sides)))
        return out[:count]


PREFERENCES = PairWork()


# --- Distillation ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DistillWork:
    """Work of distillation: all tokens of full rows, a larger teacher."""

    student: Model = WORKLOADS["w1"].model
    teacher: Model = Model(
        32_000, layers=6, hidden=512, heads=8, kv_heads=4, intermediate=2048
    )
    length: int = 512
    batch: int = 8
    count: int = 24
    teacher_seed: int = 1  # of the first weights

    def rows(self, count=None):
        """Returns lists of `length` token ids."""
        rng = np.random.default_rng(8)
        shape = (self.count, self.length)
        ids = rng.integers(FIRST, self.student.vocab, shape)
        ids[:, -1] = EOS
        return ids[:count].tolist()


DISTILLATION = DistillWork()


# --- Layouts -----------------------------------------------------------------


def padded(rows, length):
    """Returns right-padded `(ids, mask, loss mask)`, `(rows, length)`."""
    ids = np.full((len(rows), length), PAD, np.int32)
    mask, loss_mask = np.zeros_like(ids), np.zeros_like(ids)
    for i, (row, prompt) in enumerate(rows):
        ids[i, : len(row)] = row
        mask[i, : len(row)] = 1
        loss_mask[i, prompt : len(row)] = 1
    return ids, mask, loss_mask


def pack(lengths, capacity):
    """Packs by best fit decreasing, for libraries that do not pack.

    Returns a list of indices into `lengths` per packed row.
    """
    bins = []  # [room left, indices]
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        open_bins = [b for b in bins if b[0] >= lengths[i]]
        best = min(open_bins, key=lambda b: b[0], default=None)
        if best is None:
            best = [capacity, []]
            bins.append(best)
        best[0] -= lengths[i]
        best[1].append(i)
    return [members for _, members in bins]
