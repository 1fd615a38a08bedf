"""Samples and rows of a run: a bounded choice of them, with their tokens."""

import numpy as np

from keras_posttrain.reports.encoding import SCALE, encode, per_token, plain
from keras_posttrain.reports.words import Words

# Of a longer segment the middle is left out.
HEAD, TAIL = 512, 1024
MAX_CHARACTERS = 20_000
# Of a larger group some are left out, none of the extremes.
MAX_ITEMS = 16
# Arrays of a batch that hold a value for each token, by their short names.
ARRAYS = {
    "old": "old_per_token_logps",
    "ref": "ref_per_token_logps",
    "advantage": "advantages",
    "value": "old_values",
}
# Columns of `last_rollout` that are no reward.
NO_REWARD = ("step", "prompt", "completion", "reward", "advantage")
NO_REWARD += ("finish_reason", "row", "player", "tokens")
NO_REWARD += ("turn_rewards", "error")


class Samples:
    """What a page shows of rollouts and of rows that were trained on.

    Of each rollout that is added, `num_groups` groups are kept: one of the
    rows that were kept first (so that a prompt can be followed), one with
    the largest spread of rewards, and others by chance. If all take more
    than `max_bytes`, every second of the older rollouts is left out.

    Args:
        tokenizer: as in `Words`.
        num_groups: int.
        max_bytes: int.
    """

    def __init__(self, tokenizer, num_groups=3, max_bytes=4_000_000):
        self.words = Words(tokenizer)
        self.num_groups, self.max_bytes = num_groups, max_bytes
        self.seen, self.skipped = 0, 0
        self._followed = []
        # `(step, JSON)` of what is kept, in order.
        self._kept = []

    def __len__(self):
        return len(self._kept)

    def add_rollout(self, collection):
        """Adds a choice of a rollout's groups; see `rl/collector.py`."""
        table, groups = collection.table, collection.groups
        if not table["step"]:
            return
        step, firsts, at, segment = int(table["step"][0]), [], 0, 0
        for group in groups:
            firsts.append((at, segment))
            at += len(group.trajectories)
            segment += sum(len(t.segments) for t in group.trajectories)
        chosen = self._chosen(step, table, groups, firsts)
        found = [
            self._group(groups[i], *firsts[i], table, collection.laid_out)
            for i in chosen
        ]
        self._add(step, {"kind": "rollout", "of": len(groups)}, found)

    def add_rows(self, step, batch):
        """Adds the first rows of a batch that a step was trained on."""
        batch = {k: np.asarray(v) for k, v in batch.items() if k in OF_ROWS}
        found = {}
        used = np.argwhere(batch["sequence_mask"] > 0)
        for row, slot in used[: 4 * self.num_groups]:
            number = int(batch["sequence_ids"][row, slot])
            if number not in found and len(found) == self.num_groups:
                continue
            found.setdefault(number, []).append((row, slot))
        groups = [
            {
                "row": number,
                "items": [
                    self._row(batch, *place, i if len(places) == 2 else None)
                    for i, place in enumerate(places)
                ],
            }
            for number, places in found.items()
        ]
        self._add(step, {"kind": "rows"}, groups)

    def _add(self, step, about, groups):
        entry = {"step": step, **about, "groups": groups}
        self._kept.append((step, encode(entry)))
        while sum(len(x) for _, x in self._kept) > self.max_bytes:
            if len(self._kept) < 4:
                self._kept = self._kept[1:]
                return
            half = len(self._kept) // 2
            self._kept = self._kept[:half:2] + self._kept[half:]

    def _chosen(self, step, table, groups, firsts):
        """Returns the indices of groups to keep, in order."""
        rows = [_row_of(group) for group in groups]
        found = [i for i, row in enumerate(rows) if row in self._followed][:1]
        rewards = table.get("reward")
        if rewards and len(groups) > 1:
            spread = [
                np.ptp(np.nan_to_num(rewards[a : a + len(g.trajectories)]))
                if g.trajectories
                else 0.0
                for g, (a, _) in zip(groups, firsts)
            ]
            found.append(int(np.argmax(spread)))
        others = np.random.default_rng(step).permutation(len(groups)).tolist()
        found = list(dict.fromkeys(found + others))[: self.num_groups]
        if not self._followed:
            self._followed = [rows[i] for i in found]
        return sorted(found)

    def _group(self, group, first, segment, table, laid_out):
        items, shared = [], None
        kept = _extremes(table, first, len(group.trajectories))
        for i, trajectory in enumerate(group.trajectories):
            if i not in kept:
                segment += len(trajectory.segments)
                continue
            item = self._item(trajectory, table, first + i)
            parts = []
            for part in trajectory.segments:
                arrays = _arrays(laid_out, segment, len(part.token_ids))
                # Completions of a prompt show it once.
                same = 0 if shared is None or parts else _same(shared, part)
                parts.append(self._segment(part, arrays, same))
                segment += 1
            if shared is None and trajectory.segments:
                shared = trajectory.segments[0]
            items.append({**item, "segments": parts})
        found = {"row": _row_of(group), "items": items}
        if len(items) < len(group.trajectories):
            found["of"] = len(group.trajectories)
        return found

    def _item(self, trajectory, table, index):
        """Returns what the table says on a trajectory."""
        item = {
            "ended": trajectory.ended,
            "length": len(trajectory),
            "player": trajectory.player,
            "error": trajectory.error,
            "turns": len(trajectory.turn_rewards),
        }
        for name in ("reward", "advantage"):
            if name in table:
                item[name] = _rounded(table[name][index])
        item["rewards"] = {
            name.removeprefix("rewards/"): _rounded(values[index])
            for name, values in table.items()
            if name not in NO_REWARD
        }
        if len(item["rewards"]) < 2:
            del item["rewards"]
        if not trajectory.segments:
            item["text"] = _text(table["completion"][index])
        return item

    def _segment(self, part, arrays, same):
        """Returns a segment's tokens from `same` on, and their values."""
        sampled = part.turns >= 0
        values = {
            "logp": np.where(sampled, part.per_token_logps, np.nan),
            **{
                name: np.where(sampled, array, np.nan)
                for name, array in arrays.items()
            },
        }
        whole = {
            "turn": part.turns,
            "mask": part.mask,
            "version": part.token_versions,
        }
        return self._tokens(part.token_ids, values, whole, same)

    def _tokens(self, ids, values, whole, same=0):
        """Returns tokens and their values as a dict for JSON."""
        kept, cut = np.arange(same, len(ids)), 0
        if len(kept) > HEAD + TAIL:
            cut = len(kept) - HEAD - TAIL
            kept = np.concatenate([kept[:HEAD], kept[-TAIL:]])
        ids = np.asarray(ids)[kept].tolist()
        self.words.add(ids)
        found = {"ids": ids}
        if cut:
            found |= {"cut": cut, "head": HEAD}
        if same:
            found["same"] = same
        if together := self.words.whole(ids):
            found["whole"] = together
        for name, array in whole.items():
            # Masks may be weights.
            scale = SCALE if name == "mask" else 1
            found[name] = per_token(array[kept], scale)
        for name, array in values.items():
            numbers = per_token(array[kept], SCALE)
            if numbers is not None:
                found[name] = numbers
        return found

    def _row(self, batch, row, slot, side):
        """Returns a sequence of a batch, with the prefix that it shares."""
        ids, slots = batch["segment_ids"][row], [slot]
        prefixes = batch.get("prefix_segments")
        while prefixes is not None and prefixes[row, slots[0]]:
            slots.insert(0, int(prefixes[row, slots[0]]) - 1)
        kept = np.concatenate([np.flatnonzero(ids == s + 1) for s in slots])
        values = {
            short: batch[name][row, kept]
            for short, name in ARRAYS.items()
            if name in batch and batch[name].shape == batch["token_ids"].shape
        }
        mask = batch["completion_mask"][row, kept]
        values = {k: np.where(mask != 0, v, np.nan) for k, v in values.items()}
        tokens = batch["token_ids"][row, kept]
        item = {
            "length": int((mask != 0).sum()),
            "segments": [self._tokens(tokens, values, {"mask": mask})],
        }
        if "labels" in batch:
            good = batch["labels"][row, slot] > 0
            item["side"] = "good" if good else "bad"
        elif side is not None:
            item["side"] = ("chosen", "rejected")[side]
        return item

    def text(self):
        """Returns them as JSON."""
        kept = ",".join(text for _, text in self._kept)
        return (
            f'{{"kept":[{kept}],"seen":{self.seen},"skipped":{self.skipped},'
            f'"words":{self.words.text()}}}'
        )

    def restore(self, data, step):
        """Takes back what was kept before `step`."""
        self.seen, self.skipped = data["seen"], data["skipped"]
        self.words.restore(data["words"])
        for entry in data["kept"]:
            if entry["step"] < step or (
                entry["step"] == step and entry["kind"] == "rows"
            ):
                self._kept.append((entry["step"], encode(entry)))
                if not self._followed:
                    self._followed = [g["row"] for g in entry["groups"]]


OF_ROWS = ("token_ids", "segment_ids", "completion_mask", "sequence_mask")
OF_ROWS += ("sequence_ids", "prefix_segments", "labels", *ARRAYS.values())


def _extremes(table, first, count):
    """Returns the indices of a group's completions that are kept, a set."""
    if count <= MAX_ITEMS:
        return set(range(count))
    rewards = table.get("reward") or [0.0] * (first + count)
    order = np.argsort(np.nan_to_num(rewards[first : first + count]))
    places = np.linspace(0, count - 1, MAX_ITEMS).round().astype(int)
    return set(order[places].tolist())


def _row_of(group):
    """Returns the dataset row of a group, and its player if it has one."""
    row = getattr(group.prompt, "row", 0)
    player = group.trajectories[0].player if group.trajectories else ""
    return f"{row} {player}" if player else row


def _arrays(laid_out, number, length):
    """Returns the values of a segment's tokens that its batch has."""
    for batch in laid_out:
        if number not in batch.parts:
            continue
        if len(batch.sequences[number].token_ids) != length:
            return {}
        shape = batch.arrays["token_ids"].shape
        return {
            short: batch.tokens(name, number)
            for short, name in ARRAYS.items()
            if name in batch.arrays and batch.arrays[name].shape == shape
        }
    return {}


def _same(first, part):
    """Counts the first tokens, not sampled, that two segments share."""
    size = min(len(first.token_ids), len(part.token_ids))
    same = (
        (first.token_ids[:size] == part.token_ids[:size])
        & (first.turns[:size] < 0)
        & (part.turns[:size] < 0)
    )
    count = size if same.all() else int(np.argmin(same))
    # What was cut out of the first cannot be shown again.
    return count if count <= HEAD else 0


def _rounded(value):
    value = plain(value)
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return value


def _text(completion):
    """Returns a completion without tokens as a text."""
    if not isinstance(completion, str):
        return plain(completion)
    if len(completion) > MAX_CHARACTERS:
        cut = len(completion) - MAX_CHARACTERS
        return f"{completion[:MAX_CHARACTERS]}… ({cut:,} more characters)"
    return completion
