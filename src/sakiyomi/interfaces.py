"""The seams of the engine: what flows between target, drafter and verification.

Rows and positions. A *row* is one token that a forward pass computes. Rows of one call are numbered from 0
in the order given; a row's *parent* is the row before it on its path, or -1 where it continues what the
sequence already holds. In a chain, row i has the parent i - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

if TYPE_CHECKING:
    from sakiyomi.distribution import Distribution
    from sakiyomi.sampling import SamplingParams

Exactness = Literal["bit-exact", "numerics"]
Verification = Literal["coupled", "rejection", "block"]
HEAD_INPUT = -1  # the layer whose states are what the head makes logits of: the last one's, normalised


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed to follow what a sequence holds.

    ``parents[i] < i`` is the index of the draft token before token i, -1 for a first token; None for a chain.
    ``confidences``, one per token, are in (0, 1]: how likely it is, to the drafter, that the token stands if those
    before it on its path do. ``distributions``, one per token, are those that the tokens were really drawn from, given
    what was drawn before them; None where nothing is claimed, and each token is taken as it is. Of such a sample no
    token may be left out because of what it is: keep it, then stop.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    confidences: tuple[float, ...] = ()
    drafter: str = ""
    distributions: tuple[Distribution, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a target forward: rows to append, and the rows whose logits are wanted.

    ``parents[i] < i`` is the row before row i, -1 for the end of the sequence; None for a chain.
    Logits are computed for the last ``logit_rows`` rows.
    """

    sequence: TargetSequence
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    logit_rows: int = 1


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What a target forward gives for one :class:`Work`.

    ``logits``: [logit_rows, vocab_size], float32 or the target's dtype. ``hidden``: one [rows, hidden_size] tensor per
    requested layer, where layer 0 is the embedding, layer i the residual stream after i decoder layers, and layer
    HEAD_INPUT what the head makes logits of. All are inference tensors: clone them before you train on them.
    """

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


class TargetSequence(Protocol):
    """The target's memory (K/V) of one sequence."""

    @property
    def length(self) -> int:
        """Number of tokens held."""

    def truncate(self, length: int) -> None:
        """Forget every token from ``length`` on."""

    def keep(self, length: int, rows: Sequence[int]) -> None:
        """After a forward that began at ``length``: keep these of its rows (ascending), forget the others."""


class Target(Protocol):
    """The model whose text is wanted."""

    @property
    def vocab_size(self) -> int:
        """Number of logits per row."""

    @property
    def context_length(self) -> int:
        """Most tokens that a sequence can hold."""

    @property
    def max_rows(self) -> int:
        """Most rows per sequence that one forward should be given."""

    @property
    def exactness(self) -> Exactness:
        """``bit-exact`` if a row's bits were found not to depend on the other rows of a forward, as things are now."""

    @property
    def hidden_layers(self) -> Collection[int]:
        """The layers whose states a forward can give, see :class:`TargetOutput`; none where it can't."""

    def new_sequence(self) -> TargetSequence:
        """Return an empty sequence."""

    def forward(self, work: Sequence[Work], *, hidden_layers: Sequence[int] = ()) -> list[TargetOutput]:
        """Append the rows of every work to its sequence and compute them in one pass."""


GoOn = Callable[[float], bool]
"""Asked by a drafter that pays for every token, with the confidence of the one just drafted: is another worth it?"""


def always(confidence: float) -> bool:
    """Go on, whatever the confidence."""
    return True


class Costs(Protocol):
    """What a forward of a model costs."""

    def seconds(self, rows: int, context: int) -> float:
        """Return the seconds of a forward of so many rows of a sequence that holds ``context`` tokens."""

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """Take note of what a forward took."""


class DraftSession(Protocol):
    """A drafter's state for one sequence."""

    @property
    def unread(self) -> int:
        """Tokens that the drafter's model must compute before it can draft; 0 for a drafter without a model."""

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        """Propose what follows the tokens observed, at most ``budget`` in a row; nothing where there is no guess.

        A drafter each of whose tokens costs something asks ``go_on`` after each, of the path of its choices, and stops
        where the answer is no: after that token, not before it. Of a sample, whatever goes wrong after a token was
        drawn, what was drawn must be returned.
        """

    def observe(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that the sequence gained for good."""


class Drafter(Protocol):
    """Proposes what comes next. One instance serves many sequences, each with a session of its own."""

    @property
    def name(self) -> str:
        """The name in options, records and output."""

    @property
    def costs(self) -> Costs | None:
        """What its model costs; None for a drafter without one, whose drafts are nearly free."""

    @property
    def samples(self) -> bool:
        """Whether its drafts are samples, with their distributions, where that is asked for."""

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool) -> DraftSession:
        """Begin a sequence with these token ids, whose tokens the target will choose by ``params``.

        ``sampled``: how a draft token that is drawn at random must be drawn. False: with the target's own noise for its
        position, so that it is likely to be the target's choice. True, only where one of the sequence's drafters
        samples: with noise of the drafter's own, and by one that samples with its distribution.
        """


class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads the target's hidden states."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The layers whose states its sessions are given; see :class:`TargetOutput`."""

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool) -> FeatureSession:
        """Begin a sequence; see :class:`Drafter`."""


class FeatureSession(DraftSession, Protocol):
    """The state of a drafter that reads hidden states, for one sequence.

    When a draft is wanted, it has been given the states of every token of the sequence but the last, which the target
    hasn't computed yet; before the first round, of none.
    """

    def read(self, hidden: Sequence[torch.Tensor]) -> None:
        """Take the states of the tokens that follow those it has states of: [tokens, hidden_size] for each layer.

        They are the target's: of its dtype, on its device, perhaps inference tensors, and perhaps views of all rows of
        a forward, which stay in memory as long as they are kept.
        """


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What one round did for one sequence. Times are seconds of wall clock, shared by the sequences of the round.

    ``drafted`` tokens were checked, ``accepted`` of them stood (along one path), ``emitted`` tokens became
    output (fewer than accepted + 1 where a stop cut the round). ``rows`` is the number of rows in the target's
    forward for this sequence, ``context`` the tokens it held before. ``depth`` is the longest drafted path.
    ``errors``: of drafters that failed in this round and are left out from then on.
    """

    drafter: str
    drafted: int
    depth: int
    accepted: int
    emitted: int
    rows: int
    context: int
    draft_s: float
    target_s: float
    verify_s: float
    total_s: float
    errors: tuple[str, ...] = ()
