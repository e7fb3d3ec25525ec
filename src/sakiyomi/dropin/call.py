"""One call of ``generate``, as transformers prepared it: its rows, how they choose and end, and its result.

The tokens are chosen as transformers' own loop does: by the same processors, called once for each token of the output
and in its order, and drawn with the random numbers that ``torch.multinomial`` would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sakiyomi.engine import FinishReason
from sakiyomi.sampling import Row

if TYPE_CHECKING:
    from transformers import GenerationConfig


class NotHere(Exception):  # noqa: N818 (it is no error)
    """Says why a call is one for the model's own generate."""


# What transformers hands to the model itself, that decoders here do without, or that says nothing new.
_IGNORED = {"use_cache", "cache", "past_key_values", "logits_to_keep", "cache_position", "position_ids"}
_KNOWN = {
    False: {"attention_mask", "token_type_ids"},
    True: {"encoder_outputs", "attention_mask", "decoder_attention_mask", "decoder_position_ids"},
}
# These look at the whole batch, or keep a state for it, so that they can't be asked for one row.
_OF_BATCHES = {
    "PrefixConstrainedLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
}
_MODES = ("greedy_search", "sample", "assisted_generation")


@dataclass(frozen=True, slots=True)
class Call:
    """What ``generate`` hands to its decoding loop.

    ``input_ids``: int64 [rows, length], padded on the left. ``inputs``: of the encoder, where there is one.
    """

    input_ids: torch.Tensor
    processors: Any
    criteria: Any
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    streamer: Any
    inputs: torch.Tensor | None
    encoder_decoder: bool

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return self.input_ids.shape[0]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""
        ids = self.config.eos_token_id
        return () if ids is None else tuple(ids) if isinstance(ids, Sequence) else (int(ids),)

    @property
    def limit(self) -> int:
        """Most tokens of an output."""
        return int(self.config.max_length) - self.input_ids.shape[1]

    @property
    def records(self) -> bool:
        """Whether scores or logits are wanted back."""
        config = self.config
        return bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))

    def check(self, context_length: int) -> None:
        """Raise NotHere for what can't be had here with the tokens that transformers' own loop would give."""
        config = self.config
        mode = config.get_generation_mode()
        if mode not in _MODES:
            raise NotHere(f"{str(mode.value).replace('_', ' ')} isn't a choice of token after token")
        for name in ("use_mtp", "assistant_early_exit", "output_attentions", "output_hidden_states"):
            if getattr(config, name, None):
                raise NotHere(f"{name}= is set")
        for name, value in self.model_kwargs.items():
            if value is not None and name not in _IGNORED and name not in _KNOWN[self.encoder_decoder]:
                raise NotHere(f"{name}= is for the model itself")
        if config.max_length > context_length:
            raise NotHere(
                f"the output may reach {config.max_length} tokens, beyond the model's context of {context_length}"
            )
        if any(type(each).__name__ == "UnbatchedClassifierFreeGuidanceLogitsProcessor" for each in self.processors):
            raise NotHere("guidance_scale= computes with the model too")
        if self.rows > 1:
            self._check_batch()

    def _check_batch(self) -> None:
        """Raise NotHere where rows can't go on apart."""
        if self.streamer is not None:
            raise NotHere("a streamer of several sequences")
        if self.records:
            raise NotHere("scores and logits of several sequences, which end apart")
        for each in (*self.processors, *self.criteria):
            kind = type(each)
            if kind.__name__ in _OF_BATCHES or not kind.__module__.startswith("transformers.generation."):
                raise NotHere(f"{kind.__name__} may look at a batch as a whole")
        alike = {"MaxLengthCriteria", "EosTokenCriteria"}
        if not any(hasattr(each, "eos_token_id") for each in self.criteria) and any(
            type(each).__name__ not in alike for each in self.criteria
        ):
            raise NotHere("a batch whose sequences end apart, in a model without an end token")

    def input_of(self, row: int) -> torch.Tensor | None:
        """Return the encoder's input of a row, [1, ...]; rows of one input follow one another."""
        if self.inputs is None:
            return None
        index = row * self.inputs.shape[0] // self.rows
        return self.inputs[index : index + 1]

    def prompts(self) -> list[list[int]]:
        """Return the token ids of each row, without padding. Raises NotHere for masks that are more than that."""
        mask = self.model_kwargs.get("decoder_attention_mask" if self.encoder_decoder else "attention_mask")
        rows: list[list[int]] = self.input_ids.tolist()
        if mask is None:
            return rows
        if tuple(mask.shape) != tuple(self.input_ids.shape):
            raise NotHere("attention_mask= has another shape than the prompts")
        prompts = []
        for row, seen in zip(rows, mask.bool().tolist(), strict=True):
            padding = seen.index(True) if True in seen else len(seen)
            if not all(seen[padding:]) or padding == len(row):
                raise NotHere("attention_mask= hides more than padding on the left")
            prompts.append(row[padding:])
        return prompts

    def result(self, rows: Sequence[GeneratedRow]) -> Any:
        """Return what ``generate`` returns: sequences, padded on the right, alone or in transformers' own class."""
        longest = max(row.ids.shape[1] for row in rows)
        pad = self.config._pad_token_tensor
        sequences = self.input_ids.new_full((len(rows), longest), 0 if pad is None else int(pad))
        for sequence, row in zip(sequences, rows, strict=True):
            sequence[: row.ids.shape[1]] = row.ids[0]
        if not self.config.return_dict_in_generate:
            return sequences
        from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

        scores = tuple(rows[0].scores) if self.config.output_scores else None
        logits = tuple(rows[0].logits) if self.config.output_logits else None
        kind: Any = GenerateEncoderDecoderOutput if self.encoder_decoder else GenerateDecoderOnlyOutput
        return kind(sequences=sequences, scores=scores, logits=logits)


class Noise:
    """The random numbers with which ``torch.multinomial`` would draw, whichever row gets to a step first.

    Of probabilities [rows, vocab_size] it draws a token of each row as argmax(p / e), with a tensor e of exponentials
    from torch's default generator. So e of a step doesn't depend on any token: steps are drawn in their order, and each
    row's part is kept until the row gets there.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._kept: dict[int, dict[int, torch.Tensor]] = {row: {} for row in range(rows)}
        self._rows = rows

    def take(self, row: int, step: int, vocab_size: int) -> torch.Tensor:
        """Return float32 [vocab_size] exponentials; once for every row and step, steps of a row in order."""
        while self._steps <= step:
            drawn = torch.empty(self._rows, vocab_size, device=self._device).exponential_()
            for each, kept in self._kept.items():
                kept[self._steps] = drawn[each].clone() if self._rows > 1 else drawn[each]
            self._steps += 1
        return self._kept[row].pop(step)

    def end(self, row: int) -> None:
        """Forget a row that has ended."""
        self._kept.pop(row, None)


class GeneratedRow:
    """One sequence of a call: chooses its tokens, tells the streamer, and asks the criteria when to end.

    ``prompt``: its token ids without padding. ``ids``: int64 [1, length], padding and output included.
    """

    def __init__(self, call: Call, index: int, prompt: Sequence[int], noise: Noise | None) -> None:
        self.index, self.prompt = index, prompt
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self._call, self._noise = call, noise
        self._step = 0
        self._length = call.input_ids.shape[1]
        self._ids = call.input_ids[index : index + 1].clone()

    @property
    def ids(self) -> torch.Tensor:
        """The ids so far."""
        return self._ids[:, : self._length]

    @property
    def greedy(self) -> bool:
        """Whether the largest logit is the choice, and nobody wants to know more."""
        return self._noise is None and not self._call.processors and not self._call.records

    def choose(self, logits: Row) -> int:
        """Return the token that transformers would choose, for float32 [vocab_size] logits."""
        raw = torch.from_numpy(logits)[None].to(self._ids.device, copy=True)
        if self._call.records and self._call.config.output_logits:
            self.logits.append(raw.clone())
        scores = self._call.processors(self.ids, raw)
        if self._call.records and self._call.config.output_scores:
            self.scores.append(scores)
        if self._noise is None:
            return int(scores.argmax(dim=-1))
        probabilities = torch.softmax(scores, dim=-1)[0]
        if not bool(torch.isfinite(probabilities).all()):
            raise RuntimeError("no token can be drawn: processors leave none possible, or the logits are broken")
        noise = self._noise.take(self.index, self._step, probabilities.shape[0])
        return int(probabilities.div(noise).argmax())

    def take(self, token: int) -> None:
        """Do nothing: :meth:`push` takes the token."""

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        """Append a token; return no text, and why the output ends, if it does."""
        if self._length == self._ids.shape[1]:
            more = min(max(256, self._length), self._call.limit)
            self._ids = torch.cat([self._ids, self._ids.new_empty(1, more)], 1)
        self._ids[0, self._length] = token
        self._length += 1
        self._step += 1
        if self._call.streamer is not None:
            self._call.streamer.put(torch.tensor([token]))
        scores = tuple(self.scores) if self._call.records and self._call.config.output_scores else None
        if not bool(self._call.criteria(self.ids, scores)[0]):
            return "", None
        if self._noise is not None:
            self._noise.end(self.index)
        if token in self._call.eos_ids:
            return "", "eos"
        return "", "length" if self._length == self._call.config.max_length else "stop"

    def finish(self) -> str:
        """Return no text."""
        return ""
