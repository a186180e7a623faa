"""Audits a model for mixed precision, plans which layers stay float32, and converts it, and back to float32."""

from kmp.conversion.auditing import Audit, audit
from kmp.conversion.converter import convert, to_float32
from kmp.conversion.precision_plan import MIXED, Plan

__all__ = ["MIXED", "Audit", "Plan", "audit", "convert", "to_float32"]
