"""`kmp demo`: compares one model in float32, in float16, and in float16 with kmp."""

from kmp.demo.presentation import run

__all__ = ["run"]
