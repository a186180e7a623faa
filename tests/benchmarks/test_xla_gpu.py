import dataclasses

from xla_gpu import GPUS, Difference, Kernel, describe, differences, parse_step

# As XLA prints an optimized module, shortened: the types of operands are left out there too.
TEXT = """HloModule step, is_scheduled=true, entry_computation_layout={(f16[4,8]{1,0})->(f32[8]{0})}

%sum (param_0.1: f16[4,8]) -> f32[8] {
  %param_0.1 = f16[4,8]{1,0} parameter(0)
  ROOT %reduce.1 = f32[8]{0} reduce(%param_0.1, %zero), dimensions={0}, to_apply=%add
}

%skip.1 (arg.1: (f32[8])) -> (f32[8]) {
  ROOT %arg.1 = (f32[8]{0}) parameter(0)
}

%update.2 (arg.2: (f32[8])) -> (f32[8]) {
  %arg.2 = (f32[8]{0}) parameter(0)
  %get-tuple-element.1 = f32[8]{0} get-tuple-element(%arg.2), index=0
  %wrapped_add.7 = f32[8]{0} fusion(%get-tuple-element.1), kind=kLoop, calls=%add.9
  ROOT %tuple.1 = (f32[8]{0}) tuple(%wrapped_add.7)
}

ENTRY %main.9 (Arg_0.1: f16[4,8], Arg_1.2: s64[], Arg_2.3: pred[]) -> (f32[8], f16[4,8]) {
  %Arg_0.1 = f16[4,8]{1,0} parameter(0), metadata={op_name="XLA_Args"}
  %Arg_1.2 = s64[] parameter(1), metadata={op_name="XLA_Args"}
  %Arg_2.3 = pred[] parameter(2)
  %input_reduce_fusion.12 = f32[8]{0} fusion(%Arg_0.1), calls=%sum, metadata={op_name="bn_3/Sum_12"}
  %conv.1 = (f16[4,8], u8[0]) custom-call(%Arg_0.1), custom_call_target="conv", \
metadata={op_name="conv_7/Conv"}
  %get-tuple-element.4 = f16[4,8]{1,0} get-tuple-element(%conv.1), index=0
  %add_fusion = (f32[8]{0}, f32[8]{0}, /*index=2*/s64[]) fusion(%input_reduce_fusion.12, %Arg_1.2)
  %get-tuple-element.5 = f32[8]{0} get-tuple-element(%add_fusion), index=0
  %tuple.3 = (f32[8]{0}) tuple(%get-tuple-element.5)
  %cond.1 = (f32[8]{0}) conditional(%Arg_2.3, %tuple.3, %tuple.3), BRANCHES
  ROOT %tuple.4 = (f32[8]{0}, f16[4,8]{1,0}) tuple(%get-tuple-element.5, %get-tuple-element.4)
}
"""
BRANCHES = "true_computation=%skip.1, false_computation=%update.2"
LISTED_BRANCHES = "branch_computations={%skip.1, %update.2}"
MODULE = TEXT.replace("BRANCHES", BRANCHES)


def test_kernels_of_the_entry_have_their_bytes_and_operation():
    step = parse_step(MODULE)
    rows, columns, image = 8 * 4, 8, 4 * 8 * 2  # bytes of f32[8], its elements, bytes of f16[4,8]
    assert step.kernels == (
        Kernel("input_reduce_fusion", "bn_#/Sum_#", image + rows, rows),
        Kernel("conv", "conv_#/Conv", 2 * image, 0),
        Kernel("add_fusion", "", 3 * rows + 2 * 8, 3 * rows),
        Kernel("conditional", "", 3 * 4 * columns + 1, 3 * rows, ("skip.1", "update.2")),
    )
    assert step.branch_sizes == (0, 1)


def test_branches_in_a_list_are_counted_too():
    assert parse_step(TEXT.replace("BRANCHES", LISTED_BRANCHES)) == parse_step(MODULE)


def test_differences_are_by_kernel_and_operation_the_largest_first():
    before = parse_step(MODULE)
    reduction, _, *rest = before.kernels
    after = dataclasses.replace(before, kernels=(reduction, reduction, reduction, *rest))
    assert differences(before, after) == [
        Difference("input_reduce_fusion", "bn_#/Sum_#", 1, 3),
        Difference("conv", "conv_#/Conv", 1, 0),
    ]
    assert differences(before, before) == []


def test_description_lists_what_moves_most_and_ends_with_the_sums():
    first, *_, sums = describe(parse_step(MODULE))
    assert first.split() == ["conv", "1", "0.00", "GB"]
    assert sums == "4 kernels and [0, 1] in branches, 0.0 GB, 0.0 GB in float32"


def test_description_of_a_gpu_is_what_xla_reads():
    target = GPUS["t4"].target_config()
    assert "cuda_compute_capability { major: 7 minor: 5 }" in target
    assert "core_count: 40" in target
    assert target.count("{") == target.count("}")
