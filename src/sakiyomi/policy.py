"""How far to read ahead: a fixed number of tokens, or as many as pay.

The adaptive policy follows one rule: a draft token is worth checking if the chance that it becomes output is higher
than what its row of the target could bring otherwise, a > rate * seconds. The chance is the product of calibrated
acceptance (``acceptance.py``) along its path; seconds come from measured costs (``costs.py``). The rate, in tokens per
second, is the going rate of the sequence, or that of the round so far where it is higher: where the draft stood so
far, the next round would be as good a one, and bring the token too. A draft, chain or tree, is cut to its most valuable
part; the drafts of several drafters are one tree, in which what they agree on is checked once; no draft is worth 0.
A draft that is a sample is checked whole and alone.

Whatever was proposed is compared with what the target wrote, whether it was checked or not: the target's text does not
depend on it.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from sakiyomi.acceptance import Acceptance, Odds, cell
from sakiyomi.costs import ModelCosts
from sakiyomi.drafting import Source, depth, first_path, renumbered
from sakiyomi.errors import OptionError
from sakiyomi.interfaces import Draft, GoOn, always

MOST = 32  # draft tokens in a round that the adaptive policy considers


@dataclass(frozen=True, slots=True)
class Checked:
    """What a round said about a draft.

    ``accepted``: indices of the draft tokens that stood, along one path. ``tokens``: those that became output; as
    many as were accepted where a stop cut the round at a draft token, else one more. ``rows``, ``context``: of the
    target's forward; ``seconds``: what it took, None where the sequence shared it with others.
    """

    draft: Draft
    accepted: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: int
    context: int
    seconds: float | None


class PolicySession(Protocol):
    """A policy at work on one sequence."""

    def draft(self, left: int, context: int, rows: int, sequences: int) -> Draft:
        """Return what the target should check now, at most ``left`` tokens in a row; that may be 0.

        ``context``: tokens that the sequence holds. ``rows``: rows of the coming forward that are there anyway.
        ``sequences``: how many share it.
        """

    def observe(self, checked: Checked) -> None:
        """Take note of what came of it."""


class Policy(Protocol):
    """Decides how far to read ahead. One instance serves many sequences, and may learn from each."""

    def session(self, sources: Sequence[Source]) -> PolicySession:
        """Begin a sequence with these drafters."""


class FixedPolicy:
    """Always drafts ``num_speculative_tokens`` where there is a guess.

    Of several drafters without a model the one that is surest of itself drafts; one with a model, or one that samples,
    where they have no guess. Of a draft with branches, the first path is taken. Raises OptionError below 1.
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
        self._sources = sorted(sources, key=lambda each: (each.sampled, each.costs is not None))
        self._count = count

    def draft(self, left: int, context: int, rows: int, sequences: int) -> Draft:
        """Return the surest draft."""
        count = min(self._count, left)
        if count < 1:
            return Draft()
        best, most = Draft(), 0.0
        for source in self._sources:
            if best.tokens and (source.sampled or source.costs is not None):
                break
            draft = first_path(source.propose(count))
            if draft.tokens and (source.sampled or len(self._sources) == 1):
                return draft
            if (total := sum(_survivals(draft, draft.confidences))) > most:
                best, most = draft, total
        return best

    def observe(self, checked: Checked) -> None:
        """Learn nothing."""


class AtMost:
    """Another policy that may draft at most ``most`` tokens in a row."""

    def __init__(self, policy: Policy, most: int) -> None:
        self._policy, self._most = policy, most

    def session(self, sources: Sequence[Source]) -> PolicySession:
        """Begin a sequence with these drafters."""
        return _AtMostSession(self._policy.session(sources), self._most)


@dataclass(frozen=True, slots=True)
class _AtMostSession:
    session: PolicySession
    most: int

    def draft(self, left: int, context: int, rows: int, sequences: int) -> Draft:
        return self.session.draft(min(left, self.most), context, rows, sequences)

    def observe(self, checked: Checked) -> None:
        self.session.observe(checked)


class AdaptivePolicy:
    """Checks as many as pay of the tokens that its drafters propose together; none where none do.

    ``costs``: of the target's forwards, corrected as rounds go by. What it learns of each drafter, by name, it keeps
    from sequence to sequence.
    """

    def __init__(self, costs: ModelCosts) -> None:
        self.costs = costs
        self.ledger = Ledger(allowance=8.0, tolerance=0.01)
        self._experiences: dict[str, Experience] = {}

    def session(self, sources: Sequence[Source]) -> AdaptiveSession:
        """Begin a sequence with these drafters."""
        return AdaptiveSession(
            self.costs,
            [_Member(each, self._experiences.setdefault(each.name, Experience())) for each in sources],
            self.ledger,
        )


class Experience:
    """What all sequences say about a drafter: its acceptance, and its time where no costs of a model tell it.

    ``call_s``: seconds of a proposal, None before the first; ``worth``: tokens that proposals brought of late, beyond
    what the rows would bring otherwise; ``budget``: the most tokens that it was asked for;
    ``idle_s``: seconds of decoding since its tokens were last put to a test; ``failures``: tests in a row in which no
    token stood.
    """

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.call_s: float | None = None
        self.worth = _FIRST_WORTH
        self._added = [[share * _FIRST_OUTLOOK, _FIRST_OUTLOOK] for share in _FIRST_ADDED]
        self.budget = 2
        self.idle_s = 0.0
        self.failures = 0

    def added(self, value: float) -> float:
        """Return what share of its outlook a proposal adds to a draft that is worth ``value`` without it."""
        added, outlook = self._added[bisect_right(_VALUES, value)]
        return min(added / outlook, _MOST_ADDED)

    def add(self, value: float, added: float, outlook: float) -> None:
        """Take note of how many tokens a proposal added, and of how many its outlook was. Older ones fade."""
        sums = self._added[bisect_right(_VALUES, value)]
        for i, tokens in enumerate((added, outlook)):
            sums[i] = sums[i] * _RECENT_ADDED + tokens


class Ledger:
    """Time that reading ahead has lost: extra seconds, less the seconds of plain decoding that its tokens saved.

    More than ``tolerance`` of all time, and ``allowance`` plain tokens' time, is too much. Gains count for later only
    up to ``allowance``.
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
        self.ledger = Ledger(allowance=2.0, tolerance=0.02)
        self.promising = False  # all tokens of the last test stood
        self.stake_s = 0.0  # what the round may lose with it if no token stands
        self.draft_s = 0.0  # in this round
        self.reading_s = 0.0  # spent on reading once, not yet entered in the ledgers
        self.rates: dict[tuple[int, int], float] = {}  # of this round's tokens

    def rate(self, confidence: float, position: int, alternative: bool) -> float:
        kept = cell(confidence, position, alternative)
        rate = self.rates.get(kept)
        if rate is None:
            rate = self.rates[kept] = self.odds.apply(self.experience.acceptance.rate(kept))
        return rate

    def average(self, position: int) -> float:
        return self.odds.apply(self.experience.acceptance.average(position))

    def learn(self, tests: Sequence[tuple[tuple[int, int], bool]]) -> None:
        """Take note of which tokens, by the cells of their statistics, stood."""
        acceptance = self.experience.acceptance
        for kept, stood in tests:
            self.odds.learn(acceptance.rate(kept), stood)
        for kept, stood in tests:
            acceptance.learn(kept, stood)

    def tested(self, stood: bool, promising: bool) -> None:
        """Take note of a test as a whole."""
        self.experience.idle_s = 0.0
        self.experience.failures = 0 if stood else self.experience.failures + 1
        self.promising = promising

    def may_probe(self, cost_s: float) -> bool:
        """Return whether a test that is expected to be in vain is affordable: at once after one that wasn't in vain."""
        waited = self.experience.idle_s * _PROBING * 0.5 ** min(self.experience.failures, _LONGEST_WAIT)
        return self.promising or waited >= cost_s

    def propose(self, budget: int, go_on: GoOn = always) -> Draft:
        experience = self.experience
        if self.source.costs is None:
            budget = min(budget, experience.budget)
        draft = self.source.propose(budget, go_on)
        if self.source.costs is None and len(draft) >= budget == experience.budget < MOST:
            experience.budget *= 2  # unknown drafters are asked for little at first
        return draft

    def took(self, seconds: float) -> None:
        """Take note of what a proposal took."""
        experience = self.experience
        self.draft_s += seconds
        if experience.call_s is None:
            experience.call_s = seconds / 4  # the first call may load something
        else:
            experience.call_s += 0.2 * (min(seconds, 4 * experience.call_s) - experience.call_s)

    def brought(self, value: float) -> None:
        """Take note of what a proposal was worth, in tokens beyond what its rows would bring otherwise."""
        self.experience.worth += _RECENT_WORTH * (value - self.experience.worth)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The part of all proposals worth checking, and what it is worth: tokens, beyond what its time would bring else.

    ``owners``: of each token, the members that proposed it. ``worth``: of each member, its share of the value.
    """

    draft: Draft
    value: float = 0.0
    owners: tuple[tuple[_Member, ...], ...] = ()
    worth: Mapping[_Member, float] = field(default_factory=dict)


class AdaptiveSession:
    """The adaptive policy on one sequence."""

    def __init__(self, costs: ModelCosts, members: Sequence[_Member], ledger: Ledger) -> None:
        self._costs, self._members, self._ledger = costs, members, ledger
        self._rounds = 0
        self._tokens = self._units = 4.0  # of late, and the plain rounds whose time they took
        self._since_plain = 0
        self._rows, self._sequences, self._rate = 1, 1, 0.0  # of this round
        self._proposals: list[tuple[_Member, Draft]] = []
        self._asked: list[tuple[_Member, float, float]] = []  # costly ones, the plan's value before, the outlook
        self._plan = _Plan(Draft())

    def draft(self, left: int, context: int, rows: int, sequences: int) -> Draft:
        """Return the most valuable draft; an empty one where none is worth its time."""
        self._rounds += 1
        self._rows, self._sequences = rows, sequences
        self._proposals, self._asked, self._plan = [], [], _Plan(Draft())
        if left < 1 or (self._since_plain >= _ROUNDS_TO_PLAIN and self._tokens < _CLEARLY * self._units):
            return Draft()  # the latter to see again what a plain token takes, where that may decide
        limit = min(left, MOST)
        prices = _Prices(self._costs, context, rows, sequences, max(1.0, self._tokens / self._units))
        stake_s, self._rate = self._ledger.left(prices.token_s), prices.rate
        tree = _Tree()
        costly = []
        for member in self._members:
            member.stake_s = min(stake_s, member.ledger.left(prices.token_s))
            member.rates.clear()
            if not member.source.alive or member.stake_s <= 0:
                continue
            affordable = max(_CHEAP, member.experience.worth / _ASKED)  # in a large batch no time is short
            asking = prices.rate * (member.experience.call_s or 0.0)
            if member.source.sampled or member.source.costs or asking > affordable:
                costly.append(member)
                continue
            draft = member.propose(limit)
            proposed = time.perf_counter()
            self._proposed(member, draft, tree)
            member.took(member.source.seconds + time.perf_counter() - proposed)
        plan = tree.plan(prices)
        # A sample takes the place of all other drafts: so it is asked for before time is spent on others, and only if
        # it can be expected to be worth more than what is there.
        costly.sort(key=lambda member: not member.source.sampled)
        for member in costly if self._rounds > 1 else ():  # the first token shouldn't wait for a model to read
            sampled = member.source.sampled
            times = _DraftTimes.of(member, context)
            added = 1.0 if sampled else member.experience.added(plan.value)
            outlook = _outlook(member, times, prices, limit, left, added)
            price = outlook.price * (_SURELY if plan.draft and not sampled else 1.0)
            if added * outlook.tokens - price <= max(_LEAST, plan.value if sampled else 0.0):
                if sampled and plan.draft:
                    continue
                cost_s = times.first + times.once / 4 + prices.seconds[1]  # what is read once is read
                if cost_s > member.stake_s or not member.may_probe(cost_s):
                    continue
                best = _outlook(member, times, prices, limit, left, 1.0, surely=True)
                if best.tokens <= best.price:
                    continue
            draft = _ask_costly(member, limit, times, prices, context, added)
            self._proposed(member, draft, tree)
            if sampled:
                if draft:  # how much of it to check was decided as it was drawn
                    plan = _Plan(draft, 0.0, ((member,),) * len(draft))
                    break
                continue
            self._asked.append((member, plan.value, max(outlook.tokens, 0.0)))
            plan = tree.plan(prices)
        for member, _ in self._proposals:
            member.brought(plan.worth.get(member, 0.0))
        self._plan = plan
        return plan.draft

    def _proposed(self, member: _Member, draft: Draft, tree: _Tree) -> None:
        self._proposals.append((member, draft))
        if draft and draft.distributions is None:
            tree.add(member, draft)

    def observe(self, checked: Checked) -> None:
        """Learn from the tokens that were tested, and enter the round in the ledgers."""
        costs, draft, context, sequences = self._costs, checked.draft, checked.context, self._sequences
        plain_s = costs.seconds(sequences, context, sequences)
        token_s = plain_s / sequences
        elapsed = costs.seconds(self._rows, context, sequences)
        branch_s = costs.branch_s if draft.parents is not None else 0.0
        expected = costs.seconds(self._rows + len(draft), context, sequences) + branch_s
        cost_s = expected - elapsed  # in the target, with this draft
        if self._rounds == 1:
            elapsed += context / _CHUNK * costs.seconds(_CHUNK, context // 2)  # the rest of the prompt
        elif checked.seconds is not None:
            cost_s += min(checked.seconds, 2 * expected) - expected  # beyond, something else happened
            costs.observe(checked.rows, context, max(checked.seconds - branch_s, checked.seconds / 2))
        self._since_plain = self._since_plain + 1 if draft else 0
        if self._rounds > 1:
            self._tokens = self._tokens * _RECENT + len(checked.tokens)
            spent = expected + sum(member.draft_s for member in self._members)
            self._units = self._units * _RECENT + spent / plain_s
        for member, proposal in self._proposals:
            _learn(member, proposal, checked.tokens)
        self._learn_added(checked, cost_s)
        lost = self._losses(checked, cost_s, token_s)
        total = 0.0
        for member in self._members:
            member.experience.idle_s += elapsed / sequences
            charged = member.draft_s
            if charged:
                charged += _CHARGED * member.reading_s
                member.reading_s -= _CHARGED * member.reading_s
            elif member.experience.call_s is not None:
                member.experience.call_s *= _FORGIVING
            member.draft_s = 0.0
            charged += lost.get(member, 0.0)
            member.ledger.add(elapsed / sequences, charged, token_s)
            total += charged
        self._ledger.add(elapsed / sequences, total, token_s)

    def _learn_added(self, checked: Checked, cost_s: float) -> None:
        """Learn what those added that cost time: tokens that stood and no other proposed, less what their rows took."""
        owners = self._plan.owners
        if len(owners) != len(checked.draft):
            return
        for member, value, outlook in self._asked:
            own = [i for i, members in enumerate(owners) if members == (member,)]
            stood = sum(i in checked.accepted for i in own)
            rows_s = cost_s * len(own) / max(1, len(owners))
            member.experience.add(value, stood - self._rate * rows_s, outlook)

    def _losses(self, checked: Checked, cost_s: float, token_s: float) -> dict[_Member, float]:
        """Return what each member lost in the target: the time of its tokens, less that of those that stood.

        A token that several proposed is shared among them.
        """
        owners: Sequence[Sequence[_Member]] = self._plan.owners
        if len(owners) != len(checked.draft):  # cut to the room that there was
            everyone = tuple(dict.fromkeys(member for each in owners for member in each))
            owners = (everyone,) * len(checked.draft)
        lost: dict[_Member, float] = {}
        saved = min(len(checked.accepted), len(checked.tokens) - 1)  # a token that ends the text would have come anyway
        for i, members in enumerate(owners):
            loss = cost_s / len(owners) - (token_s if i in checked.accepted[:saved] else 0.0)
            for member in members:
                lost[member] = lost.get(member, 0.0) + loss / len(members)
        return lost


_MARGIN = 1.05  # estimates are noisy, and what is chosen looks better than it is
_LEAST = 0.02  # a draft worth fewer tokens isn't checked: estimates are no better
_VALUES = (0.1, 0.4, 0.8, 1.5)  # bounds of what a draft is worth without another drafter
_FIRST_ADDED, _FIRST_OUTLOOK = (1.0, 0.5, 0.3, 0.2, 0.1), 10.0  # what is believed weighs as much as so many tokens
_SURELY = 1.3  # times its price what comes on top of other drafts has to be worth: that is harder to foresee
_RECENT_ADDED, _LEAST_ADDED, _MOST_ADDED = 0.98, 0.1, 3.0
_CHEAP = 0.02  # a drafter whose proposals take less than the time of so many tokens is asked in every round
_RECENT = 0.95
_FIRST_WORTH, _RECENT_WORTH = 0.5, 0.03
_ASKED = 5.0  # times a proposal's own time has to be brought: it is learned from and checked, and rows may cost more
_PROBING = 0.01  # of the time goes to tests of drafters that don't seem to pay
_LONGEST_WAIT = 2  # failures after which tests don't become rarer, each making them half as frequent
_ROUNDS_TO_PLAIN = 24
_CLEARLY = 1.5  # times plain decoding: beyond, errors don't matter
_HORIZON = 128  # tokens over which what a model must read first has to pay
_READING = 0.04  # of their time at most goes there
_CHARGED = 1 / 16  # of that is entered in the ledgers with each draft: it should pay in many
_FORGIVING = 0.997  # a round, of what slow drafters took: something may have changed
_NO_GUESS = 0.5  # the confidence that an empty draft counts as
_CHUNK = 128  # rows in which prompts are computed


class _Prices:
    """What draft tokens have to bring.

    ``gain``: tokens per plain token's time, of late. ``rate``: the tokens per second of all sequences of the round,
    whose time every row takes.
    """

    def __init__(self, costs: ModelCosts, context: int, rows: int, sequences: int, gain: float) -> None:
        self._costs, self._context, self._rows = costs, context, rows
        self._others = sequences - 1
        self._plain_s = costs.seconds(sequences, context, sequences)
        self.token_s = self._plain_s / sequences
        self.rate = gain / self.token_s
        self.branch_s = costs.branch_s

    @cached_property
    def seconds(self) -> list[float]:
        """What 0, 1, .. draft tokens add to the round; worked out only where there is a draft."""
        return self._costs.further(self._rows, self._context, MOST + 1)

    def price(self, seconds: float, tokens: float, spent: float) -> float:
        """Return the tokens that so many seconds should bring in a round of so many tokens and seconds till then."""
        return _MARGIN * seconds * max(self.rate, (self._others + tokens) / (self._plain_s + spent))


@dataclass(frozen=True, slots=True)
class _DraftTimes:
    """Seconds of a costly drafter: of its first token, of each next one, and once to read what it hasn't read.

    ``rows``: of a forward that drafts. Where one drafts many tokens, the next ones cost nothing.
    """

    first: float
    next: float
    once: float
    rows: int = 1

    @classmethod
    def of(cls, member: _Member, context: int) -> _DraftTimes:
        costs = member.source.costs
        if costs is None:
            one = (member.experience.call_s or 0.0) / member.experience.budget
            return cls(one, one, 0.0)
        unread, at_once = member.source.unread, member.source.at_once
        if at_once > 1:
            first = costs.seconds(at_once + min(unread, 2), context)
            return cls(first, 0.0, max(0.0, costs.seconds(at_once + unread, context) - first), at_once)
        first = costs.seconds(max(1, min(unread, 2)), context)
        return cls(first, costs.seconds(1, context), costs.seconds(max(1, unread), context) - first)


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What to expect of a costly drafter: tokens, beyond what their rows would bring otherwise, and their price."""

    tokens: float = 0.0
    price: float = 0.0


def _outlook(
    member: _Member, times: _DraftTimes, prices: _Prices, limit: int, left: int, added: float, *, surely: bool = False
) -> _Outlook:
    """Return what to expect of asking a costly drafter, before anything is known of its draft.

    As many tokens as pay where ``added`` of their worth comes on top of others' drafts. ``surely``: if all stood.
    """
    horizon = min(left, _HORIZON)
    if times.once > member.stake_s + _READING * horizon * prices.token_s:
        return _Outlook()
    survival, tokens, spent = 1.0, 1.0, 0.0
    gain = price = 0.0
    best, rounds = _Outlook(), 1.0
    for count in range(1, (min(limit, times.rows) if times.rows > 1 else limit) + 1):
        survival *= 1.0 if surely else member.average(count)
        own_s, rows_s = times.next if count > 1 else times.first, prices.seconds[count] - prices.seconds[count - 1]
        gain += survival - prices.price(rows_s, tokens, spent)
        price += prices.price(own_s, tokens, spent)
        tokens += survival
        spent += own_s + rows_s
        if spent > member.stake_s:
            break
        if added * gain - price > added * best.tokens - best.price or count == 1:
            best, rounds = _Outlook(gain, price), max(1.0, horizon / tokens)
        elif added * (gain + survival) - price <= added * best.tokens - best.price:
            break  # one more that is free wouldn't make up for it, and later ones stand less often
    return _Outlook(best.tokens, best.price + prices.rate * times.once / rounds)


class _Stop:
    """Tells a costly drafter to go on while its next token can be expected to pay.

    ``added``: the share of its tokens' worth that the drafts of others don't have already.
    ``count``: the tokens it asked after, each of which took its model a forward.
    """

    def __init__(self, member: _Member, times: _DraftTimes, prices: _Prices, added: float) -> None:
        self._member, self._times, self._prices, self._added = member, times, prices, added
        self._survival, self.count = 1.0, 0
        self._tokens, self._spent = 1.0, times.first + prices.seconds[1]

    def __call__(self, confidence: float) -> bool:
        self.count += 1
        self._survival *= self._member.rate(confidence, self.count, False)
        self._tokens += self._survival
        expected = self._survival * self._member.average(self.count + 1)
        at = min(self.count, MOST)  # a model with another tokenizer may need more tokens for as much text
        rows_s = self._prices.seconds[at + 1] - self._prices.seconds[at]
        gain = expected - self._prices.price(rows_s, self._tokens, self._spent)
        pays = self._added * gain > self._prices.price(self._times.next, self._tokens, self._spent)
        self._spent += self._times.next + rows_s
        return pays and self._spent <= self._member.stake_s


def _ask_costly(member: _Member, budget: int, times: _DraftTimes, prices: _Prices, context: int, added: float) -> Draft:
    """Return what a costly drafter proposes, and learn what it took."""
    stop = _Stop(member, times, prices, min(max(added, _LEAST_ADDED), 1.0))
    draft = member.propose(budget, stop)
    member.took(member.source.seconds)
    if not draft:  # time spent on nothing
        member.learn([(cell(_NO_GUESS, 1, False), False)])
        member.tested(False, False)
    foreseen = times.once + times.first + max(0, stop.count - 1) * times.next
    factor = member.source.seconds / foreseen if foreseen else 1.0
    member.draft_s -= factor * times.once
    member.reading_s += factor * times.once
    if member.source.costs and (stop.count or draft):
        member.source.costs.observe(times.rows, context, factor * (times.next or times.first))
    return draft


class _Tree:
    """All that was proposed in a round: what several drafters propose after the same tokens is one token of it."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._survivals: list[float] = []  # the probability that a token and all before it on its path stand
        self._owners: list[tuple[_Member, ...]] = []
        self._places: dict[tuple[int, int], int] = {}  # of a token after its parent
        self._members: list[_Member] = []
        self._stake_s = 0.0

    def add(self, member: _Member, draft: Draft) -> None:
        """Add a proposal."""
        self._members.append(member)
        self._stake_s = max(self._stake_s, member.stake_s)
        tokens, survivals, known = self._tokens, self._survivals, self._places
        places, positions = [-1], [0]  # of the draft's tokens; before them the end of the text, as of the parent -1
        seen: set[int] = set()
        for i, (token, confidence) in enumerate(zip(draft.tokens, draft.confidences, strict=True)):
            parent = i if draft.parents is None else draft.parents[i] + 1
            position, before = positions[parent] + 1, places[parent]
            rate = member.rate(confidence, position, parent in seen)
            seen.add(parent)
            survival = rate if before < 0 else rate * survivals[before]
            place = known.get((before, token))
            if place is None:
                place = known[before, token] = len(tokens)
                tokens.append(token)
                self._parents.append(before)
                survivals.append(survival)
                self._owners.append((member,))
            else:
                survivals[place] = max(survivals[place], survival)
                self._owners[place] += (member,)
            places.append(place)
            positions.append(position)

    def plan(self, prices: _Prices) -> _Plan:
        """Return the most valuable part; none where it isn't worth its time."""
        survivals, parents = self._survivals, self._parents
        order = _likeliest(survivals)
        value, best, count = 0.0, _LEAST, 0
        tokens, spent = 1.0, 0.0  # of the round so far: the target's own token is sure
        branch_s, grown = 0.0, set()
        gains = []
        for size, i in enumerate(order[:MOST], start=1):
            if not branch_s and parents[i] in grown:
                branch_s = prices.branch_s
            grown.add(parents[i])
            after = prices.seconds[size] + branch_s
            if after > self._stake_s:
                break
            gains.append(survivals[i] - prices.price(after - spent, tokens, spent))
            value += gains[-1]
            tokens += survivals[i]
            spent = after
            if value > best:
                best, count = value, size
            elif value + survivals[i] * (len(order) - size) <= best:
                break  # the rest could not make up for it if it were free
        if not count:
            return _Plan(Draft())
        worth: dict[_Member, float] = {}
        for i, gain in zip(order[:count], gains, strict=False):
            for member in self._owners[i]:
                worth[member] = worth.get(member, 0.0) + gain / len(self._owners[i])
        kept = sorted(order[:count])
        return _Plan(
            self._draft(kept, [each for each in self._members if each in worth]),
            best,
            tuple(self._owners[i] for i in kept),
            worth,
        )

    def _draft(self, kept: Sequence[int], members: Sequence[_Member]) -> Draft:
        before = [self._survivals[p] if (p := self._parents[i]) >= 0 else 1.0 for i in kept]
        return Draft(
            tuple(self._tokens[i] for i in kept),
            renumbered(self._parents, kept),
            tuple(min(1.0, self._survivals[i] / each) for i, each in zip(kept, before, strict=True)),
            "+".join(member.source.name for member in members),
        )


def _learn(member: _Member, draft: Draft, written: Sequence[int]) -> None:
    """Learn from every proposed token that what was written says something about: the tokens before it came true."""
    depths = {-1: 0}
    tests: list[tuple[tuple[int, int], bool]] = []
    stood = False
    seen: set[int] = set()
    for i, (token, confidence) in enumerate(zip(draft.tokens, draft.confidences, strict=True)):
        parent = i - 1 if draft.parents is None else draft.parents[i]
        place = depths.get(parent, len(written))
        if place < len(written):
            right = token == written[place]
            tests.append((cell(confidence, place + 1, parent in seen), right))
            seen.add(parent)
            if right:
                depths[i] = place + 1
                stood = True
    if draft:
        member.learn(tests)
        member.tested(stood, stood and max(depths.values()) == depth(draft))


def _survivals(draft: Draft, rates: Sequence[float]) -> list[float]:
    """Return for each token the probability that it and all before it on its path stand."""
    survivals: list[float] = []
    for i, rate in enumerate(rates):
        parent = i - 1 if draft.parents is None else draft.parents[i]
        survivals.append(rate if parent < 0 else survivals[parent] * rate)
    return survivals


def _likeliest(survivals: Sequence[float]) -> list[int]:
    """Return indices, likeliest first; among equals parents come before children."""
    return sorted(range(len(survivals)), key=survivals.__getitem__, reverse=True)
