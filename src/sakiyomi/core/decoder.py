"""Decoder layers of the Llama family: the whole forward of a few rows of some sequences, in one call."""

from __future__ import annotations

import ctypes
import math
from collections import abc
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from itertools import pairwise

import torch

from sakiyomi.core import library
from sakiyomi.core.library import Batch, Layer, Part, Shape
from sakiyomi.core.linear import Linear
from sakiyomi.interfaces import Work
from sakiyomi.rope import cosines_and_sines

_WHOLE_CONTEXT = 1 << 40  # a window that reaches back to the start


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """What one layer computes with. Norms are float32; None leaves a norm out.

    ``qkv``: hidden -> queries, keys and values of all heads; ``gate_up``: a gated linear. ``window``: how many tokens
    back attention reaches, the token itself included; None for all.
    """

    attention_norm: torch.Tensor | None
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor | None
    gate_up: Linear
    down: Linear
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    window: int | None = None


class Sequence:
    """Keys and values of one sequence, in pages of 256 tokens. Made by :meth:`Decoder.new_sequence`."""

    def __init__(self, made: int) -> None:
        self._library = library.library()
        self.handle = made
        self.length = 0

    def __del__(self) -> None:
        self._library.saki_sequence_free(self.handle)

    @property
    def capacity(self) -> int:
        """Tokens that there is room for; more is made when it is needed."""
        return int(self._library.saki_sequence_capacity(self.handle))

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return int(self._library.saki_sequence_bytes(self.handle))

    def truncate(self, length: int) -> None:
        """Forget every token from ``length`` on. Costs nothing."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length={length}: must be between 0 and {self.length}")
        self.length = length

    def keep(self, length: int, rows: abc.Sequence[int]) -> None:
        """Of the slots from ``length`` on keep those at these offsets (ascending), moved together."""
        bounds = (-1, *rows, self.length - length)
        if length < 0 or any(a >= b for a, b in pairwise(bounds)):
            raise ValueError(f"length={length}, rows={list(rows)}: must ascend within the {self.length} tokens held")
        if any(row != i for i, row in enumerate(rows)):
            self._library.saki_sequence_keep(self.handle, length, (c_int32 * len(rows))(*rows), len(rows))
        self.truncate(length + len(rows))


class Decoder:
    """Layers, with an embedding before and a head behind them where they are given.

    ``frequencies``: float32 [head_dim / 2], the rotary angles per position. ``cache``: the format of keys and values.
    ``norm`` and ``head`` make logits; ``embedding``, float32 or bf16 [vocab_size, hidden], makes inputs of tokens:
    without it, the head's rows do. ``token_norm``, ``input_norm``: [hidden] each, where a forward has both tokens and
    inputs: the first qkv sees the norms of the tokens' embeddings and of the inputs side by side, and the layers begin
    with the inputs, or with their norm (``norm_residual``). Raises ValueError for parts that don't fit together, or
    dimensions that the core has no room for: ``head_dim`` is even and at most 512, there are at most 64 heads for a key
    head.
    """

    def __init__(
        self,
        layers: abc.Sequence[DecoderLayer],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        frequencies: torch.Tensor,
        rope_factor: float = 1.0,
        cache: library.Format = "bf16",
        norm: torch.Tensor | None = None,
        head: Linear | None = None,
        embedding: torch.Tensor | None = None,
        token_norm: torch.Tensor | None = None,
        input_norm: torch.Tensor | None = None,
        norm_residual: bool = False,
        kernels: str = "auto",
    ) -> None:
        self.kernels = library.path_of(kernels)
        self.hidden_size = layers[0].output.out_features
        self.layers = len(layers)
        self._inputs = layers[0].qkv.in_features
        self._head, self._embedding = head, embedding
        self._frequencies, self._factor = frequencies, rope_factor
        self._rope = torch.empty(0, 2, head_dim // 2)
        self._library = library.library()
        shape = Shape(
            layers=len(layers),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            hidden=self.hidden_size,
            cache_format=library.FORMATS[cache],
            eps=eps,
            attention_scale=1 / math.sqrt(head_dim),
        )
        vectors = [
            library.vector(norm, size)
            for layer in layers
            for norm, size in (
                (layer.attention_norm, self.hidden_size),
                (layer.query_norm, head_dim),
                (layer.key_norm, head_dim),
                (layer.mlp_norm, self.hidden_size),
            )
        ]
        described = (Layer * len(layers))(
            *(
                Layer(
                    *(library.pointer(v) for v in vectors[4 * i : 4 * i + 4]),
                    layer.qkv.handle,
                    layer.output.handle,
                    layer.gate_up.handle,
                    layer.down.handle,
                    layer.window or _WHOLE_CONTEXT,
                )
                for i, layer in enumerate(layers)
            )
        )
        if embedding is not None and embedding.shape[1] != self.hidden_size:
            raise ValueError(f"embedding of shape {list(embedding.shape)}: must be [vocab_size, {self.hidden_size}]")
        dtype = torch.bfloat16 if embedding is not None and embedding.dtype is torch.bfloat16 else torch.float32
        self._handle = library.make(
            "saki_decoder_new",
            self.kernels.encode(),
            ctypes.byref(shape),
            described,
            library.pointer(library.vector(norm, self.hidden_size)),
            head.handle if head else None,
            library.pointer(embedding, dtype),
            library.FORMATS["bf16" if dtype is torch.bfloat16 else "fp32"],
            library.pointer(library.vector(token_norm, self.hidden_size)),
            library.pointer(library.vector(input_norm, self.hidden_size)),
            norm_residual,
        )
        self._takes_both = token_norm is not None

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._library.saki_decoder_free(self._handle)

    def new_sequence(self) -> Sequence:
        """Return an empty sequence. Raises MemoryError."""
        return Sequence(library.make("saki_sequence_new", self._handle))

    def forward(
        self,
        work: abc.Sequence[Work],
        *,
        inputs: torch.Tensor | None = None,
        attention_inputs: torch.Tensor | None = None,
        hidden_layers: abc.Sequence[int] = (),
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Append the rows of every work to its sequence and compute them together.

        ``inputs``: float32 [rows, hidden], in place of the tokens' embeddings. ``attention_inputs``: float32
        [rows, in_features of the first qkv], in place of the first layer's norm of them.
        Returns the logits that the works ask for, float32 [their rows, vocab_size] or None without a head, and of each
        of ``hidden_layers`` the residual stream after so many layers, float32 [rows, hidden].
        Raises MemoryError; IndexError for tokens that the vocabulary lacks; ValueError for what doesn't fit together.
        Then nothing has changed.
        """
        rows = sum(len(item.tokens) for item in work)
        tokens = [token for item in work for token in item.tokens]
        parts = (Part * len(work))()
        wanted, longest = 0, 0
        kept_alive = []
        for part, item in zip(parts, work, strict=True):
            sequence, count = item.sequence, len(item.tokens)
            if not isinstance(sequence, Sequence):
                raise TypeError(f"a sequence of {type(sequence).__name__}: must come from new_sequence()")
            part.sequence, part.length, part.rows = sequence.handle, sequence.length, count
            part.logit_rows = item.logit_rows if self._head else 0
            if item.parents is not None:
                if len(item.parents) != count:
                    raise ValueError(f"{len(item.parents)} parents for {count} rows")
                parents = (c_int32 * count)(*item.parents)
                kept_alive.append(parents)
                part.parents = ctypes.addressof(parents)
            wanted += part.logit_rows
            longest = max(longest, sequence.length + count)
        batch = Batch(parts=parts, part_count=len(work))
        if inputs is None or self._takes_both:
            table, head = self._embedding, self._head
            vocabulary = table.shape[0] if table is not None else head.out_features if head else 0
            if not 0 <= min(tokens) <= max(tokens) < vocabulary:
                raise IndexError(f"token ids must be in 0..{vocabulary - 1}")
            ids = (c_int64 * rows)(*tokens)
            batch.tokens = ctypes.addressof(ids)
        if inputs is not None:
            _check_shape("inputs", inputs, rows, self.hidden_size)
            batch.inputs = library.pointer(inputs)
        if attention_inputs is not None:
            _check_shape("attention_inputs", attention_inputs, rows, self._inputs)
            batch.attention_inputs = library.pointer(attention_inputs)
        rope = self._rope_up_to(longest)  # held, since another thread may put a longer one in its place
        batch.rope = rope.data_ptr()
        logits = None
        if self._head:
            logits = torch.empty(wanted, library.padded(self._head.out_features))
            batch.logits, batch.logits_stride = logits.data_ptr(), logits.shape[1]
        hidden = [torch.empty(rows, self.hidden_size) for _ in hidden_layers]
        if hidden:
            layers = (c_int32 * len(hidden))(*hidden_layers)
            places = (c_void_p * len(hidden))(*(h.data_ptr() for h in hidden))
            batch.hidden_count = len(hidden)
            batch.hidden_layers, batch.hidden = ctypes.addressof(layers), ctypes.addressof(places)
        library.check(self._library.saki_forward(self._handle, ctypes.byref(batch), library.threads()))
        for item in work:  # last: whatever fails before leaves every sequence as it was
            item.sequence.length += len(item.tokens)  # type: ignore[misc]
        return None if logits is None else logits[:, : self._head.out_features], hidden  # type: ignore[union-attr]

    def _rope_up_to(self, length: int) -> torch.Tensor:
        """Return [positions, 2, head_dim / 2], cosines and sines, with ``length`` positions or more."""
        rope = self._rope
        while rope.shape[0] < length:
            more = torch.stack(cosines_and_sines(rope.shape[0], self._frequencies, self._factor), 1)
            rope = torch.cat([rope, more])
        self._rope = rope
        return rope


def _check_shape(name: str, tensor: torch.Tensor, *shape: int) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} of shape {list(tensor.shape)}: must be {list(shape)}")
