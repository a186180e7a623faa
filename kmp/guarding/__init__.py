"""`guard`: a skipped step changes no layer, and a batch with a non-finite loss no metric."""

from kmp.guarding.custom_loop import guard

__all__ = ["guard"]
