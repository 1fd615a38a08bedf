"""Alignment of the tokens that two tokenizers make of one text."""

import collections
import json
import os

import numpy as np
import tokenizers

from keras_posttrain.data.chat.tokenizer import Tokenizer


def with_whole_places(tokenizer):
    """Makes a tokenizer with the same ids whose offsets include spaces.

    Some byte-level tokenizers leave spaces out of offsets, so that it is not
    known which of two tokens a space belongs to.
    """
    state = json.loads(tokenizer.backend.to_str())
    if not _keep_spaces(state["post_processor"]):
        return tokenizer
    return Tokenizer(
        tokenizers.Tokenizer.from_str(json.dumps(state)),
        tokenizer.special_tokens,
        chat_template=tokenizer.chat_template,
        stop_token_ids=tokenizer.stop_token_ids,
    )


def _keep_spaces(step):
    """Changes a post-processor in place; returns whether it changed."""
    if step is None:
        return False
    changed = step.get("trim_offsets", False)
    if changed:
        step["trim_offsets"] = False
    for inner in step.get("processors", ()):
        changed = _keep_spaces(inner) or changed
    return changed


def boundaries(offsets):
    """Returns where in the text each token begins.

    Args:
        offsets: int array of shape `(length, 2)`, the start and end of each
            token in characters.

    Returns:
        int64 array of shape `(length,)`: a character's place; -1 for a token
        that begins inside a character, which some tokenizers write as several
        tokens.
    """
    starts, ends = np.asarray(offsets, np.int64).reshape(-1, 2).T
    before = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    inside = (starts < before) & (ends > starts)
    # Characters between two tokens were composed with the first one's text.
    return np.where(inside, -1, np.maximum(before, starts))


def align(student, teacher, same_vocabulary=False):
    """Finds the teacher's token that predicts each token of the student.

    Its hidden state follows the same text, counted from the beginning of the
    words that are trained on. A token has no counterpart where only one of
    the two tokenizers has a boundary before it.

    Args:
        student: an `EncodedText`.
        teacher: an `EncodedText` with as many spans: the same text, with
            another tokenizer or after another prompt.
        same_vocabulary: bool, whether equal ids are equal tokens. Then the
            pieces of a character have counterparts too.

    Returns:
        int32 array of shape `(student's length,)`: an index into the
        teacher's tokens, -1 where there is none.
    """
    source = np.full(len(student.token_ids), -1, np.int32)
    ours, theirs = boundaries(student.offsets), boundaries(teacher.offsets)
    for span, other in zip(student.spans, teacher.spans, strict=True):
        before, after = _in_common(student.text, span, teacher.text, other)
        words, shift = span[2], other[2] - span[2]
        places = collections.defaultdict(list)
        for i, place in enumerate(theirs - shift):
            if theirs[i] >= 0 and words - before <= place <= words + after:
                places[place].append(i)
        # Tokens without text share a place with the token after them (the
        # start token of a text): the last ones of both are counterparts.
        for t in reversed(range(len(ours))):
            if ours[t] >= 0 and places.get(ours[t]):
                source[t] = places[ours[t]].pop() - 1
    if same_vocabulary:
        for t in range(1, len(source)):
            read = source[t - 1] + 1
            same = read and teacher.token_ids[read] == student.token_ids[t - 1]
            if source[t] < 0 and same:
                source[t] = read
    return source


def _in_common(text, span, other_text, other_span):
    """Counts the equal characters before and after where the words of
    two spans begin."""
    _, end, words = span
    _, other_end, other_words = other_span
    before = [text[:words][::-1], other_text[:other_words][::-1]]
    after = [text[words:end], other_text[other_words:other_end]]
    return [len(os.path.commonprefix(both)) for both in (before, after)]
