"""Decoders whose samples join and leave the batch between two steps, for `Engine`.

They are those of `minigpt.sampling`, without a sample at first and with a cache that grows.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from minigpt.model.gpt import GPT, Cache
from minigpt.sampling.decoder import Decoder, first_window
from minigpt.sampling.fast.fast_decoder import FastDecoder
from minigpt.sampling.fast.graph_decoder import GraphDecoder
from minigpt.sampling.generation import decoder_class


def joining_decoder(model: GPT) -> "JoiningDecoder":
    """Return the decoder for a model, in evaluation mode or not, with which samples can join."""
    return _JOINING[decoder_class(model)](model)


class JoiningDecoder(Decoder):
    """A `Decoder` that samples join and leave."""

    def __init__(self, model: GPT) -> None:
        super().__init__(model, [], 1, 0)

    def add(self, prompt: Sequence[int], num_samples: int = 1) -> None:
        """Read a prompt once, for new samples; the next `step` is to add its last token.

        They are at the end of the batch. Other samples are as before.
        """
        self.windows += [first_window(prompt, self.block_size) for _ in range(num_samples)]

    def drop(self, row: int) -> None:
        """Remove a sample; the last one of the batch takes its row."""
        self.windows[row] = self.windows[-1]
        self.windows.pop()

    def cache_bytes(self, length: int) -> int:
        """Return the most memory of the keys and values of a sample of up to `length` tokens."""
        return 0


class FastJoiningDecoder(JoiningDecoder, FastDecoder):
    """A `FastDecoder` that samples join and leave; the first rows of its cache are in use."""

    def add(self, prompt: Sequence[int], num_samples: int = 1) -> None:
        super().add(prompt, num_samples)
        B = len(self._begins)
        window = self.windows[B]
        rows = list(range(B, B + num_samples))
        if B + num_samples > self._cache.size(1) or len(window) > self._end:
            self._resize(B + num_samples, len(window))
        # Make room for the new rows, which `_read` fills.
        self._begins += [self._end for _ in rows]
        self._inputs = Cache(
            [],
            F.pad(self._inputs.last_embeddings, (0, 0, 0, 0, 0, num_samples)),  # (B, smear, C)
            F.pad(self._inputs.last_tokens, (0, 0, 0, num_samples)),  # (B, ngram - 1)
        )
        self._read([window], rows)
        # Masked slots count with weight 0, which does not remove NaN of an earlier sample.
        self._cache[:, B : B + num_samples, :, : self._begins[B]] = 0

    def drop(self, row: int) -> None:
        super().drop(row)
        last = len(self.windows)
        if row < last:
            self._begins[row] = self._begins[last]
            self._cache[:, row, :, : self._end] = self._cache[:, last, :, : self._end]
        self._begins.pop()
        rows = [last if i == row else i for i in range(last)]
        inputs = self._inputs
        self._inputs = Cache([], inputs.last_embeddings[rows], inputs.last_tokens[rows])

    def cache_bytes(self, length: int) -> int:
        slots = 2 * min(length, self.block_size)
        per_slot = len(self._cache) * self._cache.size(2) * self._cache.size(4)
        return slots * per_slot * self._cache.element_size()

    def _make_room(self) -> None:
        if 2 * (self._end - min(self._begins)) > self._end:
            self._resize(len(self._begins), 0)
        else:
            super()._make_room()

    def _resize(self, rows: int, end: int) -> None:
        """Move to a cache of `rows` rows and twice as many slots as are visible.

        At least `end` slots are before the next one to write.
        """
        old = self._cache
        B = len(self._begins)
        first = min(self._begins, default=self._end)
        n_visible = self._end - first
        end = max(end, n_visible)
        slots = min(2 * (end + 1), 2 * self.block_size)
        self._cache = old.new_zeros(len(old), rows, old.size(2), slots, old.size(4))
        self._cache[:, :B, :, end - n_visible : end] = old[:, :B, :, first : self._end]
        self._begins = [begin + end - self._end for begin in self._begins]
        self._end = end


class GraphJoiningDecoder(FastJoiningDecoder, GraphDecoder):
    """A `GraphDecoder` that samples join and leave."""

    def _next_logits(self, tokens: Tensor, slot: int) -> Tensor:
        # After samples joined or left, the recorded step for as many samples still reads its own
        # tensors.
        step = self._step
        if step is not None and step.inputs is not self._inputs and step.shape[0] == len(tokens):
            step.inputs.last_embeddings.copy_(self._inputs.last_embeddings)
            step.inputs.last_tokens.copy_(self._inputs.last_tokens)
            self._inputs = step.inputs
        return super()._next_logits(tokens, slot)


_JOINING = {
    Decoder: JoiningDecoder,
    FastDecoder: FastJoiningDecoder,
    GraphDecoder: GraphJoiningDecoder,
}
