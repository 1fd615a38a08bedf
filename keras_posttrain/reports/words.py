"""The texts of token ids, each decoded once."""

from keras_posttrain.reports.encoding import encode

BROKEN = "\ufffd"


class Words:
    """The texts of the ids that a page shows.

    Args:
        tokenizer: `kpt.Tokenizer`, or `None`: ids are shown as numbers.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.texts, self._pieces = {}, []

    def add(self, ids):
        """Decodes ids, ints, that were not seen before."""
        for i in set(ids).difference(self.texts):
            self._put(i, self._text(i))

    def _put(self, i, text):
        self.texts[i] = text
        self._pieces.append(f'"{i}":{encode(text)}')

    def text(self):
        """Returns them as JSON, a dict by id."""
        return "{" + ",".join(self._pieces) + "}"

    def restore(self, texts):
        """Takes back what `text` returned."""
        for i, text in texts.items():
            self._put(int(i), text)

    def _text(self, i):
        if self.tokenizer is None:
            return f"{i} "
        text = self.tokenizer.decode([i], skip_special_tokens=False)
        # The decoder leaves the space out that a text begins with.
        piece = self.tokenizer.backend.id_to_token(i) or ""
        if piece.startswith("▁") and not text.startswith(" "):
            text = " " + text
        return text

    def whole(self, ids):
        """Returns the characters that several tokens make up together.

        A list of `[first token, number of tokens, text]`.
        """
        found, at = [], 0
        if self.tokenizer is None:
            return found
        while at < len(ids):
            if BROKEN not in self.texts[ids[at]]:
                at += 1
                continue
            end = at + 1
            # A character has at most four bytes.
            while end < min(at + 4, len(ids)):
                if BROKEN not in self.texts[ids[end]]:
                    break
                end += 1
            for stop in range(at + 1, end + 1):
                text = self.tokenizer.decode(
                    ids[at:stop], skip_special_tokens=False
                )
                if BROKEN not in text:
                    found.append([at, stop - at, text])
                    break
            at = stop
        return found
