"""What a long run has found so far, kept in a file so that the same run can go on after an interruption."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sakiyomi.bench.runner import Measurement
from sakiyomi.errors import OptionError
from sakiyomi.files import replace_file
from sakiyomi.interfaces import RoundRecord
from sakiyomi.stats import Stats

_VERSION = 1


class Journal:
    """Answers and measurements of a run, a JSON line each as they come.

    ``path``: None keeps nothing. ``run``: what the run depends on, ready for JSON: what a file holds of another run is
    dropped. A last line that was cut off is dropped too. ``resumed``: there was something to go on from. Raises
    OptionError where the file can't be read or written.
    """

    def __init__(self, path: Path | None, run: Mapping[str, Any]) -> None:
        self._path = path
        self.answers: dict[str, tuple[int, ...]] = {}
        self.blocks: list[list[Measurement]] = []  # of one prompt each
        text = json.dumps({"version": _VERSION, **run}, sort_keys=True, default=str)
        self._head = hashlib.sha256(text.encode()).hexdigest()
        if path is None:
            return
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"{path}: can't be read ({error}); remove it, or name another folder") from None
        whole = self._take(lines) if lines and lines[0] == json.dumps({"run": self._head}) else []
        text = "".join(f"{line}\n" for line in (json.dumps({"run": self._head}), *whole))
        with self._named():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))

    @property
    def resumed(self) -> bool:
        """Whether there is something to go on from."""
        return bool(self.answers)

    def answer(self, prompt_id: str, tokens: Sequence[int]) -> None:
        """Keep an answer."""
        self.answers[prompt_id] = tuple(tokens)
        self._write({"answer": prompt_id, "tokens": list(tokens)})

    def measured(self, measurements: Sequence[Measurement]) -> None:
        """Keep what was measured on one prompt."""
        self.blocks.append(list(measurements))
        self._write({"measured": [asdict(each) for each in measurements]})

    def close(self) -> None:
        """End it: the run is complete."""
        if self._path is not None:
            with self._named():
                self._path.unlink(missing_ok=True)

    def _take(self, lines: Sequence[str]) -> list[str]:
        """Take what the lines after the first hold, and return those that are whole."""
        whole = []
        for line in lines[1:]:
            try:
                entry = json.loads(line)
                if "answer" in entry:
                    self.answers[entry["answer"]] = tuple(entry["tokens"])
                else:
                    self.blocks.append([_measurement(each) for each in entry["measured"]])
            except (ValueError, TypeError, KeyError, AttributeError):
                break
            whole.append(line)
        return whole

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._named(), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OptionError(f"{self._path}: can't be written ({error.strerror}); name another folder") from None


def _measurement(entry: dict[str, Any]) -> Measurement:
    stats = entry.pop("stats")
    records = tuple(RoundRecord(**{**each, "errors": tuple(each["errors"])}) for each in stats.pop("records"))
    tokens = tuple(entry.pop("token_ids"))
    return Measurement(**entry, token_ids=tokens, stats=Stats(records, **{**stats, "starts": tuple(stats["starts"])}))
