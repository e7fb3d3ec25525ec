"""Encoder-decoder models of transformers as targets: T5, BART, Marian, Whisper and others that work as they do.

The encoder runs once for an input (:meth:`Seq2SeqTarget.given`), and what comes of it is a target like any other: the
tokens of its sequences are the decoder's. The model's own module computes them, with its own positions and masks; it is
never changed. All sequences of an input share the keys and values of cross-attention, computed once; those of
self-attention are each one's own and roll back by a number (:mod:`sakiyomi.targets.module_cache`).

Imports transformers, which is optional: import this module where a model of transformers is at hand anyway.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import ModelOutput

from sakiyomi.errors import OptionError, UnsupportedModelError
from sakiyomi.interfaces import Exactness, TargetOutput, Work
from sakiyomi.targets.decoder import check_capacity, rows_are_invariant
from sakiyomi.targets.huggingface import weight_format
from sakiyomi.targets.linear import MAX_ROWS
from sakiyomi.targets.module_cache import ModuleCache, run_rows

CONTEXT_LENGTH = 4096  # tokens, for models with relative positions, which set no limit
_TESTED_INPUT = 600  # positions of the encoder in the self-test: more than one block of keys of attention's kernels
_TESTED_PREFIXES = (0, 24, 120)
_SAME = 0.2  # how far logits of the same rows may be apart, in standard deviations of logits: rounding is far below


class Seq2SeqTarget:
    """An encoder-decoder model. Give it an input to get a target: ``target.given(input_ids=[...])``.

    ``model``: of transformers, with a language-model head, in eval mode. ``context_length``: most tokens of the
    decoder, its prompt included; by default what the model's positions allow, or CONTEXT_LENGTH where they set no
    limit. Rows were tested at load not to depend on the cache; whether they depend on the rows beside them says
    ``exactness``.

    Raises UnsupportedModelError for what is no encoder-decoder model or works in another way; OptionError.
    """

    kernels = "transformers"

    def __init__(self, model: PreTrainedModel, context_length: int | None = None) -> None:
        name = type(model).__name__
        if not getattr(model.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(f"{name} has no encoder: an encoder-decoder model is needed here")
        if not model.can_generate():
            raise UnsupportedModelError(f"{name} has no language-model head: load the model's class for generation")
        if model.training:
            raise OptionError(
                f"model: {name} is in training mode, so that dropout changes its logits; call model.eval()"
            )
        limit = _position_limit(model)
        if context_length is not None and not 2 <= context_length <= (limit or context_length):
            raise OptionError(f"context_length={context_length}: must be in 2..{limit or 'any'} for {name}")
        self.model = model
        self.context_length = context_length or limit or CONTEXT_LENGTH
        self.vocab_size = _vocab_size(model)
        self.max_rows = MAX_ROWS
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.weight_format = weight_format(model)
        self._threads = torch.get_num_threads()
        self._exact = self._test()

    @property
    def exactness(self) -> Exactness:
        """``bit-exact`` if rows were found to be invariant at load, with as many threads as torch uses now."""
        return "bit-exact" if self._exact and self._threads == torch.get_num_threads() else "numerics"

    @property
    def decoder_start(self) -> tuple[int, ...]:
        """The ids that the decoder's text begins with, as the model's generation config says: the prompt of a request.

        A language or a first token that is always the same (``forced_bos_token_id``) is part of it. Whisper's language
        and task are the caller's to add. Empty where the config names no start.
        """
        configs = (getattr(self.model, "generation_config", None), self.model.config)

        def setting(name: str) -> int | None:
            return next((found for config in configs if (found := getattr(config, name, None)) is not None), None)

        start = setting("decoder_start_token_id")
        ids = (setting("bos_token_id") if start is None else start, setting("forced_bos_token_id"))
        return tuple(int(token) for token in ids if token is not None)

    @torch.inference_mode()
    def given(self, **encoder_inputs: Any) -> Conditioned:
        """Run the encoder on one input and return the target of what the decoder says to it.

        ``encoder_inputs``: what the model's encoder takes: ``input_ids`` and ``attention_mask`` (ids, or [1, tokens]
        tensors), ``input_features`` ([1, bins, frames]); or, in their place, ``encoder_outputs`` (or only their first
        tensor, [1, positions, hidden_size]), with the ``attention_mask`` over its positions where some are padding.
        Raises OptionError for what the encoder doesn't take, or for more than one input.
        """
        ready = encoder_inputs.pop("encoder_outputs", None)
        inputs = {name: self._tensor(name, value) for name, value in encoder_inputs.items() if value is not None}
        mask = inputs.get("attention_mask")
        if ready is not None:
            if wrong := set(inputs) - {"attention_mask"}:
                raise OptionError(f"{', '.join(sorted(wrong))}: not beside encoder_outputs, which stand in their place")
            if not isinstance(ready, ModelOutput):
                ready = _encoder_output(ready if isinstance(ready, torch.Tensor) else ready[0])
            self._tensor("encoder_outputs", ready[0])
            return Conditioned(self, ready, mask)
        encoder = cast("torch.nn.Module", self.model.get_encoder())
        known = [name for name in inspect.signature(encoder.forward).parameters if name not in ("kwargs", "self")]
        if wrong := set(inputs) - set(known):
            raise OptionError(f"{', '.join(sorted(wrong))}: {type(encoder).__name__} takes {', '.join(known)}")
        if not set(inputs) - {"attention_mask"}:
            raise OptionError(f"no input: {type(encoder).__name__} takes {', '.join(known)}")
        return Conditioned(self, encoder(**inputs, return_dict=True), mask)

    def _tensor(self, name: str, value: Any) -> torch.Tensor:
        tensor = torch.as_tensor(value, device=self.device)
        if tensor.dim() == 1:
            tensor = tensor[None]
        if tensor.shape[0] != 1:
            raise OptionError(f"{name}: {tensor.shape[0]} inputs; give them one by one, each is a target of its own")
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def compute(self, conditioned: Conditioned, tokens: Sequence[int], cache: Cache | None) -> torch.Tensor:
        """Return the logits of rows that follow what ``cache`` holds, or that begin a text: [rows, vocab_size]."""
        output = self.model(
            encoder_outputs=conditioned.encoder_outputs,
            attention_mask=conditioned.attention_mask,
            decoder_input_ids=torch.tensor([list(tokens)], device=self.device),
            cache=cache,
            use_cache=cache is not None,
            return_dict=True,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _test(self) -> bool:
        """Return whether rows have the same bits in one call and in several.

        Raises UnsupportedModelError where they aren't even near those of a text computed at once, without a cache.
        """
        generator = torch.Generator().manual_seed(0)
        size = self.model.get_encoder().config.hidden_size
        hidden = torch.randn(1, _TESTED_INPUT, size, generator=generator).to(self.device, self.dtype)
        conditioned = Conditioned(self, _encoder_output(hidden), None)
        ids = torch.randint(self.vocab_size, (min(18, self.context_length),), generator=generator).tolist()
        try:
            expected = self.compute(conditioned, ids, None).float()
            sequence = conditioned.new_sequence()
            pieces = [Work(sequence, piece, None, len(piece)) for piece in (ids[:1], ids[1:9], ids[9:]) if piece]
            found = torch.cat([conditioned.forward([piece])[0].logits for piece in pieces]).float()
        except Exception as error:
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UnsupportedModelError(f"{type(self.model).__name__} can't be run with a cache: {message}") from error
        if not (found - expected).abs().max() <= _SAME * expected.std():
            raise UnsupportedModelError(f"{type(self.model).__name__} computes other logits with a cache than without")
        for prefix in _TESTED_PREFIXES:
            if prefix and prefix + 20 > self.context_length:
                break
            sequence = conditioned.new_sequence()
            if prefix:
                conditioned.forward([Work(sequence, [i % self.vocab_size for i in range(prefix)], None, 0)])
            if not rows_are_invariant(conditioned, sequence):
                return False
        return True


class Conditioned:
    """An encoder-decoder model with its input: a target whose tokens are the decoder's. See :class:`Seq2SeqTarget`.

    ``encoder_outputs``: what the encoder made of the input, [1, positions, hidden_size] first. ``attention_mask``: [1,
    positions], None without padding.
    """

    def __init__(
        self, target: Seq2SeqTarget, encoder_outputs: ModelOutput, attention_mask: torch.Tensor | None
    ) -> None:
        self.target = target
        self.encoder_outputs = encoder_outputs
        self.attention_mask = attention_mask
        self.vocab_size, self.context_length, self.max_rows = target.vocab_size, target.context_length, target.max_rows
        self.dtype, self.device = target.dtype, target.device
        self.kernels, self.weight_format = target.kernels, target.weight_format
        self.hidden_layers = ()
        self._cross: Cache | None = None

    @property
    def exactness(self) -> Exactness:
        """See :attr:`Seq2SeqTarget.exactness`."""
        return self.target.exactness

    @property
    def decoder_start(self) -> tuple[int, ...]:
        """See :attr:`Seq2SeqTarget.decoder_start`."""
        return self.target.decoder_start

    def new_sequence(self) -> Seq2SeqSequence:
        """Return an empty sequence."""
        return Seq2SeqSequence(self)

    @torch.inference_mode()
    def forward(self, work: Sequence[Work], *, hidden_layers: Sequence[int] = ()) -> list[TargetOutput]:
        """Append the rows of every work to its sequence and compute them, each sequence in calls of its own.

        Sequences of other inputs of the same model may be among them. A chain is one call; a tree is one for each of
        its paths, without the rows that an earlier path has.
        Raises CapacityError where a sequence would outgrow the context; OptionError for ``hidden_layers``.
        """
        if hidden_layers:
            raise OptionError(f"hidden_layers={tuple(hidden_layers)}: encoder-decoder models give logits only")
        check_capacity(work, self.context_length)
        sequences = [cast("Seq2SeqSequence", item.sequence) for item in work]
        assert all(sequence.conditioned.target is self.target for sequence in sequences)
        lengths = [sequence.length for sequence in sequences]
        try:
            return [sequence.forward(item) for sequence, item in zip(sequences, work, strict=True)]
        except BaseException:
            for sequence, length in zip(sequences, lengths, strict=True):
                sequence.length = length
            raise

    def compute(self, tokens: Sequence[int], cache: ModuleCache) -> torch.Tensor:
        """Return the logits of rows that follow what ``cache`` holds: [rows, vocab_size]."""
        # Until a call has succeeded, every call fills keys and values of its own, so that none is ever half filled.
        cross = self._cross or DynamicCache()
        logits = self.target.compute(self, tokens, EncoderDecoderCache(cache, cross))
        self._cross = cross
        return logits


class Seq2SeqSequence(ModuleCache):
    """The decoder's keys and values of one sequence, and the input that it belongs to."""

    def __init__(self, conditioned: Conditioned) -> None:
        super().__init__()
        self.conditioned = conditioned

    def forward(self, work: Work) -> TargetOutput:
        """Append the rows of a work of this sequence and compute them."""
        logits = run_rows(self, work.tokens, work.parents, lambda tokens: self.conditioned.compute(tokens, self))
        return TargetOutput(logits[len(work.tokens) - work.logit_rows :])


def _position_limit(model: PreTrainedModel) -> int | None:
    """Return the most tokens that the decoder's positions allow; None for relative positions, which set no limit."""
    for config in (model.config.get_text_config(decoder=True), model.config):
        for name in ("max_target_positions", "max_decoder_position_embeddings", "max_position_embeddings"):
            if isinstance(limit := getattr(config, name, None), int) and limit > 0:
                return limit
    return None


def _encoder_output(hidden: torch.Tensor) -> ModelOutput:
    output = BaseModelOutput(last_hidden_state=hidden)
    for name in ("attention_mask", "router_logits"):  # what some models look for in the outputs of their own encoders
        setattr(output, name, None)
    return output


def _vocab_size(model: PreTrainedModel) -> int:
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if head is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no language-model head: a text decoder is needed here")
    return int(head.weight.shape[0])
