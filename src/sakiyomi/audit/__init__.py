"""An audit of speculation on one's own model and prompts: is the text what it would be without?"""

from __future__ import annotations

from sakiyomi.audit.identity import Difference
from sakiyomi.audit.law import LawCheck
from sakiyomi.audit.rows import RowsCheck
from sakiyomi.audit.runner import LEAST_RUNS, Audit, Case, run_audit

__all__ = ["LEAST_RUNS", "Audit", "Case", "Difference", "LawCheck", "RowsCheck", "run_audit"]
