"""Every tolerance of the test suite, in one place."""

# float32 against transformers, one isolated prompt at a time, for logits of standard deviation 1.
LOGITS_FP32 = 1e-4
# float64 against an independent float64 computation of the same formula.
FP64 = 1e-10
# float32 against float64, relative to the largest magnitude.
FP32_RELATIVE = 2e-5
# Probabilities of the same prompt through two ways of running it, float32.
PROBABILITY_FP32 = 1e-5
# The same in sweeps over a thousand random prompts: of the worst conditioned ones either is up to 8e-5 off of float64.
PROBABILITY_SWEEP_FP32 = 1e-4
# Low-precision inputs: the error of an op over the error that rounding its inputs and outputs alone causes.
LOW_PRECISION_BUDGET = 2.0
# bfloat16: RMS logit error against the float32 isolated-prompt reference, relative to transformers' own.
BF16_ERROR_RATIO = 1.1
# Python floats: sums of a few probabilities.
PROBABILITY_SUM = 1e-12
# float32 pointwise arithmetic in another order: a few units in the last place.
FP32_ROUNDING = 1e-6
# bfloat16 kernels against float64, relative to the error that rounding the exact result to bfloat16 makes.
KERNEL_BUDGET = 3.0
# The delta rule's kernels in bfloat16: RMS error of one segment over that of plain bfloat16 code. A segment of one row
# averages few roundings.
SEGMENT_BUDGET = 4.0
# float32 gradients of a mean loss: one forked pass against isolated prompts, absolute for gradients below 1.
GRADIENT_FP32 = 1e-5
# bfloat16 logits of one prompt in two trees, relative to the standard deviation of all logits.
BF16_TWO_TREES = 0.05
# Probabilities, float32, resumed from states that were kept in bfloat16: each resume rounds once.
PROBABILITY_BF16_STATES = 1e-2
