"""What a tuning says: the recommendation with its reason, and all figures behind it, ready for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Literal

from sakiyomi.bench.runner import PLAIN, Candidate
from sakiyomi.bench.tuner import LEAST_PROMPTS, LIMIT, Answered, Tuning, fastest, paired, prediction_errors
from sakiyomi.costs import ModelCosts
from sakiyomi.interfaces import RoundRecord
from sakiyomi.stats import Interval, Stats, ratio, ratio_interval, speedup, speedup_interval

VERSION = 1
_BATCHES = (1, 2, 4, 8, 16, 32)
_SHORT = 16  # tokens; of a shorter answer hardly more than the first chunk is left

Pairs = Mapping[str, tuple[Stats, Stats]]


def as_dict(
    tuning: Tuning, *, workload: str, command: str, facts: Mapping[str, Any], bad: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what a tuning found, ready for JSON; ``docs/tuning.md`` says what is where.

    ``workload``: its name. ``command``: that was called. ``facts``: of machine and model. ``bad``: of lines left out.
    """
    measured = paired(tuning.live) if tuning.live else {}
    errors = prediction_errors(tuning, tuning.live) if tuning.live else {}
    intervals = {case: _interval(pairs, tuning) for case, pairs in measured.items()}
    chosen = fastest(tuning.live, tuning.options.seed)
    pairs = measured[chosen.name] if chosen else {}
    interval = intervals[chosen.name] if chosen else None
    categories = _categories(tuning, chosen, pairs)
    recommendation = _recommendation(tuning, chosen, interval, _compared(pairs), categories)
    params = {field.name: getattr(tuning.params, field.name) for field in fields(tuning.params)}
    params["logit_bias"] = dict(tuning.params.logit_bias)
    params["processors"] = len(tuning.params.processors)
    return {
        "version": VERSION,
        "command": command,
        "machine": dict(facts),
        "params": params,
        "partial": tuning.left_out > 0 or len(pairs) < len(tuning.answered),
        "seconds": dict(tuning.seconds),
        "workload": {
            "name": workload,
            "prompts": len(tuning.answered),
            "categories": _counts(each.prompt.category for each in tuning.answered),
            "skipped": [{"id": each.prompt_id, "reason": each.reason} for each in tuning.skipped],
            "bad": list(bad),
            "left_out": tuning.left_out,
            "recorded": sum(each.expected for each in tuning.answered),
            "matching": sum(each.matches for each in tuning.answered),
        },
        "recommendation": recommendation,
        "categories": categories,
        "candidates": [_candidate(tuning, each, measured.get(each.name), errors) for each in _all(tuning)],
        "plain": _plain(next(iter(measured.values()), {})),
        "costs": _costs(tuning),
        "batches": _batches(tuning, chosen),
        "prompts": _prompts(tuning, pairs),
        "samples": [
            {
                "id": each.prompt.id,
                "category": each.prompt.category,
                "prompt": each.prompt.text or each.prompt.messages[-1]["content"],
                "case": each.case,
                "tokens": [list(token) for token in each.tokens],
            }
            for each in tuning.samples
        ],
        "exactness": _exactness(tuning, str(facts.get("exactness", ""))),
        "prediction": _prediction(errors),
        "notes": _notes(tuning, len(pairs), bad),
    }


def _all(tuning: Tuning) -> list[Candidate]:
    """Return all candidates, those first that can't be replayed and were measured only."""
    live = tuning.live.candidates if tuning.live else ()
    return [*(each for each in live if each not in tuning.candidates), *tuning.candidates]


def _interval(pairs: Pairs, tuning: Tuning) -> Interval | None:
    return speedup_interval(list(pairs.values()), tuning.options.seed)


def _compared(pairs: Pairs) -> int:
    """Return how many prompts have a time per token on both sides: answers of one token have none."""
    return sum(bool(plain.decode_tokens and drafted.decode_tokens) for plain, drafted in pairs.values())


def _figures(interval: Interval | None) -> dict[str, float | None]:
    if interval is None:
        return {"speedup": None, "low": None, "high": None}
    return {"speedup": interval.value, "low": interval.low, "high": interval.high}


def described(candidate: Candidate) -> str:
    """Return a setting in words, like ``suffix + table, adaptive``."""
    k = candidate.num_speculative_tokens
    way = "" if candidate.verification == "coupled" else f", {candidate.verification}"
    return f"{' + '.join(candidate.drafter.split('+'))}, {'adaptive' if k is None else f'k = {k}'}{way}"


def times(interval: Interval) -> str:
    """Return a speed-up in words, like ``2.31x (2.10 to 2.52)``."""
    known = "" if interval.low is None else f" ({interval.low:.2f} to {interval.high:.2f})"
    return f"{interval.value:.2f}x{known}"


def _recommendation(
    tuning: Tuning,
    best: Candidate | None,
    interval: Interval | None,
    prompts: int,
    categories: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    verdict: Literal["faster", "off", "unclear"] = "unclear"
    enough = prompts >= min(LEAST_PROMPTS, len(tuning.prompts))
    more = "give it more time (--minutes)" if tuning.left_out or prompts < len(tuning.answered) else "give more prompts"
    if (best is None or interval is None) and tuning.live and tuning.live.measurements:
        sentence = "No verdict: the answers have no tokens after the first, whose time could be compared."
    elif best is None or interval is None:
        sentence = f"No verdict: there was no time to measure anything; {more}."
    elif not enough or interval.low is None:
        sentence = f"No verdict: {described(best)} had {times(interval)} on {_prompts_word(prompts)}; {more}."
    elif interval.verdict == "faster":
        verdict = "faster"
        sentence = f"{described(best)}: {times(interval)}."
    elif interval.verdict == "slower" or interval.value <= 1:
        verdict = "off"
        sentence = f"Off: reading ahead doesn't pay here. The best, {described(best)}, had {times(interval)}."
    else:
        sentence = f"No verdict: {described(best)} had {times(interval)}, which may be no gain; {more}."
    losing = [each for each in categories if each["verdict"] == "slower"]
    if verdict == "faster" and losing:
        sentence = f"{sentence[:-1]}; off for {', '.join(_said(each) for each in losing)}."
    gaining = [each for each in categories if each["verdict"] == "faster"]
    if verdict == "off" and gaining:
        sentence += f" But it pays for {', '.join(_said(each) for each in gaining)}."
    setting = best if best is not None and verdict != "off" else None
    return {
        "case": setting.name if setting else PLAIN,
        "drafter": setting.drafter if setting else "none",
        "num_speculative_tokens": setting.num_speculative_tokens if setting else None,
        "verification": setting.verification if setting else "coupled",
        "verdict": verdict,
        "sentence": sentence,
        "measured": best.name if best else None,
        **_figures(interval),
    }


def _said(category: Mapping[str, Any]) -> str:
    return f"{category['category']} ({category['speedup']:.2f}x)"


def _prompts_word(count: int) -> str:
    return "1 prompt" if count == 1 else f"{count} prompts"


def _by_category(tuning: Tuning, pairs: Pairs) -> dict[str, list[tuple[Stats, Stats]]]:
    groups: dict[str, list[tuple[Stats, Stats]]] = {}
    for each in tuning.answered:
        if each.prompt.id in pairs:
            groups.setdefault(each.prompt.category, []).append(pairs[each.prompt.id])
    return groups


def _categories(tuning: Tuning, best: Candidate | None, pairs: Pairs) -> list[dict[str, Any]]:
    found = []
    for name, own in _by_category(tuning, pairs).items():
        assert best is not None
        interval = speedup_interval(own, tuning.options.seed)
        verdict = interval.verdict if interval else "unclear"
        words = {"faster": "pays", "slower": "doesn't pay: off", "unclear": "may pay or not"}[verdict]
        found.append(
            {
                "category": name,
                "prompts": len(own),
                "case": best.name,
                "verdict": verdict,
                "sentence": f"{described(best)} {words}" + (f", {times(interval)}" if interval else ""),
                "tokens_per_target_call": Stats.merge(each for _, each in own).tokens_per_target_call,
                **_figures(interval),
            }
        )
    return found


def _candidate(
    tuning: Tuning, candidate: Candidate, pairs: Pairs | None, errors: Mapping[str, float]
) -> dict[str, Any]:
    return {
        "case": candidate.name,
        "drafter": candidate.drafter,
        "num_speculative_tokens": candidate.num_speculative_tokens,
        "verification": candidate.verification,
        "failed": tuning.failed.get(candidate.name),
        "predicted": _predicted(tuning, candidate),
        "measured": _measured(tuning, pairs, errors.get(candidate.name)) if pairs else None,
    }


def _predicted(tuning: Tuning, candidate: Candidate) -> dict[str, Any] | None:
    by_id = tuning.predicted.get(candidate.name)
    if not by_id:
        return None
    groups: dict[str, list[str]] = {}
    for each in tuning.answered:
        if each.prompt.id in by_id:
            groups.setdefault(each.prompt.category, []).append(each.prompt.id)
    pooled = Stats.merge(by_id.values())
    return {
        "prompts": len(by_id),
        "speedup": tuning.predicted_speedup(candidate.name),
        **_of_drafts(pooled),
        "draft_s": ratio(pooled.draft_s, pooled.target_calls),
        "categories": {
            name: {
                "speedup": tuning.predicted_speedup(candidate.name, ids),
                "tokens_per_target_call": (stats := Stats.merge(by_id[each] for each in ids)).tokens_per_target_call,
                "acceptance_rate": stats.acceptance_rate,
            }
            for name, ids in groups.items()
        },
    }


def _of_drafts(stats: Stats) -> dict[str, Any]:
    return {
        "tokens_per_target_call": stats.tokens_per_target_call,
        "acceptance_rate": stats.acceptance_rate,
        "per_position_acceptance": list(stats.per_position_acceptance),
        "per_position_reached": list(stats.per_position_reached),
        "mean_drafted": stats.mean_drafted,
    }


def _measured(tuning: Tuning, pairs: Pairs, error: float | None) -> dict[str, Any]:
    return {
        "prompts": len(pairs),
        **_figures(_interval(pairs, tuning)),
        **_of_drafts(Stats.merge(each for _, each in pairs.values())),
        "tpot_s": [each.tpot_s for _, each in pairs.values()],
        "prediction_error": error,
        "categories": {
            name: {
                "prompts": len(own),
                **_figures(speedup_interval(own, tuning.options.seed)),
                "tokens_per_target_call": Stats.merge(each for _, each in own).tokens_per_target_call,
            }
            for name, own in _by_category(tuning, pairs).items()
        },
        "by_context": _by_context(tuning, pairs),
    }


def _plain(pairs: Pairs) -> dict[str, Any]:
    return {
        "tpot_s": [plain.tpot_s for plain, _ in pairs.values()],
        "ttft_s": [plain.ttft_s for plain, _ in pairs.values()],
        "prompts": list(pairs),
    }


def _by_context(tuning: Tuning, pairs: Pairs) -> list[dict[str, Any]]:
    """Return the speed-up by tokens of context: of rounds, but for the first of each answer, which reads the prompt."""
    found = []
    bounds = (0, *tuning.options.contexts)
    for low, high in zip(bounds, (*bounds[1:], None), strict=True):
        rows = []
        for plain, drafted in pairs.values():
            sides = [
                [each for each in _later_rounds(stats) if low <= each.context and (high is None or each.context < high)]
                for stats in (plain, drafted)
            ]
            a, c = (sum(each.total_s for each in side) for side in sides)
            b, d = (sum(each.emitted for each in side) for side in sides)
            rows.append((a, b, c, d))
        if tokens := int(sum(row[3] for row in rows)):
            interval = ratio_interval(rows, tuning.options.seed)
            found.append({"from": low, "to": high, "tokens": tokens, **_figures(interval)})
    return found


def _later_rounds(stats: Stats) -> list[RoundRecord]:
    first = set(stats.starts)
    return [each for index, each in enumerate(stats.records) if index not in first]


def _costs(tuning: Tuning) -> dict[str, Any]:
    costs = ModelCosts(tuning.costs)
    longest = max((each.prompt_tokens + len(each.token_ids) for each in tuning.answered), default=0)
    contexts = [each for each in (0, *tuning.options.contexts) if each <= max(1024, longest)]
    rows = list(tuning.costs.rows)
    seconds = [[tuning.speed * costs.seconds(count, context) for count in rows] for context in contexts]
    return {"rows": rows, "contexts": contexts, "seconds": seconds}


def _batches(tuning: Tuning, best: Candidate | None) -> list[dict[str, Any]]:
    """Return the speed-up by batch size: of the best number of draft tokens as predicted, and what was measured."""
    if best is None:
        return []
    costs = ModelCosts(tuning.costs)
    lengths = [
        (each.num_speculative_tokens, Stats.merge(by_id.values()))
        for each in tuning.candidates
        if each.drafter == best.drafter and each.num_speculative_tokens and (by_id := tuning.predicted[each.name])
    ]
    found: list[dict[str, Any]] = []
    for size in _BATCHES if lengths else ():
        speeds = [(_batched(stats, size, costs, tuning.speed), length) for length, stats in lengths]
        speed, length = max((speed, length) for speed, length in speeds if speed is not None)
        case = f"{best.drafter} k={length}"
        found.append({"batch_size": size, "case": case, "speedup": speed, "low": None, "high": None, "measured": False})
    for batch in tuning.batches:
        interval = ratio_interval(batch.groups, tuning.options.seed)
        found.append({"batch_size": batch.batch_size, "case": batch.case, **_figures(interval), "measured": True})
    return found


def _batched(stats: Stats, size: int, costs: ModelCosts, speed: float) -> float | None:
    """Return the speed-up to expect with so many answers at a time, each with rounds like these.

    ``speed``: times the seconds of ``costs`` is what they take now, as the rounds' other seconds do.
    """
    rounds = stats.records[1:] or stats.records
    context = sum(each.context for each in rounds) // len(rounds)
    drafted = sum(each.drafted for each in rounds) / len(rounds)
    draft_s = sum(each.draft_s for each in rounds) / len(rounds)
    rest_s = sum(_rest(each) for each in rounds) / len(rounds)
    rows = round(size * (1 + drafted))
    tokens = sum(each.emitted for each in rounds) / len(rounds)
    plain = speed * costs.seconds(size, context, size) + size * rest_s / tokens
    return ratio(plain * tokens, speed * costs.seconds(rows, context, size) + size * (draft_s + rest_s))


def _rest(record: RoundRecord) -> float:
    return record.total_s - record.target_s - record.draft_s


def _prompts(tuning: Tuning, pairs: Pairs) -> list[dict[str, Any]]:
    found = []
    for each in tuning.answered:
        plain, drafted = pairs.get(each.prompt.id, (None, None))
        speed = speedup(plain, drafted) if plain and drafted else None
        found.append(
            {
                "id": each.prompt.id,
                "category": each.prompt.category,
                "prompt_tokens": each.prompt_tokens,
                "tokens": len(each.token_ids),
                "plain_tpot_s": plain.tpot_s if plain else None,
                "tpot_s": drafted.tpot_s if drafted else None,
                "speedup": speed,
                "tokens_per_target_call": drafted.tokens_per_target_call if drafted else None,
                "acceptance_rate": drafted.acceptance_rate if drafted else None,
                "lost": speed is not None and speed < 1,
                "why": _why(each, plain, drafted) if plain and drafted and speed is not None and speed < 1 else "",
            }
        )
    return found


def _why(answered: Answered, plain: Stats, drafted: Stats) -> str:
    """Return why a prompt lost: what a round brought against what it cost."""
    brought = drafted.tokens_per_target_call or 1.0
    if len(answered.token_ids) < _SHORT:
        return f"The answer has only {len(answered.token_ids)} tokens: too few to learn what stands."
    if not drafted.drafted:
        return "Nothing was drafted: the rest is noise of the machine, or the time of looking for drafts."
    accepted = f"{drafted.accepted} of {drafted.drafted} draft tokens stood"
    cost = brought * (ratio(drafted.tpot_s, plain.tpot_s) or 1.0)
    if brought < 1.05:
        return f"Hardly any draft stood ({accepted}), and a round took {cost:.2f} times as long as a plain one."
    return f"A round brought {brought:.2f} tokens ({accepted}), but took {cost:.2f} times as long as a plain one."


def _exactness(tuning: Tuning, machine: str) -> dict[str, Any]:
    live = tuning.live
    summaries = [each for each in live.summaries if each.category is None and not each.is_plain] if live else []
    return {
        "machine": machine,
        "compared": sum(each.compared for each in summaries),
        "identical": sum(each.identical for each in summaries),
        "differences": [asdict(each) for each in live.differences] if live else [],
    }


def _prediction(errors: Mapping[str, float]) -> dict[str, Any]:
    worst = max(errors, key=lambda case: abs(errors[case]), default=None)
    warning = ""
    if worst is not None and abs(errors[worst]) > LIMIT:
        warning = (
            f"The prediction for {worst} is {errors[worst]:+.0%} off what was measured: trust what was measured, and "
            "of the others their order more than their height."
        )
    value = None if worst is None else abs(errors[worst])
    return {"worst": value, "limit": LIMIT, "checked": len(errors), "warning": warning}


def _notes(tuning: Tuning, measured: int, bad: Sequence[str]) -> list[str]:
    notes = []
    if bad:
        notes.append(f"{len(bad)} bad lines of the workload were left out; the first: {bad[0]}")
    if tuning.skipped:
        first = tuning.skipped[0]
        notes.append(f"{_prompts_word(len(tuning.skipped))} skipped; the first: {first.prompt_id}: {first.reason}")
    if tuning.left_out:
        notes.append(
            f"{_prompts_word(tuning.left_out)} of {len(tuning.prompts)} left out for want of time (--minutes)."
        )
    if measured < len(tuning.answered):
        notes.append(
            f"{measured} of {len(tuning.answered)} answered prompts were measured live: no time for more (--minutes)."
        )
    if 1 < measured < 10:
        notes.append(
            f"Intervals over {_prompts_word(measured)} are too narrow rather than too wide; more prompts tell more."
        )
    fewer = [case for case, by_id in tuning.predicted.items() if len(by_id) < len(tuning.answered)]
    if fewer:
        notes.append(f"Replayed along fewer prompts, since it takes long (--minutes): {', '.join(fewer)}.")
    live = tuning.live.candidates if tuning.live else ()
    asked = {each for each in tuning.options.verifications if each != "coupled"}
    if missing := asked - {each.verification for each in live}:
        names = " and ".join(sorted(missing))
        notes.append(f"{names}: not measured, since none of the drafters samples; all is as with coupled.")
    expected = [each for each in tuning.answered if each.expected]
    if expected:
        same = sum(each.matches for each in expected)
        notes.append(
            f"{same} of {len(expected)} recorded responses are what this model writes with these parameters; "
            "where they aren't, its own answers were taken."
        )
    if tuning.resumed:
        notes.append("The run went on from an interrupted one.")
    failed = dict(tuning.failed)
    for each in tuning.live.measurements if tuning.live else ():
        for error in each.stats.errors:
            failed.setdefault(each.case, error)
    for case, error in failed.items():
        notes.append(f"FAILED: {case}, which went on without the drafter: {error}")
    return notes


def _counts(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts
