"""`kmp demo`: trains one model in float32, in float16, and in float16 with kmp, and compares the results."""

from kmp.demo.presentation import run

__all__ = ["run"]
