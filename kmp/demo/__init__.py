"""`kmp demo`: one model on embedded data, trained in float32, float16, and float16 with kmp, and compared."""

from kmp.demo.presentation import run

__all__ = ["run"]
