"""Audits a model for mixed precision, plans its float32 layers, and converts it and back."""

from kmp.conversion.audit_table import Audit
from kmp.conversion.auditing import audit
from kmp.conversion.converter import convert, to_float32
from kmp.conversion.plan import Plan

__all__ = ["Audit", "Plan", "audit", "convert", "to_float32"]
