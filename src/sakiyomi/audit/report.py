"""An audit for the screen and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from sakiyomi.audit import SIGNIFICANCE, AcceptanceRow, Audit, LawCheck
from sakiyomi.audit.chance import POWER
from sakiyomi.bench.report import Facts

_MOST = 5  # differences that are shown
_STYLES = {"passed": "bold green", "failed": "bold red", "interrupted": "bold yellow"}


def render(audit: Audit, facts: Facts | None = None) -> Group:
    """Return what ``rich.print`` shows: what was tested and found, in words; acceptance as a table; the verdict."""
    parts: list[Text | Table] = [Text(f"{name}: {line}") for name, line in _lines(audit)]
    for each in audit.differences[:_MOST]:
        parts.append(
            Text(
                f"  DIFFERENT: {each.case}, prompt {each.prompt_id}, token {each.position}: after {each.before!r} "
                f"plain decoding {_wrote(each.plain)}, this {_wrote(each.other)}; the target's first choice was ahead "
                f"of its second by {each.gap:.2g}",
                style="bold red",
            )
        )
    if len(audit.differences) > _MOST:
        parts.append(Text(f"  and {len(audit.differences) - _MOST} more differences", style="bold red"))
    if audit.acceptance:
        parts.append(_table(audit))
    parts.extend(Text(f"SKIPPED: prompt {each.prompt_id}: {each.reason}", style="bold red") for each in audit.skipped)
    parts.append(Text(verdict(audit), style=_STYLES[audit.verdict]))
    if facts:
        parts.append(Text(", ".join(f"{name}: {value}" for name, value in facts.items())))
    return Group(*parts)


def verdict(audit: Audit) -> str:
    """Return the verdict in a sentence, which claims no more than was tested."""
    if audit.verdict == "failed":
        return f"FAILED: {'; '.join(audit.failures)}."
    if audit.verdict == "interrupted":
        return "INTERRUPTED: nothing was found so far; not all was tested."
    claims = [f"{audit.outputs} outputs were plain decoding's, token by token"]
    for law in audit.laws:
        error = law.together.visible(audit.threshold) if law.tested else None
        if error is None:
            claims.append(f"the distribution of {law.verification} could not be tested")
        else:
            claims.append(f"{law.verification} showed no change of distribution ({error:.2f} or more would be seen)")
    return f"PASSED: {'; '.join(claims)}. For these prompts, settings and seeds, one sequence at a time."


def as_dict(audit: Audit, facts: Facts | None = None) -> dict[str, object]:
    """Return the audit ready for JSON."""
    return {
        "machine": dict(facts or {}),
        "verdict": audit.verdict,
        "failures": list(audit.failures),
        "exactness": audit.exactness,
        "partial": audit.partial,
        "temperature": audit.params.temperature,
        "max_new_tokens": audit.params.max_new_tokens,
        "seed": audit.params.seed,
        "prompts": audit.prompts,
        "identity": {
            "outputs": audit.outputs,
            "greedy": audit.greedy,
            "tokens": audit.tokens,
            "differences": [asdict(each) for each in audit.differences],
        },
        "rows": [asdict(each) for each in audit.rows],
        "distribution": {
            "threshold": audit.threshold,
            "power": POWER,
            "tests": [_law_dict(each, audit.threshold) for each in audit.laws],
        },
        "acceptance": [
            {
                **asdict(each.candidate),
                "acceptance_rate": each.stats.acceptance_rate,
                "alpha": each.stats.alpha,
                "tokens_per_target_call": each.stats.tokens_per_target_call,
                "expected": each.expected.as_dict() if each.expected else None,
            }
            for each in audit.acceptance
        ],
        "drafter_errors": list(audit.errors),
        "skipped": [asdict(each) for each in audit.skipped],
    }


def _lines(audit: Audit) -> Iterator[tuple[str, str]]:
    """Yield what was tested, and what came of it."""
    wrong = [each for each in audit.rows if each.different]
    if audit.rows:
        rows, contexts = max(each.rows for each in audit.rows), sorted({each.context for each in audit.rows})
        where = f"chains and trees of 2 to {rows} rows after {' and '.join(map(str, contexts))} tokens"
        found = "each row had the same bits as alone"
        if wrong:
            largest = max(each.largest for each in wrong)
            found = f"rows had other bits than alone in {len(wrong)}, logits up to {largest:.2g} apart"
        yield "kernels", f"{len(audit.rows)} forwards, {where}: {found} (the model says {audit.exactness})"
    if audit.outputs:
        same = audit.outputs - len(audit.differences)
        yield (
            "tokens",
            f"{same} of {audit.outputs} outputs ({audit.greedy} greedy, {audit.outputs - audit.greedy} sampled with a "
            f"seed; {audit.tokens} tokens in all, {audit.prompts} prompts) are those of plain decoding",
        )
    for law in audit.laws:
        yield f"distribution, {law.verification}", _law_line(law, audit)


def _law_line(law: LawCheck, audit: Audit) -> str:
    ran = f"{law.runs} seeds, {law.drafter} drafting, {law.accepted} of {law.drafted} accepted"
    test = law.together
    if not law.tested:
        return f"{ran}: nothing to test, since the target leaves too little to chance or nothing was drafted"
    error = test.visible(audit.threshold)
    seen = "no error is large enough to be seen" if error is None else f"would show errors of {error:.2f} or more"
    by_token = ", ".join(f"{each.p_value:.2g}" for each in law.positions)
    return (
        f"{ran}; chi-square of the first {len(law.positions)} tokens against the target's own distribution: "
        f"p = {test.p_value:.2g} ({test.freedom} degrees of freedom; by token {by_token}); {seen} (total variation at "
        f"each token, found with {POWER:.0%} probability; a right engine fails in {SIGNIFICANCE:.1%} of audits)"
    )


def _law_dict(law: LawCheck, threshold: float) -> dict[str, object]:
    return {
        "verification": law.verification,
        "drafter": law.drafter,
        "runs": law.runs,
        "drafted": law.drafted,
        "accepted": law.accepted,
        "p_value": law.together.p_value,
        "visible_total_variation": law.together.visible(threshold),
        "positions": [{**asdict(each), "p_value": each.p_value} for each in law.positions],
    }


def _table(audit: Audit) -> Table:
    table = Table(
        title=f"what stands of drafts, sampled at temperature {audit.params.temperature:g}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    table.add_column("drafter", overflow="fold", min_width=14)
    for header in (
        "acceptance\nrate",
        "if\nreached",
        "tokens\n/call",
        "expected\n/call",
        "expected speed-up\nrows free",
        "\nas measured",
    ):
        table.add_column(header, justify="right", overflow="fold")
    for each in audit.acceptance:
        table.add_row(*_cells(each))
    return table


def _cells(row: AcceptanceRow) -> tuple[str, ...]:
    stats, expected = row.stats, row.expected
    return (
        f"{row.candidate.name}{' coupled' if row.candidate.verification == 'coupled' else ''}",
        _percent(stats.acceptance_rate),
        _share(stats.alpha, stats.accepted),
        _number(stats.tokens_per_target_call),
        _number(expected.tokens_per_target_call if expected else None),
        _number(expected.improvement if expected else None),
        _number(expected.speedup if expected else None),
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
