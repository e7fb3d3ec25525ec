"""Decoder layers of the Llama family: the whole forward of a few rows of some sequences, in one call."""

from __future__ import annotations

import ctypes
import math
from collections import abc
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

from sakiyomi.core import library
from sakiyomi.core.library import Batch, Layer, Part, Shape
from sakiyomi.core.linear import Linear
from sakiyomi.errors import UnsupportedModelError
from sakiyomi.interfaces import Work
from sakiyomi.targets.rope import cosines_and_sines

_WHOLE_CONTEXT = 1 << 40  # a window that reaches back to the start
_MAX_HEAD_DIM, _MAX_GROUP = 512, 64  # what the kernels have room for


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
        if any(row != i for i, row in enumerate(rows)):
            self._library.saki_sequence_keep(self.handle, length, (c_int32 * len(rows))(*rows), len(rows))
        self.truncate(length + len(rows))


class Decoder:
    """Layers, with an embedding before and a head behind them where they are given.

    ``frequencies``: float32 [head_dim / 2], the rotary angles per position. ``cache``: the format of keys and values.
    ``norm`` and ``head`` make logits; ``embedding``, float32 or bf16 [vocab_size, hidden], makes inputs of tokens:
    without it, the head's rows do. Raises UnsupportedModelError for dimensions that the core has no room for.
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
        kernels: str = "auto",
    ) -> None:
        path = library.resolve(kernels)
        if path is None:
            raise RuntimeError("the compiled core isn't there")
        if head_dim > _MAX_HEAD_DIM or head_dim % 2 or heads // kv_heads > _MAX_GROUP or cache == "int8":
            raise UnsupportedModelError(
                f"head_dim {head_dim}, {heads // kv_heads} heads per key head, {cache} cache: the compiled core has "
                f"even head_dim up to {_MAX_HEAD_DIM}, up to {_MAX_GROUP} heads, fp32 and bf16; "
                "kernels='torch' has no such limits"
            )
        self.kernels = path
        self.hidden_size = layers[0].output.out_features
        self.head_dim = head_dim
        self._head, self._embedding = head, embedding
        self._frequencies, self._factor = frequencies, rope_factor
        self._rope = torch.empty(0, 2, head_dim // 2)
        self._library = library.library()
        shape = Shape(
            len(layers),
            heads,
            kv_heads,
            head_dim,
            self.hidden_size,
            library.FORMATS[cache],
            eps,
            1 / math.sqrt(head_dim),
        )
        described = (Layer * len(layers))(
            *(
                Layer(
                    library.pointer(layer.attention_norm),
                    library.pointer(layer.query_norm),
                    library.pointer(layer.key_norm),
                    library.pointer(layer.mlp_norm),
                    layer.qkv.handle,
                    layer.output.handle,
                    layer.gate_up.handle,
                    layer.down.handle,
                    layer.window or _WHOLE_CONTEXT,
                )
                for layer in layers
            )
        )
        dtype = torch.float32 if embedding is None else embedding.dtype
        self._handle = library.handle(
            self._library.saki_decoder_new(
                path.encode(),
                ctypes.byref(shape),
                described,
                library.pointer(norm),
                head.handle if head else None,
                library.pointer(embedding, dtype),
                library.FORMATS["bf16" if dtype is torch.bfloat16 else "fp32"],
            )
        )

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._library.saki_decoder_free(self._handle)

    def new_sequence(self) -> Sequence:
        """Return an empty sequence. Raises MemoryError."""
        return Sequence(library.handle(self._library.saki_sequence_new(self._handle)))

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
        Raises MemoryError, and then nothing has changed; IndexError for tokens that the vocabulary lacks.
        """
        rows = sum(len(item.tokens) for item in work)
        tokens = [token for item in work for token in item.tokens]
        parts = (Part * len(work))()
        wanted, longest = 0, 0
        kept_alive = []
        for part, item in zip(parts, work, strict=True):
            sequence, count = item.sequence, len(item.tokens)
            assert isinstance(sequence, Sequence)
            assert 0 <= item.logit_rows <= count > 0
            part.sequence, part.length, part.rows = sequence.handle, sequence.length, count
            part.logit_rows = item.logit_rows if self._head else 0
            if item.parents is not None:
                assert len(item.parents) == count
                assert all(-1 <= parent < i for i, parent in enumerate(item.parents))
                parents = (c_int32 * count)(*item.parents)
                kept_alive.append(parents)
                part.parents = ctypes.addressof(parents)
            wanted += part.logit_rows
            longest = max(longest, sequence.length + count)
        batch = Batch(parts=parts, part_count=len(work))
        if inputs is None:
            assert self._head or self._embedding is not None
            vocabulary = self._embedding.shape[0] if self._embedding is not None else self._head.out_features  # type: ignore[union-attr]
            if not 0 <= min(tokens) <= max(tokens) < vocabulary:
                raise IndexError(f"token ids must be in 0..{vocabulary - 1}")
            ids = (c_int64 * rows)(*tokens)
            batch.tokens = ctypes.addressof(ids)
        else:
            assert inputs.shape == (rows, self.hidden_size)
            batch.inputs = library.pointer(inputs)
        if attention_inputs is not None:
            assert attention_inputs.shape[0] == rows
            batch.attention_inputs = library.pointer(attention_inputs)
        batch.rope = self._rope_up_to(longest).data_ptr()
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
        while self._rope.shape[0] < length:
            more = torch.stack(cosines_and_sines(self._rope.shape[0], self._frequencies, self._factor), 1)
            self._rope = torch.cat([self._rope, more])
        return self._rope
