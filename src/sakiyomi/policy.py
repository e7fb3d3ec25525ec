"""How far to read ahead: a fixed number of tokens, or as many as pay.

The adaptive policy follows one rule: a draft token is worth checking if the chance that it becomes output is higher
than what its row of the target could bring otherwise, a > rate * seconds. The chance is the product of calibrated
acceptance (``acceptance.py``) along its path; seconds come from measured costs (``costs.py``). The rate, in tokens per
second, is the going rate of the sequence, or that of the round so far where it is higher: where the draft stood so
far, the next round would be as good a one, and bring the token too. A draft, chain or tree, is cut to its most valuable
part; between drafters the higher value wins; no draft is worth 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sakiyomi.acceptance import Acceptance, Odds
from sakiyomi.costs import ModelCosts
from sakiyomi.drafting import Source, chosen, depth, first_path
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Draft, GoOn, always

MOST = 32  # draft tokens in a round that the adaptive policy considers


@dataclass(frozen=True, slots=True)
class Checked:
    """What a round said about a draft.

    ``accepted``: indices of the draft tokens that stood, along one path. ``emitted``: tokens that became output; as
    many as were accepted where a stop cut the round at a draft token, else one more. ``rows``, ``context``: of the
    target's forward; ``seconds``: what it took, None where the sequence shared it with others.
    """

    draft: Draft
    accepted: tuple[int, ...]
    emitted: int
    rows: int
    context: int
    seconds: float | None


class PolicySession(Protocol):
    """A policy at work on one sequence."""

    def draft(self, left: int, context: int, rows: int) -> Draft:
        """Return what the target should check now, at most ``left`` tokens in a row.

        ``context``: tokens that the sequence holds. ``rows``: rows of the coming forward that are there anyway.
        """

    def observe(self, checked: Checked) -> None:
        """Take note of what came of it."""


class Policy(Protocol):
    """Decides how far to read ahead. One instance serves many sequences, and may learn from each."""

    def session(self, sources: Sequence[Source]) -> PolicySession:
        """Begin a sequence with these drafters."""


class FixedPolicy:
    """Always drafts ``num_speculative_tokens`` where there is a guess.

    Of several drafters without a model the one that is surest of itself drafts; one with a model where they have no
    guess. Of a draft with branches, the first path is taken. Raises OptionError below 1.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        if num_speculative_tokens < 1:
            raise OptionError(f"num_speculative_tokens={num_speculative_tokens}: must be at least 1 here")
        self.num_speculative_tokens = num_speculative_tokens

    def session(self, sources: Sequence[Source]) -> FixedSession:
        """Begin a sequence with these drafters."""
        return FixedSession(sources, self.num_speculative_tokens)


class FixedSession:
    """The fixed policy on one sequence."""

    def __init__(self, sources: Sequence[Source], count: int) -> None:
        self._sources, self._count = sources, count

    def draft(self, left: int, context: int, rows: int) -> Draft:
        """Return the surest draft, cut to the number of tokens."""
        count = min(self._count, left)
        best, most = Draft(), 0.0
        for source in sorted(self._sources, key=lambda each: each.costs is not None):
            if source.costs is not None and best:
                break
            draft = first_path(source.propose(count))
            if (total := sum(_survivals(draft, draft.confidences))) > most:
                best, most = draft, total
        return best

    def observe(self, checked: Checked) -> None:
        """Learn nothing."""


class AdaptivePolicy:
    """Drafts as many tokens as pay, from whichever drafter pays most; none where none does.

    ``costs``: of the target's forwards, corrected as rounds go by. What it learns of each drafter, by name, it keeps
    from sequence to sequence.
    """

    def __init__(self, costs: ModelCosts) -> None:
        self.costs = costs
        self.ledger = Ledger(allowance=4.0, tolerance=0.01)
        self._experiences: dict[str, Experience] = {}

    def session(self, sources: Sequence[Source]) -> AdaptiveSession:
        """Begin a sequence with these drafters."""
        return AdaptiveSession(
            self.costs,
            [_Member(each, self._experiences.setdefault(each.name, Experience())) for each in sources],
            (self.ledger, Ledger(allowance=2.0, tolerance=0.02)),
        )


class Experience:
    """What all sequences say about a drafter: its acceptance, and its time where no costs of a model tell it.

    ``call_s``: seconds of a proposal, None before the first; ``budget``: the most tokens that it was asked for.
    """

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.call_s: float | None = None
        self.budget = 2


class Ledger:
    """Time that reading ahead has lost: extra seconds, less the seconds of plain decoding that its tokens saved.

    More than ``tolerance`` of all time, and ``allowance`` plain tokens' time, is too much. Gains don't count for later.
    """

    def __init__(self, *, allowance: float, tolerance: float) -> None:
        self._allowance, self._tolerance = allowance, tolerance
        self._lost = self._elapsed = 0.0

    def add(self, elapsed: float, lost: float, plain_s: float) -> None:
        """Enter a round: its seconds without reading ahead, and what that lost; ``plain_s``: of a plain token."""
        self._elapsed += elapsed
        self._lost = max(self._lost + lost, -self._allowance * plain_s)

    def left(self, plain_s: float) -> float:
        """Return the seconds that may be lost now."""
        return self._allowance * plain_s + self._tolerance * self._elapsed - self._lost


class _Member:
    """A drafter at work on one sequence, and what is known of it."""

    def __init__(self, source: Source, experience: Experience) -> None:
        self.source, self.experience = source, experience
        self.odds = Odds()
        self.idle_s = 0.0  # decoding since its tokens were last put to a test
        self.failures = 0  # tests in a row in which no token stood
        self.promising = False  # all tokens of the last test stood

    def rate(self, confidence: float, position: int, alternative: bool) -> float:
        return self.odds.apply(self.experience.acceptance.rate(confidence, position, alternative))

    def average(self, position: int) -> float:
        return self.odds.apply(self.experience.acceptance.average(position))

    def may_probe(self, cost_s: float) -> bool:
        """Return whether a test that is expected to be in vain is affordable: at once after one that wasn't in vain."""
        return self.promising or self.idle_s * _PROBING * 0.5 ** min(self.failures, _LONGEST_WAIT) >= cost_s

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        experience = self.experience
        if self.source.costs is None:
            budget = min(budget, experience.budget)
        draft = self.source.propose(budget, go_on)
        seconds = self.source.seconds
        if experience.call_s is not None:  # the first call may load something
            seconds = experience.call_s + 0.2 * (min(seconds, 4 * experience.call_s) - experience.call_s)
        experience.call_s = seconds
        if self.source.costs is None and len(draft) >= budget == experience.budget < MOST:
            experience.budget *= 2  # unknown drafters are asked for little at first
        return draft


@dataclass(frozen=True, slots=True)
class _Plan:
    """The part of a draft worth checking, and what it is worth: tokens, beyond what its time would bring otherwise."""

    draft: Draft
    value: float


_NOTHING = _Plan(Draft(), 0.0)


class AdaptiveSession:
    """The adaptive policy on one sequence."""

    def __init__(self, costs: ModelCosts, members: Sequence[_Member], ledgers: Sequence[Ledger]) -> None:
        self._costs, self._members, self._ledgers = costs, members, ledgers
        self._rounds = 0
        self._tokens = self._units = 4.0  # of late, and the time of plain tokens they took
        self._since_plain = 0
        self._plain_rows, self._draft_s = 1, 0.0  # of this round

    def draft(self, left: int, context: int, rows: int) -> Draft:
        """Return the most valuable draft; an empty one where none is worth its time."""
        self._rounds += 1
        self._plain_rows, self._draft_s = rows, 0.0
        limit = min(left, MOST)
        plain_s = self._costs.seconds(1, context)
        if self._since_plain >= _ROUNDS_TO_PLAIN and self._tokens < _CLEARLY * self._units:
            return Draft()  # to see again what a plain token takes, where that may decide
        stake_s = min(ledger.left(plain_s) for ledger in self._ledgers)
        if limit < 1 or stake_s <= 0:
            return Draft()
        rate = max(1.0, self._tokens / self._units) / plain_s
        prices = _Prices(self._costs, context, rows, rate, stake_s)
        best, probe = _Plan(Draft(), _LEAST), Draft()
        costly = []
        for member in self._members:
            if not member.source.alive:
                continue
            if member.source.costs or prices.rate * (member.experience.call_s or 0.0) > _CHEAP:
                costly.append(member)
                continue
            draft = self._ask(member, limit)
            plan = _plan(draft, member, prices)
            if plan.value > best.value:
                best = plan
            elif draft and member.may_probe(prices.seconds(1)):
                probe = chosen(draft, [0])
        for member in costly if self._rounds > 1 else ():  # the first token shouldn't wait for a model to read
            times = _DraftTimes.of(member, context)
            if _outlook(member, times, prices, limit) > best.value:
                draft = self._ask(member, limit, _Stop(member, times, prices))
                times.correct(member.source, context, depth(draft))
                plan = _plan(draft, member, prices)
                if plan.value > best.value:
                    best = plan
            elif not best.draft and member.may_probe(times.once + times.first + prices.seconds(1)):
                probe = self._ask(member, 1)
        return best.draft or probe

    def _ask(self, member: _Member, budget: int, go_on: GoOn = always) -> Draft:
        draft = member.propose(budget, go_on)
        self._draft_s += member.source.seconds
        return draft

    def observe(self, checked: Checked) -> None:
        """Learn from the tokens that were tested, and enter the round in the ledgers."""
        costs, draft, context = self._costs, checked.draft, checked.context
        plain_s, elapsed = costs.seconds(1, context), costs.seconds(self._plain_rows, context)
        expected = costs.seconds(self._plain_rows + len(draft), context)
        lost = self._draft_s
        if draft:
            lost += expected - elapsed - max(0, checked.emitted - 1) * plain_s
        if checked.seconds is not None and self._rounds > 1:  # the first is of a prompt
            if draft:
                lost += min(checked.seconds, 2 * expected) - expected  # beyond, something else happened
            if draft.parents is None:
                costs.observe(checked.rows, context, checked.seconds)
        for ledger in self._ledgers:
            ledger.add(elapsed, lost, plain_s)
        self._since_plain = self._since_plain + 1 if draft else 0
        if self._rounds > 1:
            self._tokens = self._tokens * _RECENT + checked.emitted
            self._units = self._units * _RECENT + (expected + self._draft_s) / plain_s
        for member in self._members:
            member.idle_s += elapsed
            if draft and member.source.name == draft.drafter:
                _learn(member, checked)


_MARGIN = 1.05  # estimates are noisy, and what is chosen looks better than it is
_LEAST = 0.02  # a draft worth fewer tokens isn't checked: estimates are no better
_CHEAP = 0.02  # a drafter whose proposals take less than the time of so many tokens is asked in every round
_RECENT = 0.95
_PROBING = 0.01  # of the time goes to tests of drafters that don't seem to pay
_LONGEST_WAIT = 2  # failures after which tests don't become rarer, each making them half as frequent
_ROUNDS_TO_PLAIN = 24
_CLEARLY = 1.5  # times plain decoding: beyond, errors don't matter
_HORIZON = 64  # tokens over which what a model must read first has to pay


class _Prices:
    """What draft tokens have to bring.

    ``rate``: the going rate, in tokens per second. ``stake_s``: seconds that the round may lose if no token stands.
    """

    def __init__(self, costs: ModelCosts, context: int, rows: int, rate: float, stake_s: float) -> None:
        self._costs, self._context, self._rows = costs, context, rows
        self.rate, self.stake_s = rate, stake_s
        self._plain = costs.seconds(rows, context)
        self.one_s = costs.seconds(1, context)
        self.branch_s = costs.branch_s

    def seconds(self, count: int) -> float:
        """Return the seconds that ``count`` draft tokens add to a round."""
        return self._costs.seconds(self._rows + count, self._context) - self._plain

    def price(self, seconds: float, tokens: float, spent: float) -> float:
        """Return the tokens that so many seconds should bring in a round of so many tokens and seconds till then."""
        return _MARGIN * seconds * max(self.rate, tokens / (self.one_s + spent))


@dataclass(frozen=True, slots=True)
class _DraftTimes:
    """Seconds of a costly drafter: of its first token, of each next one, and once to read what it hasn't read."""

    first: float
    next: float
    once: float

    @classmethod
    def of(cls, member: _Member, context: int) -> _DraftTimes:
        costs = member.source.costs
        if costs is None:
            one = (member.experience.call_s or 0.0) / member.experience.budget
            return cls(one, one, 0.0)
        unread = member.source.unread
        first = costs.seconds(max(1, min(unread, 2)), context)
        return cls(first, costs.seconds(1, context), costs.seconds(max(1, unread), context) - first)

    def correct(self, source: Source, context: int, forwards: int) -> None:
        """Tell a model's costs what so many forwards took, the first of which read what was unread."""
        if source.costs and forwards:
            factor = source.seconds / (self.once + self.first + (forwards - 1) * self.next)
            source.costs.observe(1, context, factor * self.next)


def _outlook(member: _Member, times: _DraftTimes, prices: _Prices, limit: int) -> float:
    """Return the value to expect of asking a costly drafter, before anything is known of its draft."""
    survival, tokens, spent = 1.0, 1.0, 0.0
    value = best = -prices.rate * times.once / max(1.0, min(limit, _HORIZON) / 2)
    for count in range(1, limit + 1):
        survival *= member.average(count)
        seconds = (times.next if count > 1 else times.first) + prices.seconds(count) - prices.seconds(count - 1)
        value += survival - prices.price(seconds, tokens, spent)
        tokens += survival
        spent += seconds
        if spent > prices.stake_s:
            break
        best = max(best, value)
    return best


class _Stop:
    """Tells a costly drafter to go on while its next token can be expected to pay."""

    def __init__(self, member: _Member, times: _DraftTimes, prices: _Prices) -> None:
        self._member, self._times, self._prices = member, times, prices
        self._survival, self._count = 1.0, 0
        self._tokens, self._spent = 1.0, times.first + prices.seconds(1)

    def __call__(self, confidence: float) -> bool:
        self._count += 1
        self._survival *= self._member.rate(confidence, self._count, False)
        self._tokens += self._survival
        expected = self._survival * self._member.average(self._count + 1)
        seconds = self._times.next + self._prices.seconds(self._count + 1) - self._prices.seconds(self._count)
        pays = expected > self._prices.price(seconds, self._tokens, self._spent)
        self._spent += seconds
        return pays and self._spent <= self._prices.stake_s


def _plan(draft: Draft, member: _Member, prices: _Prices) -> _Plan:
    """Return the most valuable part of a draft."""
    parents = draft.parents
    if parents is None:
        rates = [member.rate(confidence, i, False) for i, confidence in enumerate(draft.confidences, start=1)]
    else:
        rates = []
        positions: list[int] = []
        seen: set[int] = set()
        for parent, confidence in zip(parents, draft.confidences, strict=True):
            positions.append(1 if parent < 0 else positions[parent] + 1)
            rates.append(member.rate(confidence, positions[-1], parent in seen))
            seen.add(parent)
    survivals = _survivals(draft, rates)
    order = _likeliest(survivals)
    value, best, count = 0.0, 0.0, 0
    tokens, spent = 1.0, 0.0  # of the round so far: the target's own token is sure
    branched = parents is None
    grown: set[int] = set()
    for size, i in enumerate(order, start=1):
        after = prices.seconds(size)
        if parents is not None and not branched:
            branched = parents[i] in grown
            grown.add(parents[i])
        if parents is not None and branched:
            after += prices.branch_s
        if after > prices.stake_s:
            break
        value += survivals[i] - prices.price(after - spent, tokens, spent)
        tokens += survivals[i]
        spent = after
        if value > best:
            best, count = value, size
        elif value + survivals[i] * (len(order) - size) <= best:
            break  # the rest could not make up for it if it were free
    return _Plan(chosen(draft, sorted(order[:count])), best)


def _learn(member: _Member, checked: Checked) -> None:
    """Learn from every draft token whose parent stood: it was compared with the target's own."""
    draft, acceptance = checked.draft, member.experience.acceptance
    depths = {-1: 0, **{index: place for place, index in enumerate(checked.accepted, start=1)}}
    if checked.accepted and checked.emitted == len(checked.accepted):
        del depths[checked.accepted[-1]]  # a stop: what would follow wasn't tested
    stood = set(checked.accepted)
    seen: set[int] = set()
    for i, confidence in enumerate(draft.confidences):
        parent = i - 1 if draft.parents is None else draft.parents[i]
        if parent not in depths:
            continue
        position, alternative = depths[parent] + 1, parent in seen
        seen.add(parent)
        member.odds.learn(acceptance.rate(confidence, position, alternative), i in stood)
        acceptance.learn(confidence, position, alternative, i in stood)
    member.idle_s = 0.0
    member.promising = bool(stood) and len(stood) == depth(draft)
    member.failures = 0 if stood else member.failures + 1


def _survivals(draft: Draft, rates: Sequence[float]) -> list[float]:
    """Return for each token the probability that it and all before it on its path stand."""
    survivals: list[float] = []
    for i, rate in enumerate(rates):
        parent = i - 1 if draft.parents is None else draft.parents[i]
        survivals.append(rate if parent < 0 else survivals[parent] * rate)
    return survivals


def _likeliest(survivals: Sequence[float]) -> list[int]:
    """Return indices, likeliest first; among equals parents come before children."""
    return sorted(range(len(survivals)), key=lambda i: -survivals[i])
