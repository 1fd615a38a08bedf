"""The least arithmetic and memory traffic of the work (standard library only).

A product with a weight is two operations per token in the forward pass, two
for the gradient of its input, and two for that of the weight if it is trained.
Attention counts the keys that a query sees, the head the tokens with a loss,
and a prompt counts once for the sequences that share it. What a library
computes in addition is not counted: padding, logits of prompts, layers that
are recomputed.
"""

FLOAT = 4  # bytes
PARTS = ("layers", "attention", "head")


def layer_weights(model):
    """Returns the weights of a layer's linear maps."""
    d, kv = model.hidden, model.kv_heads * model.head_dim
    return 2 * d * d + 2 * d * kv + 3 * d * model.intermediate


def adapter_weights(model, rank):
    """Returns the weights of the adapters of a layer's linear maps."""
    d, kv = model.hidden, model.kv_heads * model.head_dim
    return rank * (2 * 2 * d + 2 * (d + kv) + 3 * (d + model.intermediate))


def head_weights(model):
    return model.hidden * model.vocab


def attended(length, prefix=0):
    """Returns the keys that `length` tokens after `prefix` ones see."""
    return length * prefix + length * (length + 1) // 2


def forward_parts(model, tokens, keys, targets):
    """Returns the operations of a forward pass in a dict of `PARTS`.

    Args:
        model: `workloads.Model`.
        tokens: int, those of all sequences.
        keys: int, the keys that they see.
        targets: int, the tokens whose logits are needed.
    """
    return {
        "layers": 2 * model.layers * layer_weights(model) * tokens,
        "attention": 4 * model.layers * model.hidden * keys,
        "head": 2 * head_weights(model) * targets,
    }


def forward(model, tokens, keys, targets):
    """Returns the operations of a forward pass; for `forward_parts`' work."""
    return sum(forward_parts(model, tokens, keys, targets).values())


def training_parts(model, tokens, keys, targets, rank=None):
    """Returns the operations of a forward and a backward pass, by part.

    Args:
        model, tokens, keys, targets: those of `forward_parts`.
        rank: int, of adapters, or `None` where all weights are trained.
    """
    parts = forward_parts(model, tokens, keys, targets)
    if rank is None:
        return {name: 3 * part for name, part in parts.items()}
    d, kv = model.hidden, model.kv_heads * model.head_dim
    adapters = 6 * model.layers * adapter_weights(model, rank) * tokens
    # What the first layer's queries, keys and values are computed from has no
    # gradient.
    first = 2 * d * (d + 2 * kv) * tokens
    return {
        "layers": 2 * parts["layers"] + adapters - first,
        "attention": 3 * parts["attention"],
        "head": 2 * parts["head"],
    }


def training(model, tokens, keys, targets, rank=None):
    """Returns the operations of both passes; for `training_parts`' work."""
    return sum(training_parts(model, tokens, keys, targets, rank).values())


def sft_parts(model, rows, rank=None):
    """Returns `training_parts` of rows `(token ids, prompt length)`."""
    lengths = [len(ids) for ids, _ in rows]
    targets = sum(len(ids) - prompt for ids, prompt in rows)
    keys = sum(map(attended, lengths))
    return training_parts(model, sum(lengths), keys, targets, rank)


def sft(model, rows, rank=None):
    """Returns the operations of rows `(token ids, prompt length)`."""
    return sum(sft_parts(model, rows, rank).values())


def distill(student, teacher, rows):
    """Returns the operations of rows of token ids, with a loss on all.

    Those of the student, and the forward pass of the teacher.
    """
    lengths = [len(ids) for ids in rows]
    # The first token is predicted from nothing.
    targets = sum(lengths) - len(lengths)
    work = sum(lengths), sum(map(attended, lengths)), targets
    return training(student, *work) + forward(teacher, *work)


def grpo(model, prompts, samples, tokens, rank):
    """Returns the operations of an update.

    Args:
        prompts: list of ints, the lengths of prompts.
        samples, tokens: ints, completions of a prompt, and of one its tokens.
    """
    groups = [group(length, [tokens] * samples) for length in prompts]
    return training(model, *map(sum, zip(*groups, strict=True)), rank)


def group(prompt, lengths):
    """Returns tokens, keys and targets of a prompt with its completions."""
    keys = attended(prompt) + sum(attended(n, prompt) for n in lengths)
    return prompt + sum(lengths), keys, sum(lengths)


def dpo(model, pairs, rank):
    """Returns the operations of `(prompt, chosen, rejected)` token ids.

    Those of the policy, and the forward pass of the reference.
    """
    groups = [group(len(p), [len(c), len(r)]) for p, c, r in pairs]
    work = [sum(parts) for parts in zip(*groups, strict=True)]
    return training(model, *work, rank) + forward(model, *work)


def rollout(model, prompts, samples):
    """Returns the operations and the bytes that samples need.

    All samples decode at once: each step reads the weights, the keys and
    values of each prompt, and those of each sample. A sample's last token is
    not fed back.

    Args:
        model: `workloads.Model`.
        prompts: list of ints, the lengths of prompts.
        samples: list of lists of ints, the lengths of each one's samples.
    """
    weights = model.layers * layer_weights(model) + head_weights(model)
    width = 2 * model.layers * model.kv_heads * model.head_dim
    longest = max(max(lengths) for lengths in samples)
    operations, read = 0, weights * (longest - 1)
    for prompt, lengths in zip(prompts, samples, strict=True):
        fed = [n - 1 for n in lengths]
        tokens, keys, targets = group(prompt, fed)
        # One more for the first token, which all samples share.
        operations += forward(model, tokens, keys, targets + 1)
        read += width * (prompt * max(fed) + sum(map(attended, fed)))
    return operations, FLOAT * read
