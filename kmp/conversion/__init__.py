"""Audits a model for mixed precision, plans which layers stay float32, and converts it to that plan or to float32."""

from kmp.conversion.audit_table import Audit
from kmp.conversion.auditing import audit
from kmp.conversion.converter import convert, to_float32
from kmp.conversion.plan import Plan

__all__ = ["Audit", "Plan", "audit", "convert", "to_float32"]
