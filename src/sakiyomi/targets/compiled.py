"""The fast path: decoders of the Llama family on the compiled core.

A row's bits don't depend on the other rows of a call, on their number, on the number of threads or on how far memory
reaches: every sum has one order, which is that of the row's own features and keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from sakiyomi import core
from sakiyomi.core.library import Format
from sakiyomi.errors import UnsupportedModelError
from sakiyomi.interfaces import HEAD_INPUT, Exactness, TargetOutput, Work
from sakiyomi.targets.decoder import DecoderConfig, LayerNames, Reader, Stack, check_capacity, rows_are_invariant

MAX_ROWS = 128
_TESTED_PREFIX = 24  # tokens before the rows of the self-test, so that they cross from one block of keys to the next


class CompiledTarget:
    """A decoder of the Llama family on the compiled core.

    ``weights`` maps Hugging Face names to tensors; each is read once. ``dtype``: of weights, keys and values.
    ``weight_format="int8"`` keeps weights as integers with a scale per output feature. ``context_length`` may lower
    the model's own. ``kernels``: an instruction path, or "auto".
    Raises UnsupportedModelError or CorruptModelError where config and weights don't make a model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        context_length: int | None = None,
        *,
        weight_format: Format | None = None,
        kernels: str = "auto",
    ) -> None:
        if config.head_dim > 512 or config.head_dim % 2 or config.heads // config.kv_heads > 64:
            raise UnsupportedModelError(
                f"head_dim {config.head_dim}, {config.heads // config.kv_heads} heads per key head: the compiled core "
                "has even head_dim up to 512, and up to 64 heads; kernels='torch' has no such limits"
            )
        self.config = config
        self.dtype = dtype
        self.context_length = context_length or config.context_length
        plain: Format = "bf16" if dtype is torch.bfloat16 else "fp32"
        self.weight_format: Format = weight_format or plain
        read = Reader(weights, dtype)

        def linear(stack: Stack, *, gated: bool = False) -> core.Linear:
            return core.Linear(
                read.weights(stack), read.biases(stack), format=self.weight_format, gated=gated, kernels=kernels
            )

        def layer(index: int) -> core.DecoderLayer:
            names = LayerNames.of(config, index)
            return core.DecoderLayer(
                attention_norm=read.norm(names.attention_norm, config.hidden_size),
                qkv=linear(names.qkv),
                output=linear(names.output),
                mlp_norm=read.norm(names.mlp_norm, config.hidden_size),
                gate_up=linear(names.gate_up, gated=True),
                down=linear(names.down),
                query_norm=read.norm(names.query_norm, config.head_dim) if names.query_norm else None,
                key_norm=read.norm(names.key_norm, config.head_dim) if names.key_norm else None,
                window=config.windows[index],
            )

        with torch.inference_mode():
            size = (config.vocab_size, config.hidden_size)
            head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
            packed = core.Linear([read(head, *size)], format=self.weight_format, kernels=kernels)
            # The rows of a packed head are its weights again, save in int8.
            own = config.tied and self.weight_format != "int8"
            table = None if own else read.table("model.embed_tokens.weight", *size)
            if table is not None and table.dtype is torch.float16:
                table = table.to(dtype)
            frequencies, factor = read.frequencies(config)
            self._norm = read.norm("model.norm.weight", config.hidden_size)
            self._decoder = core.Decoder(
                [layer(i) for i in range(config.layers)],
                heads=config.heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                eps=config.norm_eps,
                frequencies=frequencies,
                rope_factor=factor,
                cache=plain,
                norm=self._norm,
                head=packed,
                embedding=table,
                kernels=kernels,
            )
        self.kernels = self._decoder.kernels
        self._exact = self._rows_are_invariant()

    @property
    def exactness(self) -> Exactness:
        """``bit-exact``, unless the test at load found otherwise."""
        return "bit-exact" if self._exact else "numerics"

    @property
    def vocab_size(self) -> int:
        """Number of logits per row."""
        return self.config.vocab_size

    @property
    def max_rows(self) -> int:
        """Most rows per sequence that one forward should be given."""
        return MAX_ROWS

    @property
    def hidden_layers(self) -> range:
        """The layers whose states a forward can give."""
        return range(HEAD_INPUT, self.config.layers + 1)

    def new_sequence(self) -> core.Sequence:
        """Return an empty sequence."""
        return self._decoder.new_sequence()

    @torch.inference_mode()
    def forward(self, work: Sequence[Work], *, hidden_layers: Sequence[int] = ()) -> list[TargetOutput]:
        """Append the rows of every work to its sequence and compute them in one pass.

        See :class:`~sakiyomi.interfaces.TargetOutput` for what comes back, all of it in float32.
        Raises CapacityError where a sequence would outgrow the context; MemoryError.
        """
        check_capacity(work, self.context_length)
        layers = [self.config.layers if layer == HEAD_INPUT else layer for layer in hidden_layers]
        logits, hidden = self._decoder.forward(work, hidden_layers=layers)
        assert logits is not None
        for i, layer in enumerate(hidden_layers):
            if layer == HEAD_INPUT:
                hidden[i] = F.rms_norm(hidden[i], self._norm.shape, self._norm, self.config.norm_eps)
        if len(work) == 1:
            return [TargetOutput(logits, tuple(hidden))]
        row_ends = list(accumulate(len(item.tokens) for item in work))
        ends = list(accumulate(item.logit_rows for item in work))
        of_logits = logits.tensor_split(ends[:-1])
        of_hidden = [h.tensor_split(row_ends[:-1]) for h in hidden]
        return [TargetOutput(part, tuple(h[i] for h in of_hidden)) for i, part in enumerate(of_logits)]

    def _rows_are_invariant(self) -> bool:
        sequence = self.new_sequence()
        if self.context_length > 2 * _TESTED_PREFIX:
            self.forward([Work(sequence, [i % self.vocab_size for i in range(_TESTED_PREFIX)], None, 0)])
        return rows_are_invariant(self, sequence)
