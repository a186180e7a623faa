"""Which causes exist in which number format, on the recorded runs of float16 programs.

The records of a run are those of another format if the dtypes, and the loss scale of 1, are.
"""

import re
from dataclasses import replace

import msgspec
import pytest
from float16_faults.truth import FLOAT16, HEALTHY_FLOAT16
from msgspec import UNSET, structs
from recorded_runs import recorded_runs, unrepaired_run

from kmp.advice import advise
from kmp.diagnosis import Observations, causes_of
from kmp.records import Header, Replay, Run, Settings

SCALE_SETTINGS = (
    *("loss_scale", "min_scale", "max_scale", "growth_interval", "growth_factor"),
    *("backoff_factor", "hysteresis"),
)
ALL = {"float16", "bfloat16", "float32"}
SIXTEEN_BITS = {"float16", "bfloat16"}
# By the beginning of the name of a program: the formats in which its cause exists.
FORMATS = {
    "fault_backward_overflow": ALL,  # of float32, gradients that are not finite
    "fault_branch_underflow": {"float16"},
    "fault_constant": SIXTEEN_BITS,  # in bfloat16, of a divisor that rounding makes 0
    "fault_data_missing": ALL,
    "fault_data_raw_units": {"float16"},
    "fault_exploding": ALL,
    "fault_forward": SIXTEEN_BITS,
    "fault_loss_overflow": SIXTEEN_BITS,
    "fault_lost_updates": SIXTEEN_BITS,  # the format of the weights
    "fault_optimizer_state": {"float16"},
    "fault_optimizer_state_zero_epsilon": ALL,
    "fault_precision": SIXTEEN_BITS,
    "fault_rounding": SIXTEEN_BITS,
    "fault_scale": {"float16"},
    "fault_targets": ALL,
    "fault_unscaled_loss": {"float16"},
}


def formats_of(program):
    """Returns the formats of the longest beginning of a program's name."""
    return FORMATS[max(filter(program.startswith, FORMATS), key=len)]


def in_format(run, name):
    """Returns a run in float16 as if its layers and weights were in another format."""
    if name == "float16":
        return run

    def renamed(value, type_):
        text = msgspec.json.encode(value).replace(b'"float16"', f'"{name}"'.encode())
        return msgspec.json.decode(text, type=type_)

    settings = structs.asdict(renamed(run.settings, Settings))
    for key in SCALE_SETTINGS:
        del settings[key]
    settings |= {"rule": "FixedScale", "initial_scale": 1.0}
    rows = [structs.replace(row) for row in run.rows]
    for row in rows:
        if row.loss_scale:
            row.loss_scale = 1.0
        if row.sample is not UNSET:
            row.sample = replace(row.sample, loss_scale=1.0)
        if row.replay:
            replay = replace(row.replay, other_format=None)
            row.replay = replace(renamed(replay, Replay), loss_scale=1.0)
    return Run(rows, Header(settings=Settings(**settings)))


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("program", FLOAT16)
def test_cause_is_found_in_the_formats_in_which_it_exists(program, name):
    run = in_format(unrepaired_run(program), name)
    found = [cause.name for cause in causes_of(Observations(run))]
    assert (FLOAT16[program].cause in found) == (name in formats_of(program)), found


RUNS_IN_FLOAT16 = [
    name for name in recorded_runs() if name.partition(".")[0] in FLOAT16 | HEALTHY_FLOAT16
]
WORDS_OF_FLOAT16 = re.compile(
    r"(?<!b)float16|65504|subnormal|headroom|underflow|scaling|loss scale|(initial|loss)_scale"
)


@pytest.mark.parametrize("name", sorted(ALL - {"float16"}))
@pytest.mark.parametrize("recorded", RUNS_IN_FLOAT16)
def test_advice_on_another_format_does_not_speak_of_float16(recorded, name):
    run = in_format(recorded_runs()[recorded], name)
    rows = [row for row in run.rows if not row.fallback]  # their reasons are of float16
    # The code of a program is in a file with its name.
    text = str(advise(Run(rows, run.header))).replace(recorded.partition(".")[0], "program")
    assert not WORDS_OF_FLOAT16.search(text), text
    if name == "float32":
        assert "16" not in re.sub(r"[\d.]+", lambda number: number[0].replace("16", ""), text), text
