"""How the verdicts of kmp on the healthy programs of `benchmarks/float16_faults` start."""

from float16_faults.truth import HEALTHY_FLOAT16

VERDICTS: dict[str, str] = {
    **dict.fromkeys(HEALTHY_FLOAT16, "float16 does not hurt this run: "),
    "healthy_bfloat16": "bfloat16 does not hurt this run: ",
    "healthy_float32_attention": "Nothing is wrong with this float32 run that kmp can see: ",
}
