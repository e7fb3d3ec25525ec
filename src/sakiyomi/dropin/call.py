"""One call of ``generate``, as transformers prepared it: its rows, how they choose and end, and its result.

The tokens are chosen as transformers' own loop does: by the same processors, called once for each token of the output
and in its order, and drawn with the random numbers that ``torch.multinomial`` would have drawn.
"""

from __future__ import annotations

import copy
import math
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
    False: {"attention_mask"},
    True: {"encoder_outputs", "attention_mask", "decoder_attention_mask", "decoder_position_ids"},
}
# These look at the whole batch, or keep a state for it, so that they can't be asked for one row.
_OF_BATCHES = {
    "PrefixConstrainedLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "WhisperNoSpeechDetection",
}
_NOISE_BYTES = 64 << 20
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
        ids = self.config._eos_token_tensor
        return () if ids is None else tuple(ids.flatten().tolist())

    @property
    def max_length(self) -> int:
        """Most tokens of a row, its padding and prompt included."""
        own = self.criteria.max_length  # somebody's own criterion takes the place of the config's
        return int(self.config.max_length if own is None else own)

    @property
    def limit(self) -> int:
        """Most tokens of an output."""
        return max(1, self.max_length - self.input_ids.shape[1])

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
        if self.max_length > context_length:
            raise NotHere(
                f"the output may reach {self.max_length} tokens, beyond the model's context of {context_length}"
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
            if kind.__name__ in _OF_BATCHES or not _is_theirs(each):
                raise NotHere(f"{kind.__name__} may look at a batch as a whole")
        alike = {"MaxLengthCriteria", "EosTokenCriteria"}
        if not any(hasattr(each, "eos_token_id") for each in self.criteria) and any(
            type(each).__name__ not in alike for each in self.criteria
        ):
            raise NotHere("a batch whose sequences end apart, in a model without an end token")

    def input_of(self, row: int) -> torch.Tensor | None:
        """Return the encoder's input of a row, [1, ...]; rows of one input follow one another."""
        if self.inputs is None or bool((self.inputs < 0).any() and not self.inputs.is_floating_point()):
            return None  # or transformers' filling, where its output was given instead
        index = row * self.inputs.shape[0] // self.rows
        return self.inputs[index : index + 1]

    def prompts(self) -> list[list[int]]:
        """Return the token ids of each row, without padding. Raises NotHere for masks that are more than that."""
        mask = self.model_kwargs.get("decoder_attention_mask" if self.encoder_decoder else "attention_mask")
        rows: list[list[int]] = self.input_ids.tolist()
        if not all(rows):
            raise NotHere("a prompt has no tokens")
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
        """Return what ``generate`` returns: sequences, padded on the right, alone or in transformers' own class.

        There is no cache in it: what was computed here is no module's.
        """
        longest = max(row.ids.shape[1] for row in rows)
        pad = self.config._pad_token_tensor
        sequences = rows[0].ids.new_full((len(rows), longest), 0 if pad is None else int(pad))
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
    from torch's default generator. So e of a step doesn't depend on any token: steps are drawn in their order. The last
    ones are kept; for a row that is far behind, a step is drawn again, from the generator's state before it.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._generator = _default_generator(device)
        self._states: list[torch.Tensor] = []
        self._kept: dict[int, torch.Tensor] = {}

    def take(self, row: int, step: int, vocab_size: int) -> torch.Tensor:
        """Return float32 [vocab_size] exponentials of a row and step."""
        most = max(2, _NOISE_BYTES // (4 * self._rows * vocab_size))
        while (following := len(self._states)) <= step:
            self._states.append(self._generator.get_state())
            self._kept[following] = self._draw(vocab_size)
            self._kept.pop(following - most, None)
        if step in self._kept:
            return self._kept[step][row]
        now = self._generator.get_state()
        self._generator.set_state(self._states[step])
        drawn = self._draw(vocab_size)
        self._generator.set_state(now)
        return drawn[row]

    def _draw(self, vocab_size: int) -> torch.Tensor:
        return torch.empty(self._rows, vocab_size, device=self._device).exponential_()


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    generators: Any = getattr(torch, device.type).default_generators if device.type == "cuda" else None
    if generators is None:
        raise NotHere(f"sampling on {device.type}")
    index = device.index if device.index is not None else torch.cuda.current_device()
    found: torch.Generator = generators[index]
    return found


class GeneratedRow:
    """One sequence of a call: chooses its tokens, tells the streamer, and asks the criteria when to end.

    ``prompt``: its token ids without padding. ``ids``: int64 [1, length], padding and output included.
    """

    def __init__(self, call: Call, index: int, prompt: Sequence[int], noise: Noise | None) -> None:
        self.index, self.prompt = index, prompt
        self.scores: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []
        self._call, self._noise = call, noise
        self._processors: Any = type(call.processors)(_of_row(each, index, call.rows) for each in call.processors)
        self._alone = call.input_ids.device.type == "cpu" and all(map(_is_theirs, call.processors))
        self._step = 0
        self._length = call.input_ids.shape[1]
        self._ids = call.input_ids[index : index + 1].long().clone()

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
        if not self._alone:
            return self._choose(logits)
        # A row is too little work to share: where other work keeps the cores busy, threads that wait for each other
        # take ten times as long (docs/experiments.md).
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._choose(logits)
        finally:
            torch.set_num_threads(threads)

    def _choose(self, logits: Row) -> int:
        raw = torch.from_numpy(logits)[None].to(self._ids.device, copy=True)
        if self._call.records and self._call.config.output_logits:
            self.logits.append(raw)  # the very tensor that processors may write to, as transformers does
        scores: torch.Tensor = self._processors(self.ids, raw)
        if self._call.records and self._call.config.output_scores:
            self.scores.append(scores)
        if self._noise is None:
            return int(scores.argmax(dim=-1))
        probabilities = torch.softmax(scores, dim=-1)[0]
        noise = self._noise.take(self.index, self._step, probabilities.shape[0])
        token = int(probabilities.div(noise).argmax())
        if not 0 < float(probabilities[token]) < math.inf:  # NaN is the largest
            raise RuntimeError("no token can be drawn: processors leave none possible, or the logits are broken")
        return token

    def take(self, token: int) -> None:
        """Do nothing: :meth:`push` takes the token."""

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        """Append a token; return no text, and a reason if the output ends."""
        if self._length == self._ids.shape[1]:
            more = min(max(256, self._length), self._call.limit)
            self._ids = torch.cat([self._ids, self._ids.new_empty(1, more)], 1)
        self._ids[0, self._length] = token
        self._length += 1
        self._step += 1
        scores = tuple(self.scores) if self._call.records and self._call.config.output_scores else None
        ended = bool(self._call.criteria(self.ids, scores)[0])
        if self._call.streamer is not None:
            self._call.streamer.put(torch.tensor([token]))
        return "", "stop" if ended else None

    def finish(self) -> str:
        """Return no text."""
        return ""


def _is_theirs(each: Any) -> bool:
    """Return whether a processor or criterion is transformers' own."""
    return type(each).__module__.startswith("transformers.generation.")


def _of_row(processor: Any, row: int, rows: int) -> Any:
    """Return a processor for one row of a batch: what it holds for each row is cut to that."""
    ignored = getattr(processor, "prompt_ignore_length", None)  # of penalties: each row's padding
    if rows == 1 or not isinstance(ignored, torch.Tensor):
        return processor
    own = copy.copy(processor)
    own.prompt_ignore_length = ignored[row : row + 1]
    return own
