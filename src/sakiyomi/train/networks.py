"""The networks that draft, as they are trained: all positions of many texts at once.

What each draws at inference is told in :mod:`sakiyomi.drafters.eagle`, ``mlp`` and ``block``; the names of parameters
are those of the files that these load.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sakiyomi.train.features import Batch

LOSS_ROWS = 64  # logits made at a time: they stay in the processor's cache
HEAD_ROWS = 512  # rows that a gradient of the head is made of at a time: it is large, and to add to it costs
KL_DECAY = 3.0
RESIDUAL = 2.0  # found by trial: the same steps train less at 1, 4 and 8
START_SCALE = 0.3  # of the first logits: at the target's own scale an untrained network would be sure of itself

Steps = Generator["Step", "torch.Tensor | None", None]


@dataclass(frozen=True)
class Step:
    """What a network says at one step of its drafts, for the n rows that got there.

    ``rows``: int64 [n], which positions of the batch they draft from: example * most positions + position. ``label``:
    int64 [n], the token that the text has there, as an id of the draft vocabulary, -1 where it has none. ``target``:
    int64 [n], which of the target's distributions is the one there. Logits are made of ``frozen`` [n, hidden_size] by
    the target's head, and of ``trained`` [n, any] by ``head`` [draft vocabulary, any]; the sum, where there are both.
    ``score``: [n], the logit of how likely the token stands, from a network that says so.
    """

    rows: torch.Tensor
    label: torch.Tensor
    target: torch.Tensor
    frozen: torch.Tensor | None = None
    trained: torch.Tensor | None = None
    head: torch.Tensor | None = None
    score: torch.Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """Of one batch: what to minimise, and the share of first tokens that were hit."""

    value: torch.Tensor
    hit: float


class DraftLoss(torch.autograd.Function):
    """The loss of draft logits q against the target's distributions p: a mean of KL and total variation.

    KL counts exp(-3 acceptance), where acceptance is the sum of min(p, q): first it has the network learn what is
    likely at all, then total variation what is accepted. Logits and their gradients are made some rows at a time and
    never kept: they would be most of the memory, and to move them most of the time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        frozen: torch.Tensor | None,
        frozen_head: torch.Tensor,
        trained: torch.Tensor | None,
        head: torch.Tensor | None,
        targets: torch.Tensor,
        index: torch.Tensor,
        weight: torch.Tensor,
        label: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the loss (the sum over rows, weighted), the acceptance of each row, and which hit their label."""
        dtype, rows = frozen_head.dtype, _at_a_time(index.device)
        real = len(index)
        count = -(-real // rows) * rows
        index, weight, label = (F.pad(x, (0, count - real)) for x in (index, weight, label))  # as in Linear
        cast = [
            (F.pad(x.to(dtype), (0, 0, 0, count - real)), w.to(dtype))
            for x, w in ((frozen, frozen_head), (trained, head))
            if x is not None and w is not None
        ]
        grads = [torch.empty_like(x) for x, _ in cast]
        head_grad = None if head is None else torch.zeros_like(head)
        overlap = torch.empty(count, device=index.device)
        hit = torch.empty(count, dtype=torch.bool, device=index.device)
        total = torch.zeros((), device=index.device)
        for start in range(0, count, HEAD_ROWS):
            kept = []
            for at in range(start, min(start + HEAD_ROWS, count), rows):
                part = slice(at, at + rows)
                logits = sum((x[part] @ w.t()).float() for x, w in cast)
                assert isinstance(logits, torch.Tensor)
                own = logits.gather(1, label[part].clamp(min=0)[:, None])[:, 0]
                hit[part] = (own >= logits.amax(1)) & (label[part] >= 0)
                log_q = torch.log_softmax(logits, 1)
                p = targets[index[part]].float()
                divergence = -(p * log_q).sum(1)  # up to the entropy of p, which nothing can change
                q = log_q.exp_()
                difference = q - p
                above = (difference > 0).float()
                variation = (difference * above).sum(1)
                overlap[part] = 1 - variation
                share = torch.exp(-KL_DECAY * (1 - variation))
                loss = share * divergence + (1 - share) * variation
                total += (loss * weight[part]).sum()
                # d KL / d logits = q - p; d TV / d logits = q (a - mean of a under q), where a = 1 if q > p else 0
                of_variation = above.mul_(q)
                of_variation -= q.mul_(of_variation.sum(1, keepdim=True))
                gradient = difference.mul_((share * weight[part])[:, None])
                gradient += of_variation.mul_(((1 - share) * weight[part])[:, None])
                gradient = gradient.to(dtype)
                for (_, w), grad in zip(cast, grads, strict=True):
                    grad[part] = gradient @ w
                if head_grad is not None:
                    kept.append(gradient)
            if head_grad is not None:
                head_grad += (torch.cat(kept).t() @ cast[-1][0][start : start + HEAD_ROWS]).to(head_grad.dtype)
        grads, overlap, hit = [grad[:real] for grad in grads], overlap[:real], hit[:real]
        ctx.save_for_backward(*grads, *([] if head_grad is None else [head_grad]))
        ctx.parts = frozen is not None, trained is not None
        ctx.dtypes = [x.dtype for x in (frozen, trained) if x is not None]
        ctx.mark_non_differentiable(overlap, hit)
        return total, overlap, hit

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients made by forward, times that of the loss."""
        saved = list(ctx.saved_tensors)
        dtypes = list(ctx.dtypes)
        of_frozen = (saved.pop(0) * grad_loss).to(dtypes.pop(0)) if ctx.parts[0] else None
        of_trained = (saved.pop(0) * grad_loss).to(dtypes.pop(0)) if ctx.parts[1] else None
        of_head = saved.pop(0) * grad_loss if saved else None
        return of_frozen, None, of_trained, of_head, None, None, None, None


class DraftNetwork(nn.Module):
    """A network that drafts step by step, with what it has of the target, which isn't trained.

    ``embedding``: [vocab_size, hidden_size]; ``target_head``: [draft vocabulary, hidden_size], the rows of the target's
    head; ``to_draft``: int64 [vocab_size], the ids of the draft vocabulary, -1 for tokens that it lacks. ``steps``: how
    many are trained; ``decay``: how much less each counts than the one before it; ``stray``: the share of drafts that
    go on after a miss.
    """

    embedding: torch.Tensor
    target_head: torch.Tensor
    to_draft: torch.Tensor

    def __init__(
        self,
        embedding: torch.Tensor,
        target_head: torch.Tensor,
        to_draft: torch.Tensor,
        steps: int,
        decay: float,
        stray: float,
    ) -> None:
        super().__init__()
        for name, tensor in (("embedding", embedding), ("target_head", target_head), ("to_draft", to_draft)):
            self.register_buffer(name, tensor, persistent=False)
        self.steps, self.decay, self.stray = steps, decay, stray

    def unroll(self, batch: Batch, steps: int) -> Steps:
        """Yield what each step of the drafts from every position says, where the text follows them.

        What is sent back, bool [n], says which rows go on; None: all. A row ends where the draft vocabulary lacks the
        token, or the text is over.
        """
        raise NotImplementedError

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        """Return the loss of a batch, the mean over its positions.

        A draft goes on where its token stands, since what comes after a miss changes nothing; and after a few misses,
        so that a network that hits little learns its later steps too. ``generator`` says which.
        """
        targets = self._targets(batch)
        total, first, index = torch.zeros((), device=batch.tokens.device), 0.0, 0
        steps = self.unroll(batch, self.steps)
        step: Step | None = next(steps)
        while step is not None:
            weight = (step.label >= 0).float() * (self.decay**index / batch.positions)
            value, overlap, hit = DraftLoss.apply(  # type: ignore[no-untyped-call]
                step.frozen, self.target_head, step.trained, step.head, targets, step.target, weight, step.label
            )
            total = total + value
            if step.score is not None:
                total = total + F.binary_cross_entropy_with_logits(step.score.float(), overlap, weight, reduction="sum")
            first = first if index else float(hit.float().mean())
            stray = torch.rand(len(hit), generator=generator).to(hit.device) < self.stray
            step, index = _following(steps, hit | stray), index + 1
        return Loss(total, first)

    @torch.no_grad()
    def replay(self, batch: Batch, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the network drafts along the texts, and how sure it is: two [examples, most positions, depth].

        bool: whether draft token d from a position is the text's, where those before it are; after a miss, False.
        float: the score of a network that says how likely its token stands, else 0.
        """
        most = int(batch.count.max())
        found = torch.zeros(len(batch.tokens) * most, depth, dtype=torch.bool, device=batch.tokens.device)
        scores = torch.zeros(found.shape, device=batch.tokens.device)
        steps = self.unroll(batch, min(depth, self.deepest))
        step: Step | None = next(steps)
        index = 0
        while step is not None:
            hit = torch.empty(len(step.rows), dtype=torch.bool, device=found.device)
            for at in range(0, len(hit), HEAD_ROWS):
                part = slice(at, at + HEAD_ROWS)
                hit[part] = self._logits(step, part).argmax(1) == step.label[part]
            found[step.rows, index] = hit
            if step.score is not None:
                scores[step.rows, index] = step.score.float()
            step, index = _following(steps, hit), index + 1
        shape = (len(batch.tokens), most, depth)
        return found.view(shape), scores.view(shape)

    @property
    def deepest(self) -> int:
        """The most steps that the network can take."""
        return 1000

    def _logits(self, step: Step, part: slice) -> torch.Tensor:
        dtype = self.target_head.dtype
        parts = ((step.frozen, self.target_head), (step.trained, step.head))
        found = sum((x[part].to(dtype) @ w.to(dtype).t()).float() for x, w in parts if x is not None and w is not None)
        assert isinstance(found, torch.Tensor)
        return found

    @torch.no_grad()
    def _targets(self, batch: Batch) -> torch.Tensor:
        """Return the target's distributions over the draft vocabulary, [examples * (most positions + steps), size].

        Row (i, r) is that of token r + 1 of example i's response, the first one being 0.
        """
        head = self.target_head
        most = int(batch.count.max())
        at = batch.first[:, None] + 1 + torch.arange(most + self.steps, device=batch.tokens.device)
        last = batch.states[:, :, -1]
        states = take(last, at.clamp(max=last.shape[1] - 1)).flatten(0, 1).to(head.dtype)
        found = torch.empty(len(states), len(head), dtype=head.dtype, device=head.device)
        rows = _at_a_time(head.device)
        for start in range(0, len(states), rows):
            i = min(start, max(0, len(states) - rows))  # always as many rows; see Linear
            found[i : i + rows] = (states[i : i + rows] @ head.t()).float().softmax(1)
        return found


def _at_a_time(device: torch.device) -> int:
    return LOSS_ROWS if device.type == "cpu" else HEAD_ROWS


def _following(steps: Steps, going: torch.Tensor) -> Step | None:
    """Return the next step of the rows that go on, None where none do."""
    try:
        return steps.send(going)
    except StopIteration:
        return None


class _Rows:
    """The positions of a batch that drafts still go on from: [examples, rows], padded.

    ``row``: the position, counted from the first that is drafted from; ``at``: the token whose states are the last
    known there; ``valid``: whether it is one, and no padding.
    """

    def __init__(self, batch: Batch, to_draft: torch.Tensor, steps: int) -> None:
        self._batch, self._to_draft, self._steps = batch, to_draft, steps
        self._most = int(batch.count.max())
        self.row = torch.arange(_padded(self._most), device=batch.tokens.device).expand(len(batch.tokens), -1)
        self.at = (batch.first[:, None] + self.row).clamp(max=batch.tokens.shape[1] - 2)
        self.valid = self.row < batch.count[:, None]
        self.flat = self.valid.flatten().nonzero()[:, 0]

    def token(self, ahead: int) -> torch.Tensor:
        """Return the text's tokens so far behind the last known states."""
        tokens = self._batch.tokens
        return tokens.gather(1, (self.at + ahead).clamp(max=tokens.shape[1] - 1))

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, ...] of [examples, rows, ...], without padding."""
        return x.flatten(0, 1)[self.flat]

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Return [examples, rows, ...] of [n, ...]."""
        whole = x.new_zeros(self.valid.numel(), *x.shape[1:])
        return whole.index_copy(0, self.flat, x).view(*self.valid.shape, *x.shape[1:])

    def step(self, index: int, **said: Any) -> Step:
        """Return a step of these rows."""
        example = torch.arange(len(self.row), device=self.row.device)[:, None].expand_as(self.row)
        return Step(
            rows=self.real(example * self._most + self.row),
            label=self._to_draft[self.real(self.token(index + 2))],
            target=self.real(example * (self._most + self._steps) + self.row + index),
            **said,
        )

    def keep(self, step: Step, index: int, going: torch.Tensor | None) -> torch.Tensor | None:
        """Keep the rows that go on after a step; return which: int64 [examples, rows left], None where none are."""
        go_on = step.label >= 0 if going is None else going & (step.label >= 0)
        self.valid = self.padded(go_on) & (self.row + index + 1 < self._batch.count[:, None])
        widest = int(self.valid.sum(1).max())
        if not widest:
            return None
        widest = min(_padded(widest), self.valid.shape[1])
        kept = self.valid.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :widest]
        self.row, self.at, self.valid = (x.gather(1, kept) for x in (self.row, self.at, self.valid))
        self.flat = self.valid.flatten().nonzero()[:, 0]
        return kept


@dataclass(frozen=True)
class LayerShape:
    """Dimensions of a drafter's decoder layer. ``frequencies``, ``rope_factor``: its rotary angles."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    frequencies: torch.Tensor
    rope_factor: float = 1.0


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm, float32."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Linear(nn.Linear):
    """A linear without a bias, which is given a few numbers of rows only.

    On a processor a kernel is compiled for every number of rows that is new, which costs more than to compute a few
    rows more.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., outputs] of [..., inputs]."""
        flat = x.reshape(-1, x.shape[-1])
        y = F.linear(F.pad(flat, (0, 0, 0, _rounded(len(flat)) - len(flat))), self.weight)
        return y[: len(flat)].view(*x.shape[:-1], -1)


def _padded(length: int) -> int:
    """Return a length that comes up more often, for attention; see Linear."""
    return -(-length // 16) * 16


def _rounded(rows: int) -> int:
    """Return the number of rows to compute for so many."""
    step = 64 if rows <= 1024 else 256
    return -(-rows // step) * step


class Attention(nn.Module):
    """Projections of attention, whose queries see keys of the text and of their own drafts."""

    def __init__(self, shape: LayerShape, inputs: int) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = Linear(inputs, shape.heads * shape.head_dim)
        self.k_proj = Linear(inputs, shape.kv_heads * shape.head_dim)
        self.v_proj = Linear(inputs, shape.kv_heads * shape.head_dim)
        self.o_proj = Linear(shape.heads * shape.head_dim, shape.hidden)

    def query(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return [examples, rows, heads, head_dim]."""
        return self._rotate(self._heads(self.q_proj(x)), positions)

    def key_value(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two [examples, rows, kv_heads, head_dim]."""
        return self._rotate(self._heads(self.k_proj(x)), positions), self._heads(self.v_proj(x))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.shape.head_dim)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, :, None].float() * self.shape.frequencies.to(x.device)
        cos, sin = (f(angles)[:, :, None] * self.shape.rope_factor for f in (torch.cos, torch.sin))
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    at: torch.Tensor,
    own: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Attend from rows to the keys up to ``at``, and to those of their own draft.

    ``q``: [examples, rows, heads, head_dim]; ``keys``, ``values``: [examples, length, kv_heads, head_dim]; ``at``:
    int64 [examples, rows]; ``own``: keys and values of each step so far, [examples, rows, kv_heads, head_dim]. Returns
    [examples, rows, heads * head_dim].
    """
    examples, rows, heads, head_dim = q.shape
    length, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    grouped = q.mul(1 / math.sqrt(head_dim)).view(examples, rows, kv_heads, group, head_dim)
    flat = grouped.permute(0, 2, 1, 3, 4).reshape(examples, kv_heads, -1, head_dim)  # rows, then heads of a group
    scores = (flat @ keys.permute(0, 2, 3, 1)).float().view(examples, kv_heads, rows, group, length)
    unseen = torch.arange(length, device=q.device) > at[:, :, None]
    scores = scores.masked_fill(unseen[:, None, :, None], -math.inf)
    if own:
        own_keys, own_values = (torch.stack([pair[i] for pair in own], 3).to(grouped.dtype) for i in (0, 1))
        extra = (grouped @ own_keys.transpose(3, 4)).float()  # [examples, rows, kv_heads, group, steps]
        scores = torch.cat([scores, extra.permute(0, 2, 1, 3, 4)], -1)
    weights = scores.softmax(-1).to(values.dtype)
    out = weights[..., :length].flatten(2, 3) @ values.transpose(1, 2)
    out = out.view(examples, kv_heads, rows, group, head_dim).permute(
        0, 2, 1, 3, 4
    )  # [examples, rows, kv_heads, group, head_dim]
    if own:
        out = out + weights[..., length:].permute(0, 2, 1, 3, 4) @ own_values
    return out.flatten(2)


def take(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return x[i, at[i, j]] as [i, j, ...]."""
    offset = torch.arange(len(x), device=x.device)[:, None] * x.shape[1]
    return x.flatten(0, 1)[(at + offset).flatten()].view(*at.shape, *x.shape[2:])


class GatedMLP(nn.Module):
    """The MLP of a layer of the Llama family."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden, shape.intermediate)
        self.up_proj = Linear(shape.hidden, shape.intermediate)
        self.down_proj = Linear(shape.intermediate, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, hidden_size]."""
        found: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class Layer(nn.Module):
    """A decoder layer; ``wide``: attention reads an embedding and a state side by side."""

    def __init__(self, shape: LayerShape, *, wide: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        if wide:
            self.hidden_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape, (1 + wide) * shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = GatedMLP(shape)

    def after(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the layer's output of what attention brought, [n, hidden_size]."""
        x = residual + self.self_attn.o_proj(attended)
        found: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class Eagle3(DraftNetwork):
    """EAGLE-3: one layer that reads the target's states at first, and its own outputs further on.

    The row of position t has the token t + 1 and the states of t, and drafts the token t + 2; at each further step it
    has the token behind that one, and its own output in place of the states. A step's attention sees the rows of the
    text up to t, and those of its own draft: what it sees when it drafts.
    """

    def __init__(self, shape: LayerShape, states: int, *, norm_before_residual: bool = True, **network: Any) -> None:
        super().__init__(**network)
        self.shape, self.norm_before_residual = shape, norm_before_residual
        self.fc = Linear(states * shape.hidden, shape.hidden)
        self.layers = nn.ModuleList([Layer(shape, wide=True)])
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)

    def unroll(self, batch: Batch, steps: int) -> Steps:
        """Yield each step; see DraftNetwork."""
        layer: Any = self.layers[0]
        rows = _Rows(batch, self.to_draft, self.steps)
        h = self.fc(batch.states[:, :, :-1].flatten(2).to(self.fc.weight.dtype))
        every = torch.arange(h.shape[1], device=h.device).expand(len(h), -1)
        x, residual = self._inputs(layer, batch.tokens[:, 1:], h)
        keys, values = layer.self_attn.key_value(x, every)
        x, residual = take(x, rows.at), take(residual, rows.at)
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index in range(steps):
            if index:
                x, residual = self._inputs(layer, rows.token(index + 1), h)
                own.append(layer.self_attn.key_value(x, rows.at + index))
            q = layer.self_attn.query(x, rows.at + index)
            attended = attend(q, keys, values, rows.at, own)
            out = layer.after(rows.real(residual), rows.real(attended))
            step = rows.step(index, frozen=self.norm(out))
            going = yield step
            h = rows.padded(out)
            kept = rows.keep(step, index, going)
            if kept is None:
                return
            h, own = take(h, kept), [(take(k, kept), take(v, kept)) for k, v in own]

    def _inputs(self, layer: Any, tokens: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what attention reads of rows, and their residual streams."""
        normed = layer.hidden_norm(h)
        x = torch.cat([layer.input_layernorm(F.embedding(tokens, self.embedding)), normed], -1)
        return x, normed if self.norm_before_residual else h

    @torch.no_grad()
    def start(
        self,
        layer: Mapping[str, torch.Tensor],
        norm: torch.Tensor | None,
        generator: torch.Generator,
        scale: float = 1.0,
    ) -> None:
        """Begin from the target's last layer, where shapes allow: it reads the last of the states as that layer does.

        ``scale``: how large those states are (root mean square). The residual stream begins at ``RESIDUAL`` times the
        norm of 1, and what attention and MLP add to it is scaled alike.
        """
        hidden = self.shape.hidden
        _randomise(self, generator)
        self.fc.weight[:, -hidden:] += torch.eye(hidden)
        own: Any = self.layers[0]
        _begin_layer(own, layer, hidden)
        own.input_layernorm.weight.fill_(1.0)
        if self.norm_before_residual:
            own.hidden_norm.weight.fill_(RESIDUAL)
            if "input_layernorm.weight" in layer:
                for projection in (own.self_attn.q_proj, own.self_attn.k_proj, own.self_attn.v_proj):
                    projection.weight[:, hidden:] *= layer["input_layernorm.weight"] / RESIDUAL
                for projection in (own.self_attn.o_proj, own.mlp.down_proj):
                    projection.weight *= RESIDUAL / scale
        elif "input_layernorm.weight" in layer:
            own.hidden_norm.weight.copy_(layer["input_layernorm.weight"])
        self.norm.weight.mul_(START_SCALE * (1.0 if norm is None else norm))


class Mlp(DraftNetwork):
    """IBM's MLP speculator with tied weights: a small recurrent network on what the target's head reads."""

    others: torch.Tensor

    def __init__(self, hidden: int, inner: int, n_predict: int, **network: Any) -> None:
        super().__init__(**network)
        self.hidden, self.inner, self.n_predict = hidden, inner, n_predict
        vocabulary = len(self.target_head)
        # Only tokens of the draft vocabulary get an embedding that is trained: others are rare, and many.
        self.known = nn.Parameter(torch.empty(vocabulary, inner))
        self.register_buffer("others", torch.empty(len(self.embedding), inner), persistent=False)
        self.first, self.further = Linear(hidden, inner), Linear(inner, inner)
        self.ln_weight, self.ln_bias = nn.Parameter(torch.ones(inner)), nn.Parameter(torch.zeros(inner))
        self.head = nn.Parameter(torch.empty(vocabulary, inner))
        state_weight = 0.5 ** (0.5 / n_predict)
        self._embedding_weight = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight

    @property
    def deepest(self) -> int:
        """The most steps that the network can take."""
        return self.n_predict

    def unroll(self, batch: Batch, steps: int) -> Steps:
        """Yield each step; see DraftNetwork."""
        rows = _Rows(batch, self.to_draft, self.steps)
        state = take(batch.states[:, :, -1], rows.at).to(self.head.dtype)
        for index in range(steps):
            token = rows.token(index + 1)
            known = self.to_draft[token]
            embedded = torch.where(
                (known >= 0)[..., None], F.embedding(known.clamp(min=0), self.known), F.embedding(token, self.others)
            )
            x = (self.further if index else self.first)(state).float() + self._embedding_weight * embedded
            x = F.rms_norm(x, (self.inner,), self.ln_weight, 1e-6) + self.ln_bias
            state = F.gelu(x)
            step = rows.step(index, trained=rows.real(state), head=self.head)
            going = yield step
            kept = rows.keep(step, index, going)
            if kept is None:
                return
            state = take(state, kept)

    @torch.no_grad()
    def start(self, generator: torch.Generator) -> None:
        """Begin with embeddings and a head that are the target's, seen at random angles."""
        turn = torch.randn(self.hidden, self.inner, generator=generator)
        turned = self.embedding.float() @ turn
        self.others.copy_(turned / turned.std() / math.sqrt(self.inner))
        draft = (self.to_draft >= 0).nonzero()[:, 0]
        self.known.copy_(self.others[draft])
        turned = self.target_head.float() @ turn
        self.head.copy_(turned / turned.std() * 0.02)
        for projection in (self.first, self.further):
            projection.weight.normal_(0, 1 / math.sqrt(projection.weight.shape[1]), generator=generator)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what is stored, by the names of :class:`sakiyomi.drafters.mlp.MlpConfig`."""
        table = self.others.clone()
        table[(self.to_draft >= 0).nonzero()[:, 0]] = self.known.detach()
        return {
            "emb.0.weight": table,
            "proj.0.weight": self.first.weight,
            "proj.1.weight": self.further.weight,
            "ln.0.weight": self.ln_weight,
            "ln.0.bias": self.ln_bias,
            "head.0.weight": self.head,
        }


class Block(DraftNetwork):
    """A block drafter: one layer, whose rows of one block are computed together.

    Row j of the block of position t stands at t + 1 + j and drafts the token t + 2 + j. Its attention sees the context
    up to t and the rows of the block up to itself.
    """

    def __init__(self, shape: LayerShape, states: int, *, block_size: int, rank: int = 64, **network: Any) -> None:
        super().__init__(**network)
        self.shape, self.block_size = shape, block_size
        vocabulary = len(self.target_head)
        self.fc = Linear(states * shape.hidden, shape.hidden)
        self.hidden_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mask_embedding = nn.Parameter(torch.zeros(shape.hidden))
        self.layers = nn.ModuleList([Layer(shape, wide=False)])
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        # W1 has a row for each token of the draft vocabulary, and one for all others.
        self.w1 = nn.Parameter(torch.empty(vocabulary + 1, rank))
        self.w2 = nn.Parameter(torch.empty(vocabulary, rank))
        self.confidence = nn.Linear(shape.hidden + rank, 1)

    @property
    def deepest(self) -> int:
        """The most steps that the network can take."""
        return self.block_size

    def unroll(self, batch: Batch, steps: int) -> Steps:
        """Yield each row of the blocks; see DraftNetwork."""
        layer: Any = self.layers[0]
        rows = _Rows(batch, self.to_draft, self.steps)
        h = self.hidden_norm(self.fc(batch.states[:, :, :-1].flatten(2).to(self.fc.weight.dtype)))
        every = torch.arange(h.shape[1], device=h.device).expand(len(h), -1)
        keys, values = layer.self_attn.key_value(h, every)
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index in range(steps):
            if index:
                residual = self.mask_embedding.expand(*rows.at.shape, -1)
            else:
                residual = F.embedding(rows.token(1), self.embedding).float()
            x = layer.input_layernorm(residual)
            positions = rows.at + 1 + index
            own.append(layer.self_attn.key_value(x, positions))
            q = layer.self_attn.query(x, positions)
            attended = attend(q, keys, values, rows.at, own)
            hidden = self.norm(layer.after(rows.real(residual), rows.real(attended)))
            before = self.to_draft[rows.real(rows.token(index + 1))]
            previous = F.embedding(torch.where(before < 0, len(self.w2), before), self.w1)
            score = self.confidence(torch.cat([hidden, previous], 1))[:, 0]
            step = rows.step(index, frozen=hidden, trained=previous, head=self.w2, score=score)
            going = yield step
            kept = rows.keep(step, index, going)
            if kept is None:
                return
            own = [(take(k, kept), take(v, kept)) for k, v in own]

    @torch.no_grad()
    def start(self, layer: Mapping[str, torch.Tensor], norm: torch.Tensor | None, generator: torch.Generator) -> None:
        """Begin from the target's last layer, where shapes allow."""
        hidden = self.shape.hidden
        _randomise(self, generator)
        self.fc.weight[:, -hidden:] += torch.eye(hidden)
        _begin_layer(self.layers[0], layer, hidden)
        if "input_layernorm.weight" in layer:
            self.hidden_norm.weight.copy_(layer["input_layernorm.weight"])
        self.mask_embedding.copy_(self.embedding.float().mean(0))
        self.norm.weight.mul_(START_SCALE * (1.0 if norm is None else norm))
        self.w2.zero_()
        self.confidence.weight.zero_()
        self.confidence.bias.zero_()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what is stored, by the names of :mod:`sakiyomi.drafters.block`."""
        own = ("fc.", "hidden_norm.", "mask_embedding", "layers.", "norm.", "confidence.bias")
        found = {name: tensor for name, tensor in self.state_dict().items() if name.startswith(own)}
        w1 = self.w1.detach()
        found["markov.w1"] = w1[torch.where(self.to_draft < 0, len(self.w2), self.to_draft)]
        found["markov.w2"] = self.w2.detach().t()
        found["confidence.weight"] = self.confidence.weight.detach()[0]
        return found


def _randomise(module: nn.Module, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.02, generator=generator)


def _begin_layer(own: nn.Module, layer: Mapping[str, torch.Tensor], hidden: int) -> None:
    """Copy a decoder layer of the target; of wider projections the part that reads states."""
    for name, parameter in own.named_parameters():
        if (given := layer.get(name)) is None:
            continue
        if parameter.dim() > 1 and parameter.shape[1] == 2 * hidden and name.startswith("self_attn"):
            of_states: torch.Tensor = parameter[:, hidden:]
        else:
            of_states = parameter
        if of_states.shape == given.shape:
            of_states.copy_(given)
