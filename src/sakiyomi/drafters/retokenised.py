"""Drafting with a model that has another tokenizer than the target's (2502.05202).

Two ways. *common*: draft in the tokens that both have, each drawn from the draft model's logits for them. *text*: draft
text, and propose its tokens in the target's tokenizer. In both, the draft model reads the target's tokens as text in
its own tokens.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np
import torch

from sakiyomi.distribution import Ids
from sakiyomi.drafters.model import LEAST, DraftModel, ModelDrafter, ModelSession, Reader, likely
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Costs, Draft, GoOn, Target, always
from sakiyomi.sampling import Row, SamplingParams, draft_seed
from sakiyomi.text import Tokenizer

_CUT_SHORT = 0.8  # how often (measured) a last token stands that text which isn't drafted yet might make longer
_UNKNOWN = "\ufffd"  # what an unfinished character is decoded to


def vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the tokens with their ids, spelled so that they compare between tokenizers.

    The spelling is that of byte-level BPE (a character for each byte); SentencePiece's is converted to it. Other kinds,
    and added tokens, are left as they are.
    """
    fast = tokenizer.fast
    spelled: dict[str, int] = fast.get_vocab(with_added_tokens=True)
    decoder = fast.decoder.__getstate__() if fast.decoder else b""
    if b'"ByteFallback"' not in decoder and b'"Metaspace"' not in decoder:
        return spelled
    added = {token.content for token in fast.get_added_tokens_decoder().values()}
    return {token if token in added else _byte_level(token): id for token, id in spelled.items()}


def _byte_level(token: str) -> str:
    """Return how byte-level BPE spells a token of SentencePiece."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return _CHARACTERS[int(token[3:5], 16)]
    return "".join(_CHARACTERS[byte] for byte in token.replace("\u2581", " ").encode())


def _characters() -> list[str]:
    """Return the character that byte-level BPE (GPT-2's) has for each byte: itself where it can be printed."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


_CHARACTERS = _characters()


def common_tokens(target: Tokenizer, draft: Tokenizer) -> tuple[Ids, Ids]:
    """Return the ids of the tokens that both have, in the target's tokenizer (ascending) and in the draft model's."""
    ours, theirs = vocabulary(target), vocabulary(draft)
    both = sorted((id, theirs[token]) for token, id in ours.items() if token in theirs)
    pairs = np.array(both, dtype=np.int64).reshape(-1, 2)
    return np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])


class Retold:
    """A sequence of the target's tokens as text, and the text as tokens of the draft model.

    ``ids``: the draft model's. ``recent``: the last target tokens whose text that is. ``pending``: target tokens after
    them that end inside a character, whose text is held back until it is complete. Text that follows may join with the
    last tokens of the draft tokenizer, so these stay open: they are encoded again with it, and only what is further
    back is settled.
    """

    _OPEN = 16  # tokens that stay open, at least
    _UNFINISHED = 3  # most bytes, so most tokens, of an unfinished character
    _CONTEXT = 8  # tokens that text is encoded after

    def __init__(self, target: Tokenizer, draft: Tokenizer, prompt: Sequence[int]) -> None:
        self._target, self._draft = target, draft
        self.ids = draft.encode("")  # what the draft model wants before a text
        self.recent: list[int] = []
        self.pending: list[int] = []
        self._settled = len(self.ids)
        self._open = ""  # the text of the ids from there on
        self._seen = ""  # the text of ``recent``
        first = target.encode("")  # and what the target has there is not text
        self.push(prompt[len(first) :] if list(prompt[: len(first)]) == first else prompt)

    def push(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that the sequence gained."""
        self.pending.extend(tokens)
        for cut in range(min(self._UNFINISHED, len(self.pending)) + 1):
            whole = len(self.pending) - cut
            text = self.decode([*self.recent, *self.pending[:whole]])
            if not text.endswith(_UNKNOWN):
                break
        else:  # bytes that aren't text
            whole = len(self.pending)
            text = self.decode([*self.recent, *self.pending])
        new = text[len(self._seen) :]
        self.recent.extend(self.pending[:whole])
        self.pending, self._seen = self.pending[whole:], text
        if len(self.recent) > 4 * self._OPEN:
            self.recent = self.recent[-self._OPEN :]
            self._seen = self.decode(self.recent)
        if new:
            self._open += new
            self.ids[self._settled :] = self._draft.encode(self._open, special=False)
            self._settle()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of target tokens, special ones as they are spelled."""
        return self._target.decode(ids, special=True)

    def drafted(self, tokens: Sequence[int]) -> str:
        """Return the text that these draft tokens add, without an unfinished character at its end."""
        window = self.ids[self._settled :]
        before = self._draft.decode(window, special=True)
        return self._draft.decode([*window, *tokens], special=True)[len(before) :].rstrip(_UNKNOWN)

    def in_target(self, text: str) -> tuple[list[int], list[int]]:
        """Return ``(context, tokens)``: the target tokens of text that follows, and the ones they were encoded after.

        The longest context that the tokenizer gives back as it is: some tokens of the target aren't what its tokenizer
        makes of their text, and the text may go on in the middle of a word. No tokens where there is none.
        """
        written = [*self.recent, *self.pending]
        for count in range(min(self._CONTEXT, len(self.recent)) + len(self.pending), max(0, len(self.pending) - 1), -1):
            context = written[len(written) - count :]
            before = self.decode(context[: count - len(self.pending)])
            ids = self._target.encode(before + text, special=False)
            if ids[:count] == context:
                return context, ids[count:]
        return [], [] if self.pending else self._target.encode(text, special=False)

    def _settle(self) -> None:
        """Settle draft tokens that text to come can't change, where the others are encoded alike without them."""
        ids = self.ids[self._settled :]
        if len(ids) <= 2 * self._OPEN:
            return
        for count in range(len(ids) - self._OPEN, len(ids) - self._OPEN - self._UNFINISHED - 1, -1):
            rest = self._open[len(self._draft.decode(ids[:count], special=True)) :]
            if self._draft.encode(rest, special=False) == ids[count:]:
                self._settled += count
                self._open = rest
                return


class CommonDrafter(ModelDrafter):
    """Drafts in the tokens that the target's tokenizer and the draft model's have in common.

    See :class:`ModelDrafter`; ``tokenizer`` is the draft model's. A token that the draft model would write and the
    target doesn't have is never proposed: its probability is missing from the confidences of the others.
    Raises OptionError where there are no common tokens.
    """

    way = "common"

    def __init__(
        self,
        model: Target,
        tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        vocab_size: int,
        *,
        costs: Costs | None = None,
        branches: int = 2,
    ) -> None:
        super().__init__(model, vocab_size, costs=costs, branches=branches, eos_ids=target_tokenizer.eos_ids)
        self.tokenizer, self.target_tokenizer = tokenizer, target_tokenizer
        ours, theirs = common_tokens(target_tokenizer, tokenizer)
        fits = (ours < vocab_size) & (theirs < model.vocab_size)
        self.in_target, self.in_draft = ours[fits], theirs[fits]
        if not self.in_target.size:
            raise OptionError(
                "draft_model: way='common' can't work: the tokenizers have no tokens in common; 'text' may"
            )
        self.draft_id: dict[int, int] = dict(zip(self.in_target.tolist(), self.in_draft.tolist(), strict=True))

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> CommonSession:
        """Begin a sequence with these token ids of the target."""
        return CommonSession(self, prompt, params, sampled)


class CommonSession(ModelSession):
    """A draft model with another tokenizer beside one sequence, drafting in common tokens."""

    def __init__(self, drafter: CommonDrafter, prompt: Sequence[int], params: SamplingParams, sampled: bool) -> None:
        super().__init__(drafter, prompt, params, sampled)
        self._common = drafter
        self._retold = Retold(drafter.target_tokenizer, drafter.tokenizer, prompt)
        self._retell()

    def observe(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that the sequence gained."""
        super().observe(tokens)
        self._retold.push(tokens)
        self._retell()

    def _retell(self) -> None:
        pending = [self._common.draft_id.get(token) for token in self._retold.pending]
        self._ids = [*self._retold.ids, *(id for id in pending if id is not None)]

    def _in_target(self, logits: Row) -> tuple[Row, float]:
        drafter = self._common
        row = np.full(drafter.vocab_size, -np.inf, np.float32)
        row[drafter.in_target] = common = logits[drafter.in_draft]
        all_of_it, of_common = (torch.from_numpy(z).logsumexp(0).item() for z in (logits, common))
        return row, min(1.0, math.exp(of_common - all_of_it)) if np.isfinite(of_common) else 0.0

    def _in_draft(self, token: int) -> int | None:
        return self._common.draft_id.get(token)  # a processor may have made another token possible


class TextDrafter(DraftModel):
    """Drafts text and proposes its tokens in the target's tokenizer.

    ``tokenizer`` is the draft model's; ``vocab_size`` the target's. Where the target samples, a draft token that is
    also a token of the target is drawn with that one's noise, at the position that it would have. Chat markup of the
    target is read as it is spelled: to leave it out of the text made drafts worse.
    """

    way = "text"
    samples = False  # of text that was encoded again the distribution isn't known

    def __init__(
        self,
        model: Target,
        tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        vocab_size: int,
        *,
        costs: Costs | None = None,
    ) -> None:
        super().__init__(model, costs, target_tokenizer.eos_ids)
        self.tokenizer, self.target_tokenizer, self.vocab_size = tokenizer, target_tokenizer, vocab_size
        ours, theirs = common_tokens(target_tokenizer, tokenizer)
        fits = theirs < model.vocab_size
        self.names = vocab_size + np.arange(model.vocab_size)  # of the draft model's tokens, for the noise
        self.names[theirs[fits]] = ours[fits]
        special = {id for id, token in tokenizer.fast.get_added_tokens_decoder().items() if token.special}
        self.foreign = frozenset(special.difference(theirs.tolist()))
        """Ids of the draft model that end a draft: markup that is nothing but letters to the target."""

    def session(self, prompt: Sequence[int], params: SamplingParams, sampled: bool = False) -> TextSession:
        """Begin a sequence with these token ids of the target."""
        return TextSession(self, prompt, params, sampled)


class TextSession:
    """A draft model with another tokenizer beside one sequence, drafting text."""

    def __init__(self, drafter: TextDrafter, prompt: Sequence[int], params: SamplingParams, own_noise: bool) -> None:
        self._drafter, self._params, self._own_noise = drafter, params, own_noise
        self._reader = Reader(drafter)
        self._ends = drafter.ends(params)
        self._retold = Retold(drafter.target_tokenizer, drafter.tokenizer, prompt)
        self._length = len(prompt)  # in the target's tokens

    @property
    def unread(self) -> int:
        """Rows that the draft model must compute before it can draft."""
        return self._reader.unread(self._retold.ids)

    def observe(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that the sequence gained."""
        self._retold.push(tokens)
        self._length += len(tokens)

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        """Return the target tokens of the text that the draft model would write, at most ``budget``.

        ``go_on`` is asked after each token of the draft model, with its confidence. An error of the model is raised
        and leaves the session as it was.
        """
        retold, reader = self._retold, self._reader
        drafted: list[int] = []
        reached: list[tuple[int, float]] = []  # per draft token: characters so far, and the odds that all of it stands
        survival, text = 1.0, ""
        context: list[int] = []
        tokens: list[int] = []
        ended = False
        seed = self._params.seed
        if self._own_noise:
            seed = draft_seed(seed, self._length)
        for step in range(min(2 * budget, reader.room(retold.ids))):
            logits = reader.append(drafted[-1]) if step else reader.read(retold.ids)
            choice = likely(logits, self._drafter.names, self._params, seed, self._length + len(tokens))
            if not choice:
                break
            ((token, confidence),) = choice
            if token in self._drafter.foreign:
                ended = True
                break
            drafted.append(token)
            survival = max(survival * confidence, sys.float_info.min)
            text = retold.drafted(drafted)
            reached.append((len(text), survival))
            context, tokens = retold.in_target(text)
            go = go_on(confidence)
            ended = any(each in self._ends for each in tokens)
            if ended or len(tokens) >= budget or not go:
                break
        return self._draft(context, tokens, budget, reached, ended)

    def _draft(
        self, context: list[int], tokens: list[int], budget: int, reached: list[tuple[int, float]], ended: bool
    ) -> Draft:
        """Return the draft of ``tokens``, which were encoded after ``context``, with their confidences.

        A token is as likely to stand as the draft tokens whose text it needs, given those that the token before needs.
        """
        retold = self._retold
        start = len(retold.decode(context[: len(context) - len(retold.pending)]))
        confidences: list[float] = []
        before = 1.0
        for count, token in enumerate(tokens[:budget], 1):
            if token >= self._drafter.vocab_size:
                break
            written = retold.decode([*context, *tokens[:count]])
            whole = written.rstrip(_UNKNOWN)
            end = len(whole) - start + (whole != written)  # half a character needs the whole one to be right
            after = next((odds for characters, odds in reached if characters >= end), reached[-1][1])
            last = count == len(tokens) and not ended
            confidences.append(min(1.0, max(after / before * (_CUT_SHORT if last else 1.0), LEAST)))
            before = after
        return Draft(tuple(tokens[: len(confidences)]), None, tuple(confidences), self._drafter.name)
