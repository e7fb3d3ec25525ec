"""An audit for the screen and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sakiyomi.audit.chance import POWER
from sakiyomi.audit.law import CONTEXT, DRAFTED, LawCheck
from sakiyomi.audit.runner import SIGNIFICANCE, Audit, Case
from sakiyomi.bench.report import Facts

_MOST = 5  # differences that are shown
_STYLES = {"passed": "bold green", "failed": "bold red", "interrupted": "bold yellow"}


def render(audit: Audit, facts: Facts | None = None) -> Group:
    """Return what ``rich.print`` shows: what was tested and found, in words; acceptance as a table; the verdict."""
    parts: list[Text | Table] = [Text(f"{name}: {line}.") for name, line in _lines(audit)]
    for each in audit.differences[:_MOST]:
        parts.append(
            Text(
                f"DIFFERENT: {each.case}, prompt {each.prompt_id}, token {each.position}: after {each.before!r} plain "
                f"decoding {_wrote(each.plain)}, this {_wrote(each.other)}; the target's first choice was ahead of its "
                f"second by {each.gap:.2g}.",
                style="bold red",
            )
        )
    if len(audit.differences) > _MOST:
        parts.append(Text(f"And {len(audit.differences) - _MOST} more differences.", style="bold red"))
    if any(case.stats for case in audit.cases):
        parts.append(_table(audit))
        parts.extend(Text(note) for note in _notes(audit))
    parts.extend(Text(f"SKIPPED: prompt {each.prompt_id}: {each.reason}", style="bold red") for each in audit.skipped)
    parts.append(Text(verdict(audit), style=_STYLES[audit.verdict]))
    if facts:
        parts.append(Text(", ".join(f"{name}: {value}" for name, value in facts.items())))
    return Group(*parts)


def verdict(audit: Audit) -> str:
    """Return the verdict in a few words, which claim no more than was tested."""
    if audit.verdict == "failed":
        return f"FAILED: {'; '.join(audit.failures)}."
    if audit.verdict == "interrupted":
        return "INTERRUPTED: nothing was found so far; not all was tested."
    claims = [f"all {audit.outputs} outputs are those of plain decoding"]
    if not audit.drafted:
        claims[0] += ", but nothing was drafted in them, so that this says nothing"
    for law in audit.laws:
        seen = law.visible(audit.threshold)
        name = f"{law.verification} with {law.drafter}"
        claims.append(
            f"{name} could not be tested" if seen is None else f"{name} kept the distribution, as far as seen"
        )
    idle = [case.name for case in audit.cases if not case.drafted]
    if idle and audit.drafted:
        claims.append(f"NOT tested, since nothing was drafted: {', '.join(idle)}")
    return f"PASSED: {'; '.join(claims)}. For these prompts, settings and seeds, one sequence at a time."


def as_dict(audit: Audit, facts: Facts | None = None) -> dict[str, object]:
    """Return the audit ready for JSON."""
    params = audit.params
    return {
        "machine": dict(facts or {}),
        "verdict": audit.verdict,
        "failures": list(audit.failures),
        "exactness": audit.exactness,
        "partial": audit.partial,
        "params": {
            name: getattr(params, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
        },
        "prompts": audit.prompts,
        "identity": {
            **{name: getattr(audit, name) for name in ("outputs", "greedy", "tokens", "drafted", "accepted")},
            "differences": [asdict(each) for each in audit.differences],
        },
        "rows": [asdict(each) for each in audit.rows],
        "distribution": {
            "threshold": audit.threshold,
            "power": POWER,
            "context": CONTEXT,
            "tests": [_law_dict(each, audit.threshold) for each in audit.laws],
        },
        "price": [asdict(price) for price in audit.prices.values()],
        "acceptance": [_case_dict(case, audit) for case in audit.cases if case.stats],
        "drafter_errors": list(dict.fromkeys((*audit.errors, *(error for law in audit.laws for error in law.errors)))),
        "skipped": [asdict(each) for each in audit.skipped],
    }


def _lines(audit: Audit) -> Iterator[tuple[str, str]]:
    """Yield what was tested, and what came of it."""
    wrong = [each for each in audit.rows if each.different]
    if audit.rows:
        rows, contexts = max(each.rows for each in audit.rows), sorted({each.context for each in audit.rows})
        found = "each row had the same bits as when computed alone"
        if wrong:
            largest = max(each.largest for each in wrong)
            found = f"in {len(wrong)}, rows had other bits than when computed alone, logits up to {largest:.2g} apart"
        said = "bit-exact" if audit.exactness == "bit-exact" else "numerics (the same but for floating-point ties)"
        where = " and ".join(map(str, contexts))
        yield (
            "Kernels",
            f"{len(audit.rows)} forwards of up to {rows} rows, as chains and trees, after {where} tokens: {found}. "
            f"When the model was loaded it was found to be {said}",
        )
    if audit.outputs:
        same = audit.outputs - len(audit.differences)
        yield (
            "Tokens",
            f"{same} of {audit.outputs} outputs are those of plain decoding, token by token ({audit.greedy} greedy, "
            f"{audit.outputs - audit.greedy} sampled with a seed; {audit.prompts} prompts). Of their {audit.tokens} "
            f"tokens {audit.accepted} were accepted draft tokens; {audit.drafted - audit.accepted} others were refused",
        )
    for law in audit.laws:
        yield f"Distribution, {law.verification}", _law_line(law, audit)
    if audit.laws:
        yield (
            "Tests of distributions",
            f"chi-square of each token against the target's own distribution at its place, by likeliness and by id, "
            f"in texts that follow the last {CONTEXT} tokens of a prompt. A shift between likelier and less likely "
            f"tokens, the same at each token, is found with {POWER:.0%} probability from the size on that is given. A "
            f"right engine fails in about {SIGNIFICANCE:.1%} of audits",
        )


def _law_line(law: LawCheck, audit: Audit) -> str:
    drafter = law.drafter
    if drafter == "itself":
        drafter = f"the model drafting {DRAFTED} at a time for itself, hotter, also in branches"
    ran = f"{drafter}; {law.tokens} tokens with each of {law.runs} seeds, {law.accepted} of {law.drafted} accepted"
    error = law.visible(audit.threshold)
    if error is None:
        return f"{ran}. Nothing to test: the target leaves too little to chance, or nothing was drafted"
    p = ", ".join(f"{test.p_value:.2g} ({name})" for name, test in law.tests.items() if test.freedom)
    return f"{ran}. p = {p}; failed below {audit.threshold:.1g}. Shifts of {error:.2f} or more would be found"


def _law_dict(law: LawCheck, threshold: float) -> dict[str, object]:
    return {
        **{name: getattr(law, name) for name in ("verification", "drafter", "tokens", "runs", "drafted", "accepted")},
        "p_value": law.p_value(),
        "visible_total_variation": law.visible(threshold),
        "tests": {name: {**asdict(test), "p_value": test.p_value} for name, test in law.tests.items()},
    }


def _case_dict(case: Case, audit: Audit) -> dict[str, object]:
    stats, expected = case.acceptance(), audit.expected.get(case.name)
    metrics = ("drafted", "accepted", "acceptance_rate", "alpha", "tokens_per_target_call")
    return {
        "case": case.name,
        "verification": case.verification,
        "num_speculative_tokens": case.num_speculative_tokens,
        **{name: getattr(stats, name) for name in metrics},
        "expected": expected.as_dict() if expected else None,
    }


def _table(audit: Audit) -> Table:
    table = Table(
        title=f"Acceptance, sampled at temperature {audit.params.temperature:g}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("case", overflow="fold", min_width=22)
    headers = ["of\ndrafted", "of\nreached", "tokens\n/call"]
    if audit.expected:
        headers += ["expected\n/call", "rows\nfree", "rows\npriced"]
    for header in headers:
        table.add_column(header, justify="right", overflow="fold")
    for case in audit.cases:
        if case.stats:
            table.add_row(*_cells(case, audit))
    return table


def _cells(case: Case, audit: Audit) -> tuple[str, ...]:
    stats, expected = case.acceptance(), audit.expected.get(case.name)
    cells = (
        case.name,
        _percent(stats.acceptance_rate),
        _share(stats.alpha, stats.accepted),
        _number(stats.tokens_per_target_call),
    )
    if not audit.expected:
        return cells
    if expected is None:
        return (*cells, "-", "-", "-")
    numbers = (expected.tokens_per_target_call, expected.improvement, expected.speedup)
    return (*cells, *map(_number, numbers))


def _notes(audit: Audit) -> Iterator[str]:
    """Yield the price of the same text, and how to read the table."""
    for name, price in audit.prices.items():
        if price.positions:
            yield (
                f"The price of the same text with the same seed, along {price.positions} sampled tokens: of the tokens "
                f"that {name} would draft next, coupled accepts {price.coupled:.1%}, and rejection, the most that any "
                f"way can of a single one, {price.rejection:.1%} (drawn apart, {price.apart:.1%} would be the same). "
                "In the table each way writes texts of its own. Where nothing is sampled, the three ways are one."
            )
    if audit.expected:
        yield (
            "Expected: tokens per call if each draft token that is reached stands as often as that; then the speed-up "
            "that follows if checking more rows were free (Leviathan et al., theorem 3.8), and at their measured price."
        )


def _wrote(text: str | None) -> str:
    return "had ended" if text is None else f"wrote {text!r}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(share: float | None, count: int) -> str:
    """Return a share with its standard error, of which ``count`` is the numerator."""
    return f"{share:.0%} ±{100 * math.sqrt((1 - share) / count) * share:.0f}" if share and count else _percent(share)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
