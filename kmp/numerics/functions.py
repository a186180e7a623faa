"""The table of functions: what each does to numbers, whatever library it is called in."""

import math
from collections.abc import Sequence

import numpy as np

from kmp.numerics import combinations, formulas
from kmp.numerics.function import Combination, Elementwise, Fixed, Function, Move
from kmp.numerics.values import INFINITY

_TORCH = "torch.amp's op reference"
_GRAPPLER = "TensorFlow's auto_mixed_precision_lists.h"
_PAPER = "Micikevicius et al. 2018, section 3.3"
_KERAS = "Keras' source"
_RANDOM = "TensorFlow's random_distributions.h"
_ARITHMETIC = "IEEE 754"  # it defines sums, signs, the larger of two, rounding and conversions
_BINARY16 = "IEEE 754 binary16"
_ASSUMPTION = "an assumption of kmp"

# The largest normalized value of n is sqrt(n); of 768 it is 28.
NORMALIZED = 32.0
# The output of a gate, such as SiLU, is in practice smaller than this.
GATE = 64.0
# Weights are learned and small, by their regularization if not by their initial values.
LEARNED = 1.0
# Normal random numbers from 32 random bits are smaller.
_LARGEST_NORMAL = 8.0

# TensorFlow's CPU kernels add up the elements of a window in float16; cuDNN and XLA do so in
# float32, as all kernels do for bfloat16. Relative errors on a CPU, of positive values, for windows
# of 256, 1024 and 4096 elements: pooling 0.002, 0.006 and 0.83, depthwise convolution 0.002, 0.012
# and 0.09. The sum of 256 elements is Inf if they exceed 255. A GPU pays for the cast of the input.
LARGEST_POOL = 256
LARGEST_DEPTHWISE_KERNEL = 1024
_SUMS_ON_CPU = "float16 sums over so many elements overflow or lose small ones on a CPU"

_POWERS = "powers overflow float16: 256 squared > 65504"
_SQUARES = "sums of squares overflow float16"
_SQUARES_OF_VECTOR = "its sum of squares can be Inf or 0 in float16"
_EXPONENTIALS = "exponentials overflow float16: exp(12) > 65504"
_QUOTIENTS = "quotients of small divisors overflow float16"
_RECIPROCALS = "reciprocals of values below 1.5e-5 overflow float16"
_LOGARITHMS = "logarithms amplify float16 rounding errors; values flushed to zero become -Inf"
_PRODUCTS = "products of two large values overflow float16: 256 times 256 > 65504"
_SUMS = "long sums overflow float16 or lose small elements"
_LONG_PRODUCTS = "products of many elements overflow float16 or are 0"
_SUMS_OF_EXPONENTIALS = "the logarithm of a sum of exponentials, which loses small ones in float16"
_PROBABILITIES = "exp, sum and division: float16 flushes small probabilities to zero"
TOO_FEW_BITS = "bfloat16 has 8 significant bits, too few for this operation"
_AMPLIFIES = "amplifies the float16 rounding errors of its input"


# The steepest functions come first: those whose results overflow or vanish for operands of common
# size.
FUNCTIONS: tuple[Function, ...] = (
    # Powers and exponentials.
    Combination(
        name="power",
        keras="power",
        tensorflow="Pow",
        source=f"{_TORCH}, {_GRAPPLER}",
        overflow=_POWERS,
        domain=(0.0, INFINITY),  # but for exponents that are integers
        formula=combinations.power,
    ),
    Elementwise(
        name="exponential",
        keras="exp exponential",
        tensorflow="Exp",
        source=f"{_TORCH}, {_GRAPPLER}",
        overflow=_EXPONENTIALS,
        compute=np.exp,
        degree=INFINITY,
    ),
    Elementwise(
        name="exponential minus 1",
        keras="expm1",
        tensorflow="Expm1",
        source=f"{_TORCH}, {_GRAPPLER}",
        overflow=_EXPONENTIALS,
        compute=np.expm1,
        degree=INFINITY,
    ),
    Elementwise(
        name="power of 2",
        keras="exp2",
        overflow=_EXPONENTIALS,
        compute=np.exp2,
        degree=INFINITY,
    ),
    Elementwise(
        name="hyperbolic sine",
        keras="sinh",
        tensorflow="Sinh",
        source=_TORCH,
        overflow=_EXPONENTIALS,
        compute=np.sinh,
        degree=INFINITY,
    ),
    Elementwise(
        name="hyperbolic cosine",
        keras="cosh",
        tensorflow="Cosh",
        source=_TORCH,
        overflow=_EXPONENTIALS,
        compute=np.cosh,
        turns=(0.0,),
        degree=INFINITY,
    ),
    Elementwise(
        name="Bessel function",
        keras="i0",
        tensorflow="BesselI0",
        overflow=_EXPONENTIALS,
        compute=np.i0,
        turns=(0.0,),
        degree=INFINITY,
    ),
    Combination(
        name="half sum of squares",
        tensorflow="L2Loss",
        source=f"{_PAPER}, {_GRAPPLER}",
        overflow=_SQUARES,
        formula=combinations.sum_of_squares,
    ),
    Elementwise(
        name="square",
        keras="square",
        tensorflow="Square",
        source=_TORCH,
        overflow=_POWERS,
        compute=np.square,
        turns=(0.0,),
        degree=2.0,
    ),
    Combination(
        name="squared difference",
        tensorflow="SquaredDifference",
        source=_TORCH,
        overflow=_POWERS,
        formula=combinations.squared_difference,
    ),
    Combination(
        name="norm",
        tensorflow="EuclideanNorm",
        source=f"{_PAPER}, {_TORCH}",
        overflow=_SQUARES,
        formula=combinations.norm,
    ),
    # Quotients, roots and logarithms.
    Combination(
        name="quotient",
        keras="divide truedivide",
        tensorflow="RealDiv Div Xdivy",  # the last is 0 for 0 / 0
        source=_BINARY16,
        overflow=_QUOTIENTS,
        formula=combinations.divided,
    ),
    Combination(
        name="quotient",
        keras="dividenonan",
        tensorflow="DivNoNan",
        source=_BINARY16,
        overflow=_QUOTIENTS,
        formula=combinations.divided_or_zero,
    ),
    Combination(
        name="reciprocal",
        keras="reciprocal",
        tensorflow="Reciprocal Inv",
        source=_TORCH,
        overflow=_RECIPROCALS,
        formula=combinations.inverted,
    ),
    Elementwise(
        name="reciprocal of the root",
        keras="rsqrt",
        tensorflow="Rsqrt",
        source=_TORCH,
        overflow=_AMPLIFIES,
        compute=lambda x: 1.0 / np.sqrt(x),
        domain=(0.0, INFINITY),
        degree=0.0,
    ),
    Elementwise(
        name="logarithm",
        keras="log",
        tensorflow="Log",
        source=_TORCH,
        overflow=_LOGARITHMS,
        compute=np.log,
        domain=(0.0, INFINITY),
        degree=0.0,
    ),
    Elementwise(
        name="logarithm",
        keras="log1p",
        tensorflow="Log1p",
        source=_TORCH,
        overflow=_LOGARITHMS,
        compute=np.log1p,
        domain=(-1.0, INFINITY),
        degree=0.0,
    ),
    Elementwise(
        name="logarithm",
        keras="log2",
        source=_TORCH,
        overflow=_LOGARITHMS,
        compute=np.log2,
        domain=(0.0, INFINITY),
        degree=0.0,
    ),
    Elementwise(
        name="logarithm",
        keras="log10",
        source=_TORCH,
        overflow=_LOGARITHMS,
        compute=np.log10,
        domain=(0.0, INFINITY),
        degree=0.0,
    ),
    Combination(
        name="logarithm",
        tensorflow="Xlogy",
        source=_TORCH,
        overflow=_LOGARITHMS,
        formula=combinations.times_logarithm,
    ),
    Combination(
        name="logarithm",
        tensorflow="Xlog1py",
        source=_TORCH,
        overflow=_LOGARITHMS,
        formula=combinations.times_logarithm_of_sum,
    ),
    Combination(
        name="cross-entropy",
        keras="binarycrossentropy categoricalcrossentropy sparsecategoricalcrossentropy ctcloss",
        source=_TORCH,
        in_float32=_LOGARITHMS,
        in_bfloat16=TOO_FEW_BITS,
        formula=combinations.cross_entropy,
    ),
    Combination(
        name="cross-entropy",
        tensorflow="SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits",
        source=f"{_PAPER}, {_TORCH}",
        in_float32=_SUMS_OF_EXPONENTIALS,
        in_bfloat16=TOO_FEW_BITS,
        formula=combinations.cross_entropy_of_logits,
    ),
    # Products, sums and means.
    Combination(
        name="product",
        keras="multiply kron outer",
        tensorflow="Mul MulNoNan",
        source=_BINARY16,
        overflow=_PRODUCTS,
        formula=combinations.multiplied,
    ),
    Combination(
        name="cross product",
        keras="cross",
        tensorflow="Cross",
        source=_BINARY16,
        overflow=_PRODUCTS,
        formula=combinations.cross_product,
    ),
    Combination(
        name="product with a power of 2",
        keras="ldexp",
        source=_BINARY16,
        overflow=_EXPONENTIALS,
        formula=combinations.scaled_by_power_of_two,
    ),
    Combination(
        name="product of elements",
        keras="prod",
        tensorflow="Prod",
        source=_TORCH,
        overflow=_LONG_PRODUCTS,
        formula=combinations.product_of_elements,
    ),
    Combination(
        name="cumulative product",
        keras="cumprod segmentprod",
        tensorflow="Cumprod UnsortedSegmentProd SegmentProd SegmentProdV2",
        source=_TORCH,
        overflow=_LONG_PRODUCTS,
        formula=combinations.products_of_elements,
    ),
    Combination(
        name="sum",
        keras="sum",
        tensorflow="Sum",
        source=f"{_PAPER}, {_TORCH}, {_GRAPPLER}",
        overflow=_SUMS,
        formula=combinations.summed,
    ),
    Combination(
        name="sum",
        keras="cumsum segmentsum scatter fold bincount",
        tensorflow=(
            "Cumsum UnsortedSegmentSum SegmentSum SegmentSumV2 ScatterNd DenseBincount Bincount"
            " SparseSegmentSum"
        ),
        source=f"{_PAPER}, {_TORCH}",
        overflow=_SUMS,
        formula=combinations.accumulated,
    ),
    Combination(
        name="sum",
        tensorflow="TensorScatterAdd",
        source=_PAPER,
        overflow=_SUMS,
        formula=combinations.accumulated_in,
    ),
    Combination(
        name="sum of products",
        keras="vdot",
        source=_PAPER,
        overflow="sums of products of large values overflow float16",
        formula=combinations.dot_product,
    ),
    Combination(
        name="mean",
        tensorflow="Mean SparseSegmentMean",
        source=f"{_PAPER}, {_GRAPPLER}",
        overflow=_SUMS,
        formula=combinations.averaged,
    ),
    Combination(
        name="mean",
        keras="mean",
        source=_KERAS,
        in_16_bits="Keras computes it in float32 for every input dtype",
        formula=combinations.averaged,
    ),
    Combination(
        name="average pooling",
        keras=(
            "averagepool averagepooling1d averagepooling2d averagepooling3d"
            " adaptiveaveragepool adaptiveaveragepooling1d adaptiveaveragepooling2d"
            " adaptiveaveragepooling3d globalaveragepooling2d"
            " globalaveragepooling3d"
        ),
        tensorflow="AvgPool AvgPool3D FractionalAvgPool",
        source="TensorFlow's avgpooling_op.cc",
        overflow=_SUMS_ON_CPU,
        most_terms=LARGEST_POOL,
        formula=combinations.averaged,
    ),
    Combination(
        name="average pooling",
        keras="globalaveragepooling1d",
        source=_KERAS,
        in_float32="with a mask, its sum over all steps may overflow float16",
        formula=combinations.averaged_with_mask,
    ),
    Combination(
        name="sum",
        keras="add",
        tensorflow="Add AddV2 BiasAdd BiasAddV1 AddN AccumulateNV2",
        source=_ARITHMETIC,
        formula=combinations.added,
    ),
    Combination(
        name="difference",
        keras="subtract",
        tensorflow="Sub",
        source=_ARITHMETIC,
        formula=combinations.subtracted,
    ),
    # Matrix products, and layers and kernels of them.
    Combination(
        name="matrix product",
        keras="matmul dot tensordot inner dense einsumdense",
        tensorflow=(
            "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum SparseMatMul"
            " SparseTensorDenseMatMul XlaDot XlaDotV2"
        ),
        source=f"{_TORCH}, {_GRAPPLER}",
        formula=combinations.matrix_product,
    ),
    Combination(
        name="convolution",
        keras=(
            "conv conv1d conv2d conv3d convtranspose conv1dtranspose conv2dtranspose"
            " conv3dtranspose"
        ),
        tensorflow=(
            "Conv Conv2D Conv3D Conv2DBackpropInput Conv2DBackpropInputV2 Conv3DBackpropInputV2"
            " XlaConv XlaConvV2"
        ),
        source=f"{_TORCH}, {_GRAPPLER}",
        formula=combinations.convolved,
    ),
    Combination(
        name="depthwise convolution",
        keras=(
            "depthwiseconv depthwiseconv1d depthwiseconv2d separableconv separableconv1d"
            " separableconv2d"
        ),
        tensorflow="DepthwiseConv2dNative DepthwiseConv2dNativeBackpropInput",
        source="TensorFlow's depthwise_conv_op.cc",
        overflow=_SUMS_ON_CPU,
        most_terms=LARGEST_DEPTHWISE_KERNEL,
        formula=combinations.convolved_by_channel,
    ),
    Fixed(
        name="recurrent layer",
        traits=("multiplies_matrices",),
        keras=(
            "rnn simplernn simplernncell lstm lstmcell gru grucell stackedrnncells convlstm1d"
            " convlstm2d convlstm3d"
        ),
        source=f"{_TORCH}, {_GRAPPLER}",
    ),
    Fixed(
        name="attention",
        traits=("multiplies_matrices",),
        keras="dotproductattention",
        source="Keras' source, TensorFlow's softmax_op_gpu.cu.cc",
        in_16_bits="its softmax runs in float32",
    ),
    Fixed(
        name="attention",
        traits=("multiplies_matrices",),
        keras=(
            "attention additiveattention multiheadattention groupqueryattention"
            " groupedqueryattention"
        ),
        source="Keras' source, TensorFlow's softmax_op_gpu.cu.cc",
        in_16_bits=(
            "without dropout, if Keras uses ops.dot_product_attention, its softmax runs in float32;"
            " otherwise in 16 bits, with float32 accumulation on GPUs"
        ),
    ),
    # Probabilities.
    Combination(
        name="softmax",
        keras="softmax",
        tensorflow="Softmax",
        source=f"{_PAPER}, {_TORCH}",
        in_float32=_PROBABILITIES,
        in_bfloat16=TOO_FEW_BITS,
        formula=combinations.softmax,
    ),
    Combination(
        name="logarithm of the softmax",
        keras="logsoftmax",
        tensorflow="LogSoftmax",
        source=f"{_PAPER}, {_TORCH}",
        in_float32=_SUMS_OF_EXPONENTIALS,
        in_bfloat16=TOO_FEW_BITS,
        formula=combinations.log_softmax,
    ),
    Fixed(
        name="sparsemax",
        keras="sparsemax",
        source=_KERAS,
        in_float32="its threshold is made of cumulative sums, which lose small elements",
        low=0.0,  # that of Keras 3.15 exceeds 1: its threshold adds up cumulative sums
    ),
    # Normalization.
    Fixed(
        name="normalization",
        keras="batchnormalization layernormalization groupnormalization rmsnormalization",
        source=_KERAS,
        in_16_bits="Keras computes the statistics in float32",
        low=-NORMALIZED,
        high=NORMALIZED,
    ),
    Fixed(
        name="normalization",
        keras="layernorm rmsnorm",
        source=_KERAS,
        in_16_bits="Keras computes it in float32 for every input dtype",
        low=-NORMALIZED,
        high=NORMALIZED,
    ),
    Fixed(
        name="normalization",
        tensorflow="FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3",
        source=_GRAPPLER,
        in_16_bits="its statistics are float32",
        low=-NORMALIZED,
        high=NORMALIZED,
    ),
    Fixed(
        name="normalization",
        keras="batchnorm",
        source=f"{_PAPER}, {_KERAS}",
        in_float32="the variance of values above 256 overflows float16",
        in_bfloat16=TOO_FEW_BITS,
        low=-NORMALIZED,
        high=NORMALIZED,
    ),
    Fixed(
        name="normalization",
        keras="spectralnormalization",
        source="kmp.layers",
        in_16_bits="kmp normalizes the kernel in float32",
    ),
    Fixed(
        name="correlation",
        keras="corrcoef",
        source=_KERAS,
        in_float32="the variance of values above 256 overflows float16",
        in_bfloat16=TOO_FEW_BITS,
        low=-1.0,
        high=1.0,
    ),
    Fixed(
        name="division by the norm",
        keras="normalize unitnormalization",
        source=f"{_PAPER}, {_TORCH}",
        in_float32=_SQUARES_OF_VECTOR,
        traits=("needs_range",),
        low=-1.0,
        high=1.0,
    ),
    Fixed(
        name="product of normalized vectors",
        keras="normalizeddot",
        source=f"{_PAPER}, {_TORCH}",
        in_float32=_SQUARES_OF_VECTOR,
        traits=("multiplies_matrices", "needs_range"),
        low=-1.0,
        high=1.0,
    ),
    # Roots, trigonometric functions and their inverses.
    Elementwise(
        name="root",
        keras="sqrt",
        tensorflow="Sqrt",
        overflow=_AMPLIFIES,
        compute=np.sqrt,
        domain=(0.0, INFINITY),
        degree=0.5,
    ),
    Elementwise(
        name="cube root",
        keras="cbrt",
        overflow=_AMPLIFIES,
        compute=np.cbrt,
        degree=1.0 / 3.0,
    ),
    Combination(
        name="hypotenuse",
        keras="hypot",
        formula=combinations.hypotenuse,
    ),
    Elementwise(
        name="sine",
        keras="sin",
        tensorflow="Sin",
        compute=np.sin,
        turns=(-math.pi / 2.0, math.pi / 2.0),
        period=2.0 * math.pi,
        degree=0.0,
    ),
    Elementwise(
        name="cosine",
        keras="cos",
        tensorflow="Cos",
        compute=np.cos,
        turns=(0.0, math.pi),
        period=2.0 * math.pi,
        degree=0.0,
    ),
    Elementwise(
        name="tangent",
        keras="tan",
        tensorflow="Tan",
        source=_TORCH,
        overflow=_AMPLIFIES,
        compute=np.tan,
        turns=(math.pi / 2.0 - 1e-14, math.pi / 2.0 + 1e-14),
        period=math.pi,
        bounds=(-INFINITY, INFINITY),
        degree=INFINITY,
    ),
    Elementwise(
        name="cardinal sine",
        keras="sinc",
        source=_KERAS,
        compute=np.sinc,
        turns=formulas.turns_of_sinc(),
        degree=0.0,
    ),
    Elementwise(
        name="arcsine",
        keras="arcsin",
        tensorflow="Asin",
        source=_TORCH,
        overflow=_AMPLIFIES,
        compute=np.arcsin,
        domain=(-1.0, 1.0),
    ),
    Elementwise(
        name="arccosine",
        keras="arccos",
        tensorflow="Acos",
        source=_TORCH,
        overflow=_AMPLIFIES,
        compute=np.arccos,
        domain=(-1.0, 1.0),
    ),
    Elementwise(
        name="arctangent",
        keras="arctan",
        tensorflow="Atan",
        compute=np.arctan,
        degree=0.0,
    ),
    Combination(
        name="angle",
        keras="arctan2",
        tensorflow="Atan2",
        formula=combinations.angle,
    ),
    Elementwise(
        name="inverse hyperbolic sine",
        keras="arcsinh",
        tensorflow="Asinh",
        compute=np.arcsinh,
        degree=0.0,
    ),
    Elementwise(
        name="inverse hyperbolic cosine",
        keras="arccosh",
        tensorflow="Acosh",
        overflow=_AMPLIFIES,
        compute=np.arccosh,
        domain=(1.0, INFINITY),
        degree=0.0,
    ),
    Elementwise(
        name="inverse hyperbolic tangent",
        keras="arctanh",
        tensorflow="Atanh",
        overflow=_AMPLIFIES,
        compute=np.arctanh,
        domain=(-1.0, 1.0),
    ),
    Elementwise(
        name="inverse error function",
        keras="erfinv",
        tensorflow="Erfinv",
        source=_TORCH,
        overflow=_AMPLIFIES,
        compute=formulas.erfinv,
        domain=(-1.0, 1.0),
    ),
    Elementwise(
        name="quantile of the normal distribution",
        tensorflow="Ndtri",
        overflow=_AMPLIFIES,
        compute=formulas.ndtri,
        domain=(0.0, 1.0),
    ),
    Elementwise(
        name="error function",
        keras="erf",
        tensorflow="Erf",
        source=_GRAPPLER,
        compute=formulas.erf,
        degree=0.0,
    ),
    Elementwise(
        name="complementary error function",
        keras="erfc",
        tensorflow="Erfc",
        source=_GRAPPLER,
        compute=formulas.erfc,
        degree=0.0,
    ),
    Elementwise(
        name="logarithm of the gamma function",
        tensorflow="Lgamma",
        overflow=_AMPLIFIES,
        compute=formulas.lgamma,
        domain=(0.0, INFINITY),
        turns=(1.4616321449683622,),
        degree=2.0,
    ),
    Elementwise(
        name="scaled Bessel function",
        tensorflow="BesselI0e",
        compute=formulas.bessel_i0e,
        turns=(0.0,),
        degree=0.0,
    ),
    # Activations.
    Elementwise(
        name="sigmoid",
        keras="sigmoid",
        tensorflow="Sigmoid",
        source=_GRAPPLER,
        compute=formulas.sigmoid,
        degree=0.0,
    ),
    Elementwise(
        name="hyperbolic tangent",
        keras="tanh",
        tensorflow="Tanh",
        source=_GRAPPLER,
        compute=np.tanh,
        degree=0.0,
    ),
    Elementwise(
        name="SiLU",
        keras="silu swish",
        source=_KERAS,
        compute=lambda x: x * formulas.sigmoid(x),
        turns=(-1.2784645427610738,),
        assumed=GATE,
    ),
    Elementwise(
        name="GELU",
        keras="gelu",
        source=_KERAS,
        compute=formulas.gelu,
        turns=(-0.7517915246935645,),
        assumed=GATE,
    ),
    Elementwise(
        name="Mish",
        keras="mish",
        source=_KERAS,
        compute=lambda x: x * np.tanh(formulas.softplus(x)),
        turns=(-1.1924312145154427,),
        assumed=GATE,
    ),
    Elementwise(
        name="softplus",
        keras="softplus",
        tensorflow="Softplus",
        source=_GRAPPLER,
        compute=formulas.softplus,
    ),
    Elementwise(
        name="logarithm of the sigmoid",
        keras="logsigmoid",
        source=_KERAS,
        compute=lambda x: -formulas.softplus(-x),
    ),
    Elementwise(
        name="softsign",
        keras="softsign",
        tensorflow="Softsign",
        source=_GRAPPLER,
        compute=lambda x: x / (1.0 + np.abs(x)),
        degree=0.0,
    ),
    Elementwise(
        name="ELU",
        keras="elu celu",
        tensorflow="Elu",
        source=_GRAPPLER,
        compute=formulas.elu,
    ),
    Elementwise(
        name="SELU",
        keras="selu",
        tensorflow="Selu",
        source=_GRAPPLER,
        compute=lambda x: 1.0507009873554805 * formulas.elu(x, 1.6732632423543772),
    ),
    Combination(
        name="ReLU",
        keras="relu",
        tensorflow="Relu",
        source=_GRAPPLER,
        formula=combinations.rectified,
    ),
    Combination(
        name="ReLU6",
        keras="relu6",
        tensorflow="Relu6",
        source=_GRAPPLER,
        formula=combinations.rectified_up_to_six,
    ),
    Combination(
        name="leaky ReLU",
        keras="leakyrelu prelu",
        tensorflow="LeakyRelu",
        source=_GRAPPLER,
        formula=combinations.leaky,
    ),
    Combination(
        name="threshold",
        keras="threshold hardshrink",
        source=_KERAS,
        formula=combinations.shrunk,
    ),
    Elementwise(
        name="soft shrinkage",
        keras="softshrink",
        source=_KERAS,
        compute=lambda x: x - np.clip(x, -0.5, 0.5),
    ),
    Elementwise(
        name="tanh shrinkage",
        keras="tanhshrink",
        source=_KERAS,
        compute=formulas.tanh_shrink,
    ),
    Elementwise(
        name="hard tanh",
        keras="hardtanh",
        source=_KERAS,
        compute=lambda x: np.clip(x, -1.0, 1.0),
        degree=0.0,
    ),
    Elementwise(
        name="hard sigmoid",
        keras="hardsigmoid",
        source=_KERAS,
        compute=lambda x: np.clip(x / 6.0 + 0.5, 0.0, 1.0),
        degree=0.0,
    ),
    Elementwise(
        name="hard SiLU",
        keras="hardsilu hardswish",
        source=_KERAS,
        compute=lambda x: x * np.clip(x / 6.0 + 0.5, 0.0, 1.0),
        turns=(-1.5,),
    ),
    Elementwise(
        name="sparse sigmoid",
        keras="sparsesigmoid",
        source=_KERAS,
        compute=lambda x: np.clip((x + 1.0) / 2.0, 0.0, 1.0),
        degree=0.0,
    ),
    Elementwise(
        name="sparse softplus",
        keras="sparseplus",
        source=_KERAS,
        compute=formulas.sparse_plus,
    ),
    Elementwise(
        name="squareplus",
        keras="squareplus",
        source=_KERAS,
        in_float32=_POWERS,
        in_bfloat16=TOO_FEW_BITS,
        compute=formulas.squareplus,
    ),
    Combination(
        name="gated linear unit",
        keras="glu",
        source=_KERAS,
        formula=combinations.gated,
    ),
    # Choices, rounding and remainders.
    Combination(
        name="magnitude",
        keras="abs absolute fabs",
        tensorflow="Abs",
        source=_ARITHMETIC,
        formula=combinations.absolute,
    ),
    Combination(
        name="opposite",
        keras="negative",
        tensorflow="Neg",
        source=_ARITHMETIC,
        formula=combinations.negative,
    ),
    Combination(
        name="maximum",
        keras="maximum fmax",
        tensorflow="Maximum",
        source=_ARITHMETIC,
        formula=combinations.larger,
    ),
    Combination(
        name="minimum",
        keras="minimum fmin",
        tensorflow="Minimum",
        source=_ARITHMETIC,
        formula=combinations.smaller,
    ),
    Combination(
        name="clip",
        tensorflow="ClipByValue",
        source=_GRAPPLER,
        formula=combinations.clipped,
    ),
    Elementwise(
        name="sign",
        keras="sign",
        tensorflow="Sign",
        source=_GRAPPLER,
        compute=np.sign,
        turns=(0.0,),
        degree=0.0,
        has_steps=True,
    ),
    Fixed(
        name="Heaviside function",
        keras="heaviside",
        source=_KERAS,
        low=0.0,
        high=1.0,
    ),
    Elementwise(
        name="floor",
        keras="floor",
        tensorflow="Floor",
        source=_ARITHMETIC,
        compute=np.floor,
        has_steps=True,
    ),
    Elementwise(
        name="ceiling",
        keras="ceil",
        tensorflow="Ceil",
        source=_ARITHMETIC,
        compute=np.ceil,
        has_steps=True,
    ),
    Elementwise(
        name="integer part",
        keras="trunc",
        source=_ARITHMETIC,
        compute=np.trunc,
        has_steps=True,
    ),
    Elementwise(
        name="rounding",
        keras="round",
        tensorflow="Round Rint",
        source=_ARITHMETIC,
        compute=np.rint,
        has_steps=True,
    ),
    Fixed(
        name="rounding to decimals",
        keras="roundtodecimals",
        source=_KERAS,
        in_float32="it multiplies by a power of 10, which overflows float16",
        in_bfloat16=TOO_FEW_BITS,
    ),
    Combination(
        name="floor of the quotient",
        keras="floordivide",
        tensorflow="FloorDiv TruncateDiv",
        source=_BINARY16,
        overflow=_QUOTIENTS,
        formula=combinations.floor_divided,
    ),
    Combination(
        name="remainder",
        keras="mod",
        tensorflow="FloorMod",
        formula=combinations.remainder,
    ),
    # Moves.
    Move(
        name="maximum",
        keras=(
            "max amax nanmax maxpool maxpooling1d maxpooling2d maxpooling3d adaptivemaxpool"
            " adaptivemaxpooling1d adaptivemaxpooling2d adaptivemaxpooling3d globalmaxpooling1d"
            " globalmaxpooling2d globalmaxpooling3d segmentmax"
        ),
        tensorflow=(
            "Max MaxPool MaxPoolV2 MaxPool3D MaxPoolWithArgmax FractionalMaxPool SegmentMax"
            " SegmentMaxV2 UnsortedSegmentMax"
        ),
        source=_GRAPPLER,
    ),
    Move(
        name="minimum",
        keras="min amin nanmin segmentmin",
        tensorflow="Min SegmentMin SegmentMinV2 UnsortedSegmentMin",
        source=_GRAPPLER,
    ),
    Move(
        name="cast",
        keras="cast saturatecast",
        tensorflow="Cast",
        source=_ARITHMETIC,
    ),
    Combination(
        name="median",
        keras="median nanmedian percentile nanpercentile quantile nanquantile",
        source=_KERAS,
        formula=combinations.interpolated,
    ),
    Combination(
        name="mean",
        keras="average",
        source=_PAPER,
        overflow=_SUMS,
        formula=combinations.averaged_together,
    ),
    Move(
        name="move",
        keras=(
            "append arraysplit broadcastto concatenate conj conjugate converttotensor copy"
            " cropimages cropping1d cropping2d cropping3d depthtospace diagonal dsplit dstack"
            " expanddims extractsequences flatten flip fliplr flipud getitem hsplit hstack identity"
            " linear meshgrid moveaxis nantonum nextafter permute ravel real rearrange repeat"
            " repeatvector reshape roll rot90 scatterupdate select slice sliceupdate sort"
            " spacetodepth split squeeze stack stopgradient swapaxes take takealongaxis tile topk"
            " transpose unstack upsampling1d vsplit vstack where"
        ),
        tensorflow=(
            "BatchToSpace BatchToSpaceND BroadcastTo CheckNumerics Concat ConcatV2 DeepCopy"
            " DepthToSpace DynamicPartition DynamicStitch EnsureShape ExpandDims"
            " FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars Fill Gather GatherNd GatherV2"
            " Identity IdentityN InvertPermutation MatrixDiagPart MatrixDiagPartV2"
            " MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 MirrorPad NextAfter Pack PadV2"
            " ParallelDynamicStitch PlaceholderWithDefault PreventGradient"
            " QuantizeAndDequantize QuantizeAndDequantizeV2 QuantizeAndDequantizeV3"
            " QuantizeAndDequantizeV4 RandomShuffle ReadVariableOp Real Reshape"
            " ResizeNearestNeighbor ResourceGather ResourceGatherNd Reverse ReverseSequence"
            " ReverseV2 Roll Select SelectV2 Slice Snapshot SpaceToDepth Split SplitV Squeeze"
            " StopGradient StridedSlice TensorListFromTensor TensorListGather"
            " TensorListGetItem TensorListSetItem TensorListStack TensorScatterMax"
            " TensorScatterMin TensorScatterUpdate TensorStridedSliceUpdate Tile TopK TopKV2"
            " Transpose Unique UniqueV2 Unpack XlaDynamicSlice XlaDynamicUpdateSlice"
        ),
        source=_GRAPPLER,
    ),
    Move(
        name="move",
        keras=(
            "activityregularization diag diagflat dropout masking pad padimages spatialdropout1d"
            " spatialdropout2d spatialdropout3d tril triu unfold zeropadding1d zeropadding2d"
            " zeropadding3d"
        ),
        tensorflow=(
            "DiagPart Diag ExtractImagePatches ExtractVolumePatches MatrixBandPart MatrixDiag"
            " MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 Pad SpaceToBatch SpaceToBatchND"
            " SparseToDense TensorListReserve"
        ),
        source=_GRAPPLER,
        adds_zeros=True,
    ),
    Combination(
        name="interval",
        tensorflow="Range LinSpace",
        formula=combinations.stepped,
    ),
    # Ranges that do not depend on operands.
    Fixed(
        name="look-up",
        keras="embedding reversibleembedding",
        source=_ASSUMPTION,
        low=-LEARNED,
        high=LEARNED,
    ),
    Fixed(
        name="one-hot encoding",
        keras="onehot multihot",
        tensorflow="OneHot",
        source=_GRAPPLER,
        low=0.0,
        high=1.0,
    ),
    Fixed(
        name="random number",
        tensorflow="RandomUniform StatelessRandomUniform StatelessRandomUniformV2",
        source=_RANDOM,
        low=0.0,
        high=1.0,
    ),
    Fixed(
        name="random number",
        tensorflow=(
            "ParameterizedTruncatedNormal RandomStandardNormal StatelessRandomNormal"
            " StatelessRandomNormalV2"
        ),
        source=_RANDOM,
        low=-_LARGEST_NORMAL,
        high=_LARGEST_NORMAL,
    ),
    Fixed(
        name="random number",
        tensorflow="StatelessTruncatedNormal StatelessTruncatedNormalV2 TruncatedNormal",
        source=_RANDOM,
        low=-2.0,
        high=2.0,
    ),
    Fixed(
        name="random number",
        tensorflow="RandomGamma RandomPoissonV2 StatelessRandomGammaV2 StatelessRandomGammaV3",
        low=0.0,
    ),
    Fixed(
        name="noise",
        keras="alphadropout gaussiandropout gaussiannoise",
        source=_KERAS,
    ),
    Fixed(
        name="angle",
        keras="angle",
        tensorflow="Angle",
        low=-math.pi,
        high=math.pi,
    ),
    Fixed(
        name="probability",
        tensorflow="Betainc Igamma Igammac",
        low=0.0,
        high=1.0,
    ),
    Fixed(
        name="unknown number",
        tensorflow="Bitcast CTCGreedyDecoder Digamma Empty Imag Polygamma Zeta",
        source="",
    ),
    # Images.
    Combination(
        name="interpolation",
        keras="upsampling2d upsampling3d",
        source=_KERAS,
        formula=combinations.interpolated,
    ),
    Combination(
        name="interpolation",
        keras="resize scaleandtranslate",
        tensorflow="ResizeArea ResizeBicubic ResizeBilinear ScaleAndTranslate",
        source="TensorFlow's image_ops.cc",
        in_float32="TensorFlow has no 16-bit kernel",
        formula=combinations.interpolated_by_splines,
    ),
    Combination(
        name="interpolation",
        keras="affinetransform perspectivetransform mapcoordinates",
        tensorflow="CropAndResize ImageProjectiveTransformV2 ImageProjectiveTransformV3",
        formula=combinations.interpolated_with_zeros,
    ),
    Combination(
        name="RGB to HSV",
        keras="rgbtohsv",
        tensorflow="RGBToHSV",
        overflow=_RECIPROCALS,
        domain=(0.0, INFINITY),
        formula=combinations.to_hsv,
    ),
    Combination(
        name="HSV to RGB",
        keras="hsvtorgb",
        tensorflow="HSVToRGB",
        formula=combinations.from_hsv,
    ),
    # Float32 and float64 only.
    Fixed(
        name="Fourier transform",
        keras="fft fft2 ifft2 rfft irfft stft istft",
        tensorflow=(
            "FFT FFT2D FFT3D FFTND IFFT IFFT2D IFFT3D IFFTND IRFFT IRFFT2D IRFFT3D IRFFTND RFFT"
            " RFFT2D RFFT3D RFFTND"
        ),
        source="TensorFlow's spectral_ops.cc",
        in_float32="TensorFlow has no 16-bit kernel",
    ),
    Fixed(
        name="spectrogram",
        keras="stftspectrogram",
        source=_KERAS,
        in_float32="the squares of its amplitudes exceed 65504, and it refuses bfloat16",
    ),
    Fixed(
        name="decomposition of a matrix",
        keras=(
            "eig eigh lufactor svd qr cholesky choleskyinverse det logdet slogdet inv pinv solve"
            " solvetriangular lstsq matrixrank"
        ),
        tensorflow=(
            "BandedTriangularSolve Cholesky Eig LogMatrixDeterminant Lu"
            " MatrixDeterminant MatrixExponential MatrixInverse MatrixLogarithm MatrixSolve"
            " MatrixSolveLs MatrixSquareRoot MatrixTriangularSolve Qr SelfAdjointEig"
            " SelfAdjointEigV2 Svd TridiagonalSolve"
        ),
        source="TensorFlow's core/kernels/linalg",
        in_float32="TensorFlow has no 16-bit kernel",
    ),
    Fixed(
        name="complex number",
        keras="polar",
        tensorflow="Complex ComplexAbs Conj",
        source="TensorFlow's math_ops.cc",
        in_float32="TensorFlow has no 16-bit kernel",
    ),
)


def _by_name(names_of: str) -> dict[str, Function]:
    found: dict[str, Function] = {}
    for function in FUNCTIONS:
        for name in getattr(function, names_of).split():
            assert name not in found, name
            found[name] = function
    return found


_OF_KERAS, _OF_TENSORFLOW = _by_name("keras"), _by_name("tensorflow")


def keras_function(name: str) -> Function | None:
    """Returns the function that an operation, layer or activation of Keras computes, by its name.

    Composite operations, such as `var`, have none: what they compute is seen where they are traced.

    Example:
    >>> from kmp.numerics import keras_function
    >>> keras_function("LogSoftmax") is keras_function("log_softmax")
    True
    """
    return _OF_KERAS.get(name.replace("_", "").lower())


def tensorflow_function(kind: str) -> Function | None:
    """Returns the function that a type of TensorFlow's operations computes.

    Example:
    >>> from kmp.numerics import tensorflow_function
    >>> tensorflow_function("Sin").name
    'sine'
    """
    return _OF_TENSORFLOW.get(kind)


def steepness(kind: str) -> int:
    """Returns the position of a type of TensorFlow's operations in the table: 0 is the steepest."""
    function = tensorflow_function(kind)
    return FUNCTIONS.index(function) if function else len(FUNCTIONS)


def einsum_function(subscripts: str) -> Function:
    """Returns what an einsum computes: a move, a sum, products, or a matrix product.

    It moves the elements of one tensor, as in `"bij->bji"`, or takes a diagonal. It sums elements
    of one tensor, as in `"btc->bc"` and `"bii->b"`, or products of pairs, as in the dot product
    `"bi,bi->b"`. It multiplies elements, as in `"bi,bi->bi"` and the outer product `"bi,bj->bij"`.
    All others are matrix products, such as `"bij,jk->bik"` and the product with a vector.

    Example:
    >>> from kmp.numerics import einsum_function
    >>> einsum_function("btc->bc").name, einsum_function("...ij,jk").name
    ('sum', 'matrix product')
    """
    # An ellipsis is one index more, with a one-letter name.
    text = subscripts.replace(" ", "").replace("...", ".")
    inputs, arrow, explicit_output = text.partition("->")
    operands = inputs.split(",")
    indices = "".join(operands)
    output = set(explicit_output)
    if not arrow:  # it keeps the indices that appear once
        output = {index for index in indices if indices.count(index) == 1 or index == "."}
    summed = set(indices) - output
    if len(operands) == 1:
        return LONG_SUM if summed else _MOVE
    if not summed:
        return _PRODUCT
    counts = [sum(index in each for each in operands) for index in summed]
    is_dot_product = all(output <= set(operand) for operand in operands)
    return _SUM_OF_PRODUCTS if 1 in counts or is_dot_product else _MATRIX_PRODUCT


GATE_FUNCTION = _OF_KERAS["silu"]
LONG_SUM = _OF_TENSORFLOW["Sum"]
# What kmp finds by the operands.
BELOW_MAXIMUM = Combination(name="difference from the maximum", formula=combinations.below_maximum)
TO_INTEGER = Move(
    name="cast to integers",
    source=_ARITHMETIC,
    overflow="16 bits round the numbers that it casts to integers",
)
SUM_WITH_ONE = Combination(
    name="sum", source=_PAPER, overflow=_SUMS, formula=combinations.sum_with_one
)
_MOVE = _OF_TENSORFLOW["Identity"]
_SUM_OF_PRODUCTS = _OF_KERAS["vdot"]
_PRODUCT = _OF_TENSORFLOW["Mul"]
_MATRIX_PRODUCT = _OF_TENSORFLOW["MatMul"]


def matrix_product_function(function: Function, shape: Sequence[int | None]) -> Function:
    """Returns what a matrix product with a result of some shape is.

    It is a sum of products if it multiplies vectors, not matrices: Tensor Cores gain nothing.
    """
    is_of_vectors = function is _MATRIX_PRODUCT and tuple(shape[-2:]) in ((), (1, 1))
    return _SUM_OF_PRODUCTS if is_of_vectors else function
